"""Settings that are to be run: a row of a table, a figure, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field

from tntprune.methods import TNT, Config, to_dict
from tntprune.paper.authors import Authors
from tntprune.paper.names import LEARNERS, Table
from tntprune.paper.settings import PARAMETERS, Row

COLUMNS = ("backbone", "scheme", "regime", "method", "keep", "tokens", "gflops_bucket", "rates", "rho", "r")
MAPS = TNT(at=(1, 2, 3, 4, 5), keep=0.5, similar=25, recipe="paper")  # each block on its own
MAPPED = ("deit_base_distilled_patch16_224", "deit_small_distilled_patch16_224")  # of the paper's two figures


@dataclass(frozen=True)
class Entry:
    """One setting.

    Args:
        table: Where it belongs.
        backbone: What it is listed under: a name that `--backbones` takes.
        model: What is run: EViT and DynamicViT ran on plain DeiT, although they are listed under the distilled one.
        name: Of the line it belongs to in tables and figures.
        row: Its columns, with the names and values of published.csv.
        config: None for an unpruned model.
        rank: Its place among the rates of its table, from 1, which keeps most tokens; 0 where there are none.
        authors: What the paper reports beside it, None where it reports nothing.
        own: Whether that is of this very backbone, or of the nearest one that the paper has.
        note: What is odd about it; "" if nothing.
    """

    table: Table
    backbone: str
    model: str
    name: str
    row: Row
    config: Config | None
    rank: int = 0
    authors: Authors | None = None
    own: bool = True
    note: str = ""

    @property
    def method(self) -> str:
        """As published.csv has it."""
        return self.row["method"]

    @property
    def scheme(self) -> str:
        """Whether tokens go nowhere ("unpruned"), at one location ("single") or at several ("multi")."""
        return self.row["scheme"] or "unpruned"

    @property
    def parameter(self) -> str:
        """The rate, count or number that tells it from the others of its method."""
        return next((self.row[name] for name in PARAMETERS if self.row.get(name)), "")

    @property
    def training(self) -> str | None:
        """What has to be trained for it; None where nothing has."""
        return self.method if self.method in LEARNERS else None

    @property
    def run(self) -> str:
        """What is run, as one text: two entries of the same run are measured once."""
        return f"{self.model} {None if self.config is None else to_dict(self.config)}"


@dataclass(frozen=True)
class TokenMap:
    """A figure of token maps: `config` at each of its blocks on its own."""

    backbone: str
    name: str
    config: Config
    training: str


@dataclass(frozen=True)
class Agenda:
    """What is to be run.

    Args:
        entries: Rows of tables; those of the paper's own backbones are in the order of published.csv.
        ablation: Rows of the ablation table.
        bases: Unpruned models that no row is of, but that rows have to be compared with: plain DeiT.
        maps: Figures of token maps.
        left_out: (backbone, method, why it cannot be applied).
    """

    entries: tuple[Entry, ...]
    ablation: tuple[Entry, ...] = ()
    bases: tuple[Entry, ...] = ()
    maps: tuple[TokenMap, ...] = ()
    left_out: tuple[tuple[str, str, str], ...] = field(default=())

    @property
    def all(self) -> tuple[Entry, ...]:
        """Everything that is measured; the unpruned models first."""
        every = (*self.entries, *self.bases, *self.ablation)
        return tuple(sorted(every, key=lambda entry: entry.table != "unpruned"))

    @property
    def runs(self) -> list[Entry]:
        """Everything that is measured, what is the same only once."""
        found: dict[str, Entry] = {}
        for entry in self.all:
            found.setdefault(entry.run, entry)
        return list(found.values())

    @property
    def trainings(self) -> list[tuple[str, str]]:
        """(model, what is trained), in the order in which they are needed."""
        wanted = [(entry.model, entry.training) for entry in self.all if entry.training]
        wanted += [(one.backbone, one.training) for one in self.maps]
        return list(dict.fromkeys(wanted))

    @property
    def models(self) -> list[str]:
        """Everything that has to be loaded."""
        return list(dict.fromkeys([*(entry.model for entry in self.all), *(one.backbone for one in self.maps)]))


def unpruned(model: str, backbone: str, authors: Authors | None = None, own: bool = True) -> Entry:
    """The entry of an unpruned model."""
    row = {**dict.fromkeys(COLUMNS, ""), "backbone": model, "method": "none"}
    return Entry("unpruned", backbone, model, "unpruned", row, None, authors=authors, own=own)

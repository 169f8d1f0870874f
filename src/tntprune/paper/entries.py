"""Settings that are to be run: what methods are called, a row of a table, a figure, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tntprune.methods import TNT, Config, DynamicViT, EViT, to_dict
from tntprune.paper.settings import MODELS, MULTI, PARAMETERS, Authors, Columns, authors_of, read_csv

Table = Literal["unpruned", "single", "multi", "ablation"]

BACKBONES = tuple(MODELS.values())  # the paper's, as our commands name them
METHODS = {  # as published.csv names them, and as tables and figures do
    "random": "random drop", "topk": "Top-K", "zerotprune": "Zero-TPrune", "dynamicvit": "DynamicViT", "tome": "ToMe",
    "evit": "EViT", "tnt": "TNT", "tnt-mlp": "TNT, MLP scorer", "tnt-relative": "TNT, our recipe",
}  # fmt: skip
LEARNERS: dict[str, Config] = {  # what is trained; one training serves every rate and place
    "tnt": TNT(recipe="paper"),
    "tnt-mlp": TNT(recipe="paper", scorer="mlp"),
    "tnt-relative": TNT(recipe="relative"),
    "dynamicvit": DynamicViT(),
    "evit": EViT(),
}
COLUMNS = ("backbone", "scheme", "regime", "method", "keep", "tokens", "gflops_bucket", "rates", "rho", "r")
MAPS = TNT(at=(1, 2, 3, 4, 5), keep=0.5, similar=25, recipe="paper")  # each block on its own
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # of the ablation table
    "none": ("without the similarity step", {"similar": 0}),
    "sequential": ("sequential partition", {"partition": "sequential"}),
    "merge": ("merging", {"similar_how": "merge"}),
    "random": ("random partition", {}),
}
ABLATED = {  # the setting of each scheme, its place among the rates of its table, and its parameter
    "single": (TNT(at=3, keep=0.6, similar=25, recipe="paper"), 3, {"keep": "0.6"}),
    "multi": (TNT(at=MULTI, keep=0.9, similar=40, recipe="paper"), 2, {"rates": "0.9 0.9 0.9"}),
}


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
    row: Columns
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

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"maps-{self.backbone}-{self.training}.png"

    @property
    def caption(self) -> str:
        """What it shows."""
        return f"{self.backbone}, {self.name}: half of the tokens kept after each of the blocks 1 to 5, each on its own"


@dataclass(frozen=True)
class PaperPlan:
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
    left_out: tuple[tuple[str, str, str], ...] = ()

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
        return list(dict.fromkeys([*wanted, *((one.backbone, one.training) for one in self.maps)]))

    @property
    def models(self) -> list[str]:
        """Everything that has to be loaded."""
        return list(dict.fromkeys([*(entry.model for entry in self.all), *(one.backbone for one in self.maps)]))

    @property
    def told_left_out(self) -> list[dict[str, str]]:
        """What is left out, for JSON."""
        return [{"backbone": b, "method": m, "reason": reason} for b, m, reason in self.left_out]


def unpruned(model: str, backbone: str, authors: Authors | None = None, own: bool = True) -> Entry:
    """Return the entry of an unpruned model."""
    row = {**dict.fromkeys(COLUMNS, ""), "backbone": model, "method": "none"}
    return Entry("unpruned", backbone, model, "unpruned", row, None, authors=authors, own=own)


def ablation(backbone: str, stands_in: bool = False) -> tuple[Entry, ...]:
    """Return the rows of the ablation table, as they are printed; nothing for a backbone that it is not of.

    Args:
        backbone: What is run.
        stands_in: It takes the place of the table's own.
    """
    found = []
    for line in read_csv("ablation.csv"):
        if not stands_in and MODELS[line["backbone"]] != backbone:
            continue
        words, changes = VARIANTS[line["variant"]]
        config, rank, amount = ABLATED[line["scheme"]]
        row = {**dict.fromkeys(COLUMNS, ""), "backbone": backbone if stands_in else line["backbone"],
               "scheme": line["scheme"], "method": "tnt", **amount}  # fmt: skip
        source = f"{line['backbone']} {line['scheme']} ablation {line['variant']}"
        found.append(
            Entry(
                "ablation", backbone, backbone, f"{METHODS['tnt']}, {words}", row, config.changed(**changes), rank,
                authors_of(line, source) if line["top1"] else None, not stands_in, line["note"],
            )
        )  # fmt: skip
    return tuple(found)

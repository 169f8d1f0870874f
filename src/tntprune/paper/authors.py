"""What the paper reports beside a setting, and the place of each of its rows among the rates of its table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from tntprune.paper.settings import Published, published


@dataclass(frozen=True)
class Authors:
    """What the paper reports of a setting, and of the unpruned model in the same table.

    Args:
        source: Which row of the paper that is.
        backbone: As published.csv names it.
        top1: Percent.
        gmacs: Billions of multiply-accumulates, which the paper calls GFLOPs.
        images_per_s: On one A40; None where none is printed.
        base: The same three figures of the unpruned model.
        note: What is odd about the row; "" if nothing.
        not_met: Why the printed GFLOPs are not those of the setting; "" where they are.
    """

    source: str
    backbone: str
    top1: float
    gmacs: float
    images_per_s: int | None
    base: tuple[float, float, int]
    note: str = ""
    not_met: str = ""

    @property
    def drop(self) -> float:
        """Points of accuracy below the unpruned model."""
        return self.base[0] - self.top1

    @property
    def share(self) -> float:
        """Of the unpruned model's multiply-accumulates."""
        return self.gmacs / self.base[1]

    @property
    def speedup(self) -> float | None:
        """Times as many images/s as the unpruned model."""
        return None if self.images_per_s is None else self.images_per_s / self.base[2]


def authors_of(one: Published) -> Authors:
    """What the paper reports of a row."""
    base = next(b for b in published() if b.row["method"] == "none" and b.row["backbone"] == one.row["backbone"])
    figures = (base.top1, base.gmacs, base.images_per_s or 0)
    return Authors(
        one.name, one.row["backbone"], one.top1, one.gmacs, one.images_per_s, figures, one.note, one.not_met
    )  # fmt: skip


def ranking(backbones: Iterable[str]) -> dict[str, int]:
    """The place of each row of some backbones of published.csv, by its name: 1 keeps most tokens."""
    return {name: rank for backbone in backbones for name, rank in _ranks(backbone).items()}


@cache
def _ranks(backbone: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for scheme, column in (("single", None), ("multi", "gflops_bucket")):
        rows = [one for one in published() if (one.row["backbone"], one.row["scheme"]) == (backbone, scheme)]
        amounts = {one.name: float(one.row[column] if column else one.printed) for one in rows}
        places = {amount: rank for rank, amount in enumerate(sorted(set(amounts.values()), reverse=True), 1)}
        found |= {name: places[amount] for name, amount in amounts.items()}
    return found

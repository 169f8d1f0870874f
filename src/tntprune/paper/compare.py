"""Our figures beside the authors': drops, shares and ratios, and whether the methods come in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from math import nan, sqrt
from statistics import fmean
from typing import Any

from tntprune.paper.entries import Entry
from tntprune.paper.settings import published, ranking
from tntprune.report.summary import error_of_difference
from tntprune.sweep.results import ResultRow

STANDS_FOR = ("deit_tiny_distilled", "deit_small_distilled", "deit_base_distilled")  # a model that the paper has not
SURE = 2  # standard errors beyond which a difference is no chance


@dataclass(frozen=True)
class Measured:
    """A setting of the plan, what was measured of it, and the same of the unpruned model that it was put on."""

    entry: Entry
    row: ResultRow
    base: ResultRow

    @property
    def drop(self) -> float:
        """Points of top-1 below the unpruned model."""
        return self.base.top1 - self.row.top1

    @property
    def share(self) -> float:
        """Of the unpruned model's multiply-accumulates."""
        return self.row.macs / self.row.base_macs

    @property
    def their_drop(self) -> float | None:
        """The drop that the authors report; None where the paper has no such row."""
        return None if self.entry.authors is None else self.entry.authors.drop

    @property
    def difference(self) -> float | None:
        """How many points more we lose than the authors did; None where the paper has no such row."""
        return None if self.their_drop is None else self.drop - self.their_drop

    def told(self) -> dict[str, Any]:
        """Return both as JSON values."""
        row, authors = self.row, self.entry.authors
        ours = {"top1": row.top1, "drop": self.drop, "macs": row.macs, "share": self.share,
                "images_per_s": row.images_per_s, "speedup": row.speedup, "images": row.images,
                "key": row.setting.key}  # fmt: skip
        theirs = None if authors is None else {**asdict(authors), "drop": authors.drop, "share": authors.share}
        return {**self.entry.row, "table": self.entry.table, "model": self.entry.model, "name": self.entry.name,
                "ours": ours, "authors": theirs, "difference": self.difference}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two methods that the authors' figures put in one order, and ours in the other.

    Args:
        better: What the authors have ahead.
        worse: What they have behind.
        theirs: By how many points, above 0.
        ours: By how many points we have the first ahead: below 0.
        error: Standard error of that difference, in points; an upper bound.
    """

    better: str
    worse: str
    theirs: float
    ours: float
    error: float

    @property
    def clear(self) -> bool:
        """Whether our difference is more than chance allows."""
        return abs(self.ours) > SURE * self.error


@dataclass(frozen=True)
class Agreement:
    """The order of methods at one rate of one table.

    Args:
        backbone: Ours.
        against: Whose figures ours are compared with, as published.csv names it.
        scheme: "single" or "multi".
        regime: "high" or "low".
        rank: Of the rate, from 1.
        theirs: Top-1 that the authors have, by method, the best first; of methods that both have.
        ours: The same of ours.
        tau: Kendall's tau-b: 1 for the same order, -1 for the opposite one.
        same: Pairs in the same order.
        pairs: Those in the opposite order.
    """

    backbone: str
    against: str
    scheme: str
    regime: str
    rank: int
    theirs: dict[str, float]
    ours: dict[str, float]
    tau: float
    same: int
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Total:
    """All agreements of one kind together.

    Args:
        rates: How many there are.
        tau: The mean.
        same: Pairs of methods in the same order.
        unclear: Pairs in the opposite order, by no more than chance allows.
        clear: Pairs in the opposite order, by more.
    """

    rates: int
    tau: float
    same: int
    unclear: int
    clear: int


def backbones_of(measured: Iterable[Measured]) -> list[str]:
    """Return what the settings are listed under, in order."""
    return list(dict.fromkeys(one.entry.backbone for one in measured))


def of_table(measured: Iterable[Measured], backbone: str, table: str) -> list[Measured]:
    """Return the settings of one table."""
    return [one for one in measured if (one.entry.backbone, one.entry.table) == (backbone, table)]


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Kendall's tau-b of two lists of figures of the same things; NaN where one has no order at all."""
    signs = [((a > b) - (a < b), (c > d) - (c < d)) for (a, c), (b, d) in combinations(zip(one, other, strict=True), 2)]
    whole = sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs))
    return sum(a * b for a, b in signs) / whole if whole else nan


def agreements(measured: Iterable[Measured]) -> list[Agreement]:
    """Compare the order of methods at each rate of both schemes, for all backbones.

    Methods are ordered by top-1, as in the paper. The rates that one table sets beside each other have about the same
    cost, and not exactly.
    """
    groups: dict[tuple[str, str, str, int], dict[str, Measured]] = {}
    for one in measured:
        entry = one.entry
        if entry.table in ("single", "multi"):
            key = (entry.backbone, entry.scheme, entry.row["regime"], entry.rank)
            groups.setdefault(key, {})[entry.method] = one
    found = []
    for (backbone, scheme, regime, rank), own in groups.items():
        authors = next((one.entry.authors for one in own.values() if one.entry.own and one.entry.authors), None)
        for against in STANDS_FOR if authors is None else (authors.backbone,):
            theirs = _printed(against).get((scheme, rank), {})
            common = sorted((method for method in own if method in theirs), key=lambda method: -theirs[method])
            if len(common) > 1:
                top1 = {method: own[method].row.top1 for method in common}
                pairs, same = _pairs(own, top1, theirs)
                tau = kendall(list(top1.values()), [theirs[method] for method in common])
                ours = dict(sorted(top1.items(), key=lambda item: -item[1]))
                printed = {method: theirs[method] for method in common}
                found.append(Agreement(backbone, against, scheme, regime, rank, printed, ours, tau, same, tuple(pairs)))
    return found


def _pairs(own: dict[str, Measured], top1: dict[str, float], theirs: dict[str, float]) -> tuple[list[Pair], int]:
    """Return the pairs of methods in the opposite order, and how many are in the same one."""
    pairs, same = [], 0
    for better, worse in combinations(top1, 2):
        gap, back = top1[better] - top1[worse], theirs[better] - theirs[worse]
        if back > 0 > gap:
            error = error_of_difference(own[better].row, own[worse].row)
            pairs.append(Pair(better, worse, back, gap, error))
        elif back > 0 and gap > 0:
            same += 1
    return pairs, same


def total(agreements: Sequence[Agreement]) -> Total:
    """Put several agreements together."""
    taus = [one.tau for one in agreements if one.tau == one.tau]
    clear = [pair.clear for one in agreements for pair in one.pairs]
    mean = fmean(taus) if taus else nan
    return Total(len(agreements), mean, sum(one.same for one in agreements), clear.count(False), clear.count(True))


@cache
def _printed(backbone: str) -> dict[tuple[str, int], dict[str, float]]:
    """Return published top-1 by (scheme, rank) and method."""
    ranks = ranking((backbone,))
    found: dict[tuple[str, int], dict[str, float]] = {}
    for one in published():
        if one.name in ranks:
            found.setdefault((one.row["scheme"], ranks[one.name]), {})[one.row["method"]] = one.authors.top1
    return found

"""Our figures beside the authors': drops, shares and ratios, and whether the methods come in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import nan, sqrt
from statistics import fmean

from tntprune.paper.authors import ranking
from tntprune.paper.entries import Entry
from tntprune.paper.settings import published
from tntprune.report.summary import error_of_difference, standard_error
from tntprune.sweep.results import Row

STANDS_FOR = ("deit_tiny_distilled", "deit_small_distilled", "deit_base_distilled")  # a model that the paper has not
SURE = 2  # standard errors beyond which a difference is no chance


@dataclass(frozen=True)
class Measured:
    """A setting of the plan and what was measured of it.

    Args:
        entry: What was asked for.
        row: What was measured.
        base: The same of the unpruned model that the setting was put on.
    """

    entry: Entry
    row: Row
    base: Row

    @property
    def drop(self) -> float:
        """Points of top-1 below the unpruned model."""
        return self.base.top1 - self.row.top1

    @property
    def share(self) -> float:
        """Of the unpruned model's multiply-accumulates."""
        return self.row.macs / self.row.base_macs

    @property
    def difference(self) -> float | None:
        """How many points more we lose than the authors did; None where the paper has no such row."""
        return None if self.entry.authors is None else self.drop - self.entry.authors.drop


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
    """What the settings are listed under, in order."""
    return list(dict.fromkeys(one.entry.backbone for one in measured))


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-b of two lists of figures of the same things; NaN where one of them has no order at all."""
    count = {"same": 0, "opposite": 0, "one": 0, "other": 0}
    for i in range(len(one)):
        for j in range(i):
            a, b = one[i] - one[j], other[i] - other[j]
            if a and b:
                count["same" if (a > 0) == (b > 0) else "opposite"] += 1
            elif a:
                count["one"] += 1
            elif b:
                count["other"] += 1
    both = count["same"] + count["opposite"]
    whole = sqrt((both + count["one"]) * (both + count["other"]))
    return (count["same"] - count["opposite"]) / whole if whole else nan


def agreements(measured: Iterable[Measured]) -> list[Agreement]:
    """The order of methods at each rate of both schemes, for all backbones.

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
        for against in _against(own.values()):
            theirs = _figures(against).get((scheme, rank), {})
            common = [method for method in own if method in theirs]
            if len(common) > 1:
                made = _agreement({m: own[m] for m in common}, {m: theirs[m] for m in common})
                found.append(Agreement(backbone, against, scheme, regime, rank, *made))
    return found


def total(agreements: Sequence[Agreement]) -> Total:
    """Several agreements in one."""
    taus = [one.tau for one in agreements if one.tau == one.tau]
    pairs = [pair for one in agreements for pair in one.pairs]
    clear = sum(pair.clear for pair in pairs)
    mean = fmean(taus) if taus else nan
    return Total(len(agreements), mean, sum(one.same for one in agreements), len(pairs) - clear, clear)


def _agreement(
    own: dict[str, Measured], printed: dict[str, float]
) -> tuple[dict[str, float], dict[str, float], float, int, tuple[Pair, ...]]:
    theirs = dict(sorted(printed.items(), key=lambda item: -item[1]))
    top1 = {method: own[method].row.top1 for method in theirs}
    pairs, same = [], 0
    for better, worse in combinations(theirs, 2):
        gap, back = top1[better] - top1[worse], theirs[better] - theirs[worse]
        if back > 0 > gap:
            pairs.append(Pair(better, worse, back, gap, _error(own[better].row, own[worse].row)))
        elif back > 0 and gap > 0:
            same += 1
    tau = kendall(list(top1.values()), list(theirs.values()))
    return theirs, dict(sorted(top1.items(), key=lambda item: -item[1])), tau, same, tuple(pairs)


def _error(one: Row, other: Row) -> float:
    if one.setting.model == other.setting.model:
        return error_of_difference(one, other)
    return sqrt(standard_error(one) ** 2 + standard_error(other) ** 2)


def _against(own: Iterable[Measured]) -> tuple[str, ...]:
    """Whose published figures: the backbone's own, or those that it stands in for."""
    listed = [one.entry for one in own]
    authors = next((entry.authors for entry in listed if entry.own and entry.authors is not None), None)
    return STANDS_FOR if authors is None else (authors.backbone,)


@cache
def _figures(backbone: str) -> dict[tuple[str, int], dict[str, float]]:
    """Published top-1 by (scheme, rank) and method."""
    ranks = ranking((backbone,))
    found: dict[tuple[str, int], dict[str, float]] = {}
    for one in published():
        if one.row["backbone"] == backbone and one.name in ranks:
            found.setdefault((one.row["scheme"], ranks[one.name]), {})[one.row["method"]] = one.top1
    return found

"""What the rows say, in words, and how sure that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import sqrt

from tntprune.report.groups import SCHEMES, Group
from tntprune.report.tables import GAP, LOW, NEAR, comparable, equal_costs
from tntprune.sweep.results import ResultRow

Bucket = dict[str, ResultRow]  # the row of each line at one cost
NAMED = 5  # methods that are named before the rest is counted
NOISE = (
    "How sure that is: the standard error of a top-1 is that of a binomial share. The rows were measured on the same "
    "images, so a difference of two rows is surer than if each had had images of its own; how much surer cannot be "
    "told from counts alone. Its standard error is therefore an upper bound: that of independent images, or less where "
    "so few guesses differ from the unpruned model's that the rows cannot differ on more images. A difference within "
    "two of these is called a tie, or within noise; what follows ± is two of them. Methods are compared at equal MACs "
    f"(multiply-accumulates, within {NEAR:g} point of the unpruned model's); where a method has no setting at a cost, "
    f"its accuracy there is interpolated between two of its settings that are at most {GAP:g} points apart."
)


def standard_error(row: ResultRow) -> float:
    """Return that of a row's top-1, in points of percent.

    Binomial, with two right and two wrong images more (Agresti, Coull).
    """
    total = row.images + 4
    guess = (row.right + 2) / total
    return 100 * sqrt(guess * (1 - guess) / total)


def error_of_difference(one: ResultRow, other: ResultRow) -> float:
    """Return an upper bound of the standard error of the difference of two top-1, in points of percent.

    Two rows of one model on the same images can differ only where one of them does not guess as the unpruned model
    does; the variance of the difference is at most that share of the images, over their number.
    """
    apart = sqrt(standard_error(one) ** 2 + standard_error(other) ** 2)
    if one.images != other.images or one.setting.model != other.setting.model:
        return apart
    differing = min(one.images, 2 * one.images - one.agreeing - other.agreeing)
    return min(apart, 100 * sqrt(differing) / one.images)


def tie(one: ResultRow, other: ResultRow) -> bool:
    """Return whether the difference of two rows of a backbone lies within two standard errors."""
    return abs(one.top1 - other.top1) <= 2 * error_of_difference(one, other)


def summary(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Return for each backbone and scheme what it is about, and a paragraph on each of the paper's two regimes."""
    found = []
    for group in groups:
        on = f", {group.label}" if len(groups) > 1 else ""
        for backbone in group.backbones:
            base = backbone.base
            right = f"{base.top1:.1f} % of {base.images:,} images (standard error {standard_error(base):.1f})"
            for scheme in group.schemes:
                if backbone.lines(scheme):
                    topic = f"{backbone.label}, {SCHEMES[scheme]}{on}: unpruned {right}"
                    costs = {cost: comparable(lines) for cost, lines in equal_costs(backbone, scheme).items()}
                    found.append((topic, _regimes(base, costs)))
    return found


def _regimes(base: ResultRow, found: dict[float, Bucket]) -> list[str]:
    said = []
    for words, high in ((f"At {LOW} % of the MACs or more", True), (f"Below {LOW} % of the MACs", False)):
        own = {share: bucket for share, bucket in found.items() if (share >= LOW) == high}
        if own:
            compared = [bucket for bucket in own.values() if len(bucket) > 1]
            said.append(f"{words}: {_best(compared)} {_price(base, *next(reversed(own.items())))}")
    return said


def _best(found: Sequence[Bucket]) -> str:
    """Say who is first at how many costs and by how much, and who cannot be told from the first at any of them."""
    if not found:
        return "no two methods have the same cost and can be compared."
    leads: dict[str, list[tuple[float, bool]]] = {}  # over the next method, and whether it is a tie
    close: Counter[str] = Counter()
    for bucket in found:
        (first, row), (_, second), *_ = sorted(bucket.items(), key=lambda item: -item[1].top1)
        leads.setdefault(first, []).append((row.top1 - second.top1, tie(row, second)))
        close.update(name for name, other in bucket.items() if other is row or tie(row, other))
    name, own = max(leads.items(), key=lambda item: len(item[1]))
    small, large = (f"{lead:.1f}" for lead in (min(own)[0], max(own)[0]))
    by = small if small == large else f"{small} to {large}"
    ties = sum(tied for _, tied in own)
    sure = "beyond noise" if not ties else f"{ties} of {len(own)} ties"
    if ties == len(own):
        sure = "a tie" if ties == 1 else "all ties"
    costs = f"at {len(own)} of {len(found)} costs" if len(found) > 1 else "at the one cost compared"
    told = f"{name} is first {costs}, by {by} points over the next method ({sure})."
    if ties == len(own):
        told = f"No method is first beyond noise: {name} leads {costs}, by {by} points ({sure})."
    if others := [other for other, times in close.items() if times == len(found) and other != name]:
        where = "at every cost" if len(found) > 1 else "there"
        more = f"; and {len(others) - NAMED} more" if len(others) > NAMED else ""
        told += f" Within noise of the first {where}: {'; '.join(others[:NAMED])}{more}."
    return told


def _price(base: ResultRow, cost: float, bucket: Bucket) -> str:
    """Say what the least cost of a regime takes away."""
    name, row = max(bucket.items(), key=lambda item: item[1].top1)
    lost, error = base.top1 - row.top1, 2 * error_of_difference(base, row)
    told = (
        f"The least of these costs, {cost:.0f} %, leaves {row.top1:.1f} % with {name}, {abs(lost):.1f} ± {error:.1f} "
        f"points {'above' if lost < 0 else 'below'} the unpruned model"
    )
    return f"{told}: within noise on {base.images:,} images." if tie(base, row) else f"{told}."

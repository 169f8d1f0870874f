"""What the rows say, in words, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from tntprune.report.groups import SCHEMES, Backbone, Group
from tntprune.report.tables import LOW, buckets
from tntprune.results import Row

NOISE = (
    "How sure that is: the standard error of a top-1 is that of a binomial share. The rows were measured on the same "
    "images, so a difference of two rows is surer than if each had had images of its own; how much surer cannot be "
    "told from counts alone. Its standard error is therefore an upper bound: that of independent images, or less where "
    "so few guesses differ from the unpruned model's that the rows cannot differ on more images. A difference within "
    "two of these is called a tie."
)


def standard_error(row: Row) -> float:
    """Of a row's top-1, in points of percent: binomial, with two right and two wrong images more (Agresti, Coull)."""
    total = row.images + 4
    guess = (row.right + 2) / total
    return 100 * sqrt(guess * (1 - guess) / total)


def error_of_difference(one: Row, other: Row) -> float:
    """An upper bound of the standard error of the difference of two top-1, in points of percent.

    Two rows of one backbone on the same images can differ only where one of them does not guess as the unpruned
    model does; the variance of the difference is at most that share of the images, over their number.
    """
    apart = sqrt(standard_error(one) ** 2 + standard_error(other) ** 2)
    if one.images != other.images:
        return apart
    differing = min(one.images, 2 * one.images - one.agreeing - other.agreeing)
    return min(apart, 100 * sqrt(differing) / one.images)


def tie(one: Row, other: Row) -> bool:
    """Whether the difference of two rows of a backbone lies within two standard errors."""
    return abs(one.top1 - other.top1) <= 2 * error_of_difference(one, other)


def summary(groups: Sequence[Group]) -> list[str]:
    """One paragraph for each backbone and scheme."""
    found = []
    for group in groups:
        for backbone in group.backbones:
            on = f" on {group.label}" if len(groups) > 1 else ""
            own = [_scheme(backbone, scheme) for scheme in group.schemes if backbone.lines(scheme)]
            found.append(
                f"{backbone.label}{on}: the unpruned model is right on {backbone.base.top1:.1f} % of "
                f"{backbone.base.images:,} images (standard error {standard_error(backbone.base):.1f}). "
                + (" ".join(own) or "Nothing else was measured of it.")
            )
    return found


def _scheme(backbone: Backbone, scheme: str) -> str:
    found = buckets(backbone, scheme)
    high = {share: bucket for share, bucket in found.items() if share >= LOW}
    low = {share: bucket for share, bucket in found.items() if share < LOW}
    said = [
        f"{name}, {_regime(backbone.base, own)}"
        for name, own in ((f"at {LOW} % of the MACs or more", high), (f"below {LOW} %", low))
        if own
    ]
    return f"With {SCHEMES[scheme]}, {'; '.join(said)}."


def _regime(base: Row, found: dict[int, dict[str, Row]]) -> str:
    """Who is best at how many shares and by how much, and what that costs at the smallest."""
    wins: dict[str, list[tuple[float, bool]]] = {}  # by method: the lead over the next one, and whether it is a tie
    for bucket in found.values():
        if len(bucket) > 1:
            (best, row), (_, other), *_ = sorted(bucket.items(), key=lambda item: -item[1].top1)
            wins.setdefault(best, []).append((row.top1 - other.top1, tie(row, other)))
    compared = sum(map(len, wins.values()))
    if wins:
        ranked = sorted(wins.items(), key=lambda item: -len(item[1]))
        parts = [_lead(name, leads, compared) for name, leads in ranked]
        said = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    else:
        said = "there are no two methods of about the same cost to compare"
    share, bucket = next(reversed(found.items()))
    name, row = max(bucket.items(), key=lambda item: item[1].top1)
    drop = base.top1 - row.top1
    bound = "no more than chance allows" if tie(base, row) else f"give or take {2 * error_of_difference(base, row):.1f}"
    way = f"lower by {drop:.1f}" if drop > 0 else f"higher by {-drop:.1f}" if drop < 0 else "the same"
    points = f" points ({bound})" if drop else ""
    return f"{said}; at about {share} % {name} has {row.top1:.1f} %, {way}{points} than the unpruned model".replace(
        "the same than", "the same as"
    )


def _lead(name: str, leads: list[tuple[float, bool]], compared: int) -> str:
    small, large = min(lead for lead, _ in leads), max(lead for lead, _ in leads)
    by = f"{small:.1f}" if f"{small:.1f}" == f"{large:.1f}" else f"{small:.1f} to {large:.1f}"
    ties = sum(tied for _, tied in leads)
    sure = (
        ("a tie" if len(leads) == 1 else "all ties") if ties == len(leads)
        else "beyond noise" if not ties else f"{ties} of them {'a tie' if ties == 1 else 'ties'}"
    )  # fmt: skip
    count = f"at {len(leads)} of {compared} shares" if compared > 1 else "at the one share compared"
    return f"{name} is best {count}, by {by} over the next method ({sure})"

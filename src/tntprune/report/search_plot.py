"""The front of a search as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tntprune.report.plot_style import COLOURS, SHAPES, blank, finished
from tntprune.search.found import Found
from tntprune.search.verified import Verified, lost_what
from tntprune.system.storage import write
from tntprune.system.units import unit_of

NARROWEST = 0.2  # the least that is shown of the cost, as a share of it


def draw_front(path: Path, found: Found, title: str) -> None:
    """Write a PNG: divergence, and points lost, against cost.

    Args:
        path: Where.
        found: By a search.
        title: Above the picture.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    figure = blank(9.6, 4.6)
    left, right = figure.subplots(1, 2)
    what = lost_what(found.chosen.overall)
    _panel(left, found, lambda point: point.distance)
    embeds = "cosine" in found.chosen.overall
    left.set_ylabel("1 - cosine similarity to unpruned" if embeds else "KL divergence from the unpruned model")
    if found.front[-1].distance > 0:
        left.set_yscale("log")
    _panel(right, found, lambda point: point.lost)
    right.set_ylabel(f"points of {what} lost")
    right.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    handles, names = left.get_legend_handles_labels()
    few, many = found.photos
    figure.legend(
        handles, names, loc="outside lower center", ncols=6, frameon=False, fontsize=9, title_fontsize=8,
        title=f"on all {few + many} photos, of which the search used {few}",
    )  # fmt: skip
    figure.suptitle(f"{title}: {found.plan.config.method}, {found.budget}", fontsize=11)
    write(path, finished(figure, "png"))


def _panel(axis: Any, found: Found, height: Callable[[Verified], float]) -> None:
    unit, name = (1e-3, "ms per batch") if found.budget.timed else unit_of(found.whole)

    def at(points: list[Verified]) -> tuple[list[float], list[float]]:
        return [point.cost / unit for point in points], [height(point) for point in points]

    axis.plot(*at(found.front), "o-", color=COLOURS[0], markersize=4, linewidth=1.4, label="front")
    if found.others:
        axis.plot(*at(found.others), "o", color="0.7", markersize=4, label="beaten")
    for place, point in enumerate(found.references):
        look = {"color": COLOURS[(1 + place) % len(COLOURS)], "markersize": 7}
        axis.plot(*at([point]), SHAPES[(1 + place) % len(SHAPES)], label=point.name, **look)
    star = {"color": COLOURS[0], "markersize": 15, "markeredgecolor": "white", "zorder": 4}
    axis.plot(*at([found.chosen]), "*", label="chosen", **star)
    least, most = axis.get_xlim()
    widen = max(0.0, NARROWEST * most - (most - least)) / 2  # or all marks would be digits behind the same start
    axis.set_xlim(least - widen, most + widen)
    axis.locator_params(axis="x", nbins=5)
    axis.set_xlabel(name if found.budget.timed else f"{name} per image")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.93")

"""Accuracy against cost: the paper's two rows of plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tntprune.report.groups import SCHEMES, BackboneRows
from tntprune.report.plot_style import Form, Look, blank, drawable, finished, looks
from tntprune.sweep.results import ResultRow
from tntprune.system.units import unit_of

GREY = "#777777"
COLUMNS = 3  # backbones in one figure
XY = tuple[float, float]


def curve(lines: Mapping[str, Sequence[XY]], base: XY, x: str, y: str, form: Form) -> bytes:
    """Draw one line a name over a cost, the unpruned model as a dashed one.

    Args:
        lines: (cost, accuracy) by name.
        base: The same of the unpruned model.
        x: What the cost is.
        y: What the accuracy is.
        form: Of the file.
    """
    figure = blank(6.4, 4.0)
    axis = figure.subplots()
    _panel(axis, {name: sorted(points) for name, points in lines.items()}, base, looks(lines))
    axis.set(xlabel=x, ylabel=y)
    axis.legend(frameon=False, loc="lower right")
    return finished(figure, form)


def draw_curves(
    backbones: Sequence[BackboneRows], scheme: str, form: Form, styles: Mapping[str, Look], narrow: bool = False
) -> bytes:
    """Draw top-1 against multiply-accumulates (top) and speed-up (bottom), one column per backbone.

    Speed-ups are comparable across runs, because each was timed in turns with the unpruned model; images/s are not.

    Args:
        backbones: Rows that can be compared, see `grouped`.
        scheme: "single" or "multi": the rows that are drawn.
        form: Of the file.
        styles: The look of each line, to have the same one in several figures.
        narrow: All plots below each other, for a phone.
    """
    columns = len(backbones)
    fast = any(row.speedup for backbone in backbones for row in (backbone.base, *backbone.rows))
    pair = (3.2, 3.2 if fast else 0.8)  # inches of the plot on top and of the one below
    if narrow:
        width, tall, shape, heights = 4.2, sum(pair) * columns, (2 * columns, 1), pair * columns
    else:
        width, tall, shape, heights = {1: 6.4, 2: 9.4}.get(columns, 3.35 * columns), sum(pair), (2, columns), pair
    shown = [name for name in styles if any(name in backbone.lines(scheme) for backbone in backbones)]
    across = 2 if narrow else min(5, int(width // 1.9))
    figure = blank(width, tall + 0.2 * -(-(len(shown) + 1) // across))
    axes = figure.subplots(*shape, squeeze=False, height_ratios=heights)
    for number, backbone in enumerate(backbones):
        upper, lower = (axes[2 * number][0], axes[2 * number + 1][0]) if narrow else axes[:, number]
        scale, unit = unit_of(backbone.base.macs)
        _fill(upper, backbone, scheme, styles, partial(_work, scale), unit)
        _fill(lower, backbone, scheme, styles, _speedup, "times as fast as the unpruned model")
        upper.set_title(drawable(backbone.label), fontsize=10 if columns < 3 or narrow else 9)
        for axis in (upper, lower):
            if (narrow or number == 0) and axis.lines:
                axis.set_ylabel("top-1, %")
    handles: dict[str, Any] = {}
    for axis in axes.flatten():
        handles.update({label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)})
    keys = [name for name in ("unpruned", *shown) if name in handles]
    figure.legend(
        [handles[key] for key in keys], list(map(drawable, keys)), loc="outside lower center",
        ncols=min(across, len(keys)), frameon=False, fontsize=8.5, handlelength=3.2, columnspacing=1.4,
    )  # fmt: skip
    return finished(figure, form)


def _work(scale: float, row: ResultRow) -> float | None:
    return row.macs / scale


def _speedup(row: ResultRow) -> float | None:
    return 1.0 if row.setting.config is None else row.speedup


def _fill(
    axis: Any,
    backbone: BackboneRows,
    scheme: str,
    styles: Mapping[str, Look],
    cost: Callable[[ResultRow], float | None],
    unit: str,
) -> None:
    """Draw one plot; where the cost of no row is known, the words that say so."""
    lines = backbone.lines(scheme)
    points: dict[str, list[XY]] = {}
    missing = 0
    for name, rows in lines.items():
        for row in rows:
            spent = cost(row)
            missing += spent is None
            if spent is not None:
                points.setdefault(name, []).append((spent, row.top1))
    if not points:
        words = "speed was not measured" if lines else "no rows"
        axis.text(0.5, 0.5, words, transform=axis.transAxes, ha="center", va="center", color=GREY, fontsize=10)
        axis.set(xticks=[], yticks=[])
        axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
        return
    axis.set_xlabel(unit)
    spent = cost(backbone.base)
    _panel(axis, points, (float("nan") if spent is None else spent, backbone.base.top1), styles)
    if missing:
        words = f"{missing} of {missing + sum(map(len, points.values()))} settings have no speed"
        axis.set_title(words, fontsize=8, color=GREY)


def _panel(axis: Any, lines: Mapping[str, Sequence[XY]], base: XY, styles: Mapping[str, Look]) -> None:
    """Draw lines that join points in the order given: settings stay neighbours where measured speed is uneven."""
    axis.axhline(base[1], color=GREY, linestyle=(0, (7, 3)), linewidth=1, zorder=1)
    axis.plot(*base, "*", color=GREY, markersize=10, zorder=1.5, linestyle=(0, (7, 3)), linewidth=1, label="unpruned")
    for name, points in lines.items():
        axis.plot(*zip(*points, strict=True), label=name, **styles[name].options())
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def described_curves(backbones: Sequence[BackboneRows], scheme: str) -> str:
    """Say what `draw_curves` shows, for those who cannot see it."""
    parts = []
    for backbone in backbones:
        scale, unit = unit_of(backbone.base.macs)
        lines = [
            f"{name} from {rows[0].top1:.1f} % at {rows[0].macs / scale:.2f} to {rows[-1].top1:.1f} % at "
            f"{rows[-1].macs / scale:.2f} {unit}"
            for name, rows in backbone.lines(scheme).items()
        ]
        parts.append(f"{backbone.label}, unpruned {backbone.base.top1:.1f} %: {'; '.join(lines)}")
    return f"Top-1 against multiply-accumulates and speed-up, {SCHEMES[scheme]}. {'. '.join(parts)}."

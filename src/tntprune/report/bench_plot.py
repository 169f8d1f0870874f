"""A benchmark as a picture: speed-ups against multiply-accumulates, and time against tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tntprune.bench.latency_curve import CurvePoint
from tntprune.bench.rows import BenchRow
from tntprune.errors import UserError
from tntprune.report.plot_style import COLOURS, blank, finished
from tntprune.system.storage import write

SHAPES = {"unpruned": "s", "bound": "_", "random": "x"}


def plot(path: Path, rows: Sequence[BenchRow], points: Sequence[CurvePoint], title: str, stamp: str) -> None:
    """Write a PNG (or SVG or PDF, by the name's ending).

    Args:
        path: Where.
        rows: Of a benchmark.
        points: Of a latency curve, or none.
        title: Above the picture.
        stamp: Below it: hardware, versions, date.

    Raises:
        UserError: matplotlib is missing, the name's ending is of no picture, or the file cannot be written.
    """
    kind: Any = path.suffix[1:].lower()
    if kind not in ("png", "svg", "pdf"):
        raise UserError(f"{path}: a picture of kind {kind or 'none'}; expected .png, .svg or .pdf")
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (row.batch, row.dtype, row.device))]
    panels = len(groups) + bool(points)
    columns = min(3, panels)
    lines = -(-panels // columns)
    figure = blank(4.6 * columns, 4.2 * lines + 0.6)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, group in zip(axes, groups, strict=False):
        _speedups(axis, group)
    if points:
        _curve(axes[len(groups)], points)
    for axis in axes[panels:]:
        axis.set_visible(False)
    handles: dict[str, Any] = {}
    for axis in axes[: len(groups)]:
        handles.update({label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)})
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False,
        title=stamp, title_fontsize=7,
    )  # fmt: skip
    figure.suptitle(title)
    write(path, finished(figure, kind))


def _speedups(axis: Any, rows: Sequence[BenchRow]) -> None:
    """Plot speed-ups: the nearer a mark to the line, the more of the saved work is saved time."""
    names = list(dict.fromkeys(row.method for row in rows if row.method not in SHAPES))
    backends = list(dict.fromkeys(row.backend for row in rows))
    most = 1.0
    for row in rows:
        if row.speedup is None:
            continue
        most = max(most, row.speedup, row.mac_ratio)
        filled = backends.index(row.backend) == 0
        grey = "0.3" if filled else "0.65"
        colour = grey if row.method in SHAPES else COLOURS[names.index(row.method) % len(COLOURS)]
        label = f"{row.method}, {row.backend}"
        marker = SHAPES.get(row.method, "o")
        style: dict[str, Any] = {"color": colour} if marker in "x_" or filled else {
            "markerfacecolor": "none", "markeredgecolor": colour}  # fmt: skip
        size = 14 if marker == "_" else 7
        axis.plot(row.mac_ratio, row.speedup, marker, label=label, markersize=size, markeredgewidth=1.5, **style)
    axis.plot([1, most * 1.04], [1, most * 1.04], color="0.75", zorder=0, linewidth=1, label="as much as was saved")
    axis.set_xlabel("fewer multiply-accumulates (times)")
    axis.set_ylabel("faster than the fastest unpruned (times)")
    axis.set_title(f"batch {rows[0].batch}, {rows[0].dtype}, {rows[0].device}", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _curve(axis: Any, points: Sequence[CurvePoint]) -> None:
    """Time against tokens, each series as a share of its own time with all tokens."""
    series = groupby(points, key=lambda point: (point.batch, point.dtype, point.backend, point.device))
    for number, ((batch, dtype, backend, device), group) in enumerate(series):
        own = list(group)
        axis.plot(
            [point.tokens for point in own], [point.time_share for point in own], ".-",
            color=COLOURS[number % len(COLOURS)], label=f"batch {batch}, {dtype}, {backend}, {device}",
        )  # fmt: skip
        if number == 0:
            shares = [point.mac_share for point in own]
            axis.plot([point.tokens for point in own], shares, color="0.6", linestyle="--", label="MACs")
    axis.set_xlabel("patch tokens in every block")
    axis.set_ylabel("share of the time with all tokens")
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    axis.legend(frameon=False, fontsize=8)
    axis.set_title("time against tokens", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)

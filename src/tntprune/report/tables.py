"""Rows as tables: every setting, and the methods at equal costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tntprune.report.groups import BackboneRows, in_words, options_of
from tntprune.report.page import Table
from tntprune.sweep.results import ResultRow
from tntprune.system.units import unit_of

LOW = 45  # percent of the unpruned model's multiply-accumulates below which the paper speaks of the low-token regime
WIDE = 5.0  # points of MACs around a column of the table of equal costs
NEAR = 1.0  # points of MACs that count as the same cost
GAP = 25.0  # points of MACs between two rows of a line, up to which it is interpolated
BUSY = 0.5  # processors that other programs used, above which a speed is marked
NOTHING = "–"  # noqa: RUF001 - a dash


def every_row(backbone: BackboneRows, scheme: str) -> Table:
    """List all rows of a backbone and a scheme, by method and multiply-accumulates, below the unpruned model.

    Of a setting only those options are given that differ within its line; `shared` has the others.
    """
    base = backbone.base
    scale, unit = unit_of(base.macs)
    header = [
        "method", "setting", "top-1, %", "drop", "top-5, %", "agreement, %", unit, "MACs, %", "speed-up", "memory, MiB",
    ]  # fmt: skip
    rows = [_cells(base, base, scale, {})]
    for line in backbone.lines(scheme).values():
        same = _shared(line)
        rows += [_cells(row, base, scale, same) for row in line]
    return Table(header, rows, words=[1])


def shared(backbone: BackboneRows, scheme: str) -> str:
    """Return the options that all rows of a line share, line by line; "" if there are none."""
    found = {label: in_words(_shared(line)) for label, line in backbone.lines(scheme).items()}
    return "; ".join(f"{label}: {words}" for label, words in found.items() if words)


def _shared(line: Sequence[ResultRow]) -> dict[str, str]:
    if len(line) < 2:
        return {}
    first, *others = (options_of(row.setting.config) for row in line)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _cells(row: ResultRow, base: ResultRow, scale: float, same: dict[str, str]) -> list[str]:
    mark = "†" if row.busy is not None and row.busy > BUSY else ""
    own = {name: value for name, value in options_of(row.setting.config).items() if name not in same}
    return [
        row.name,
        in_words(own),
        f"{row.top1:.2f}",
        NOTHING if row is base else signed(base.top1 - row.top1),
        f"{row.top5:.2f}",
        NOTHING if row is base else f"{row.agreement:.1f}",
        f"{row.macs / scale:.2f}",
        f"{share(row):.1f}",
        or_nothing(row.speedup, f"{mark}{{:.2f}}"),
        or_nothing(row.peak_mib, "{:,.0f}"),
    ]


def overview(backbone: BackboneRows, scheme: str) -> Table:
    """Set methods beside each other at equal shares of multiply-accumulates; the highest of each share is marked.

    A cell has the share of its row in brackets, or "≈" where the accuracy is interpolated. Only cells at the column's
    share are compared.
    """
    found = equal_costs(backbone, scheme)
    high = sum(cost >= LOW for cost in found)
    spans = [(f"high: at least {LOW} % of the MACs", high), (f"low: less than {LOW} %", len(found) - high)]
    rows, best = [], []
    for label in backbone.lines(scheme):
        cells, marked = [label], []
        for column, lines in enumerate(found.values(), start=1):
            own, rivals = lines.get(label), comparable(lines)
            cells.append(NOTHING if own is None else own.cell)
            if label in rivals and len(rivals) > 1 and rivals[label].top1 == max(r.top1 for r in rivals.values()):
                marked.append(column)
        rows.append(cells)
        best.append(marked)
    groups = [("", 1), *((words, span) for words, span in spans if span)]
    return Table(["method", *(f"{cost:.0f} %" for cost in found)], rows, best, groups)


@dataclass(frozen=True)
class AtCost:
    """The accuracy of a line at a share of multiply-accumulates.

    Args:
        row: A measured row, or one whose figures lie between those of two measured rows.
        between: Whether it is interpolated.
        equal: Whether its share is the one asked for, within `NEAR`.
    """

    row: ResultRow
    between: bool
    equal: bool

    @property
    def cell(self) -> str:
        """Of the table of equal costs."""
        return f"≈ {self.row.top1:.1f}" if self.between else f"{self.row.top1:.1f} ({share(self.row):.0f})"


def comparable(found: dict[str, AtCost]) -> dict[str, ResultRow]:
    """Return the rows of the lines that have the same cost."""
    return {label: own.row for label, own in found.items() if own.equal}


def equal_costs(backbone: BackboneRows, scheme: str) -> dict[float, dict[str, AtCost]]:
    """Compare lines at shares of multiply-accumulates, in percent, from the largest to the smallest.

    Each row on the frontier of its line lies within `WIDE` points of a share. At a share, a line has the row that was
    measured there; else what lies between its two rows around it, if they are at most `GAP` points apart; else its
    nearest row within `WIDE`.
    """
    lines = {label: _frontier(rows) for label, rows in backbone.lines(scheme).items()}
    left = sorted((share(row) for rows in lines.values() for row in rows), reverse=True)
    found: dict[float, dict[str, AtCost]] = {}
    while left:
        near = [cost for cost in left if cost >= left[0] - WIDE]
        cost = near[len(near) // 2]
        at = {label: _at_cost(rows, cost) for label, rows in lines.items()}
        found[cost] = {label: own for label, own in at.items() if own is not None}
        left = left[len(near) :]
    return found


def _frontier(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return a line, the most expensive row first, without those that another one beats at no higher cost."""
    found: list[ResultRow] = []
    for row in sorted(rows, key=lambda row: (row.macs, -row.top1)):
        if not found or row.top1 > found[-1].top1:
            found.append(row)
    return found[::-1]


def _at_cost(rows: Sequence[ResultRow], cost: float) -> AtCost | None:
    nearest = min(rows, key=lambda row: abs(share(row) - cost))
    if abs(share(nearest) - cost) <= NEAR:
        return AtCost(nearest, between=False, equal=True)
    for above, below in pairwise(rows):
        if share(above) > cost > share(below) and share(above) - share(below) <= GAP:
            part = (cost - share(below)) / (share(above) - share(below))
            return AtCost(_between(below, above, part), between=True, equal=True)
    return AtCost(nearest, between=False, equal=False) if abs(share(nearest) - cost) <= WIDE else None


def _between(below: ResultRow, above: ResultRow, part: float) -> ResultRow:
    """Return a row whose figures lie between those of two rows: `part` of the way from one to the other."""

    def mixed(name: str) -> int:
        low, high = (float(getattr(row, name)) / row.images for row in (below, above))
        return round(above.images * (low + part * (high - low)))

    macs = round(below.macs + part * (above.macs - below.macs))
    return replace(above, right=mixed("right"), right5=mixed("right5"), agreeing=mixed("agreeing"), macs=macs)


def commands(rows: Sequence[ResultRow]) -> Table:
    """List the command that measures each row again."""
    cells = [
        [row.name, in_words(options_of(row.setting.config)), row.setting.key, row.command or NOTHING] for row in rows
    ]
    return Table(["method", "setting", "key", "command"], cells, words=[1, 3])


def share(row: ResultRow) -> float:
    """Return multiply-accumulates in percent of the unpruned model's."""
    return 100 * row.macs / row.base_macs


def or_nothing(value: float | None, form: str) -> str:
    """Format a value, or return a dash where there is none."""
    return NOTHING if value is None else form.format(value)


def signed(value: float) -> str:
    """Return two decimals, with a proper minus sign."""
    return f"{value:.2f}".replace("-", "−")  # noqa: RUF001 - a minus sign

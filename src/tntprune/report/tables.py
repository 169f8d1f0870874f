"""Rows as tables: every setting, and the best of each method at about the same cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tntprune.report.groups import Backbone, in_words, options_of
from tntprune.report.page import table
from tntprune.results import Row
from tntprune.units import unit_of

LOW = 45  # percent of the unpruned model's multiply-accumulates below which the paper speaks of the low-token regime
REGIMES = {"high": f"high: at least {LOW} % of the MACs", "low": f"low: less than {LOW} %"}
BUSY = 0.5  # processors that other programs used, above which a speed is marked
NOTHING = "–"  # noqa: RUF001 - a dash


@dataclass(frozen=True)
class Table:
    """A table, whatever it is written as.

    Args:
        header: Column names.
        rows: Cells as text.
        best: For each row the columns to mark as the best; () for no marks at all.
        groups: Headings above the column names, each with the number of columns that it spans.
        words: Columns that hold words, not figures.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Sequence[Sequence[int]] = ()
    groups: Sequence[tuple[str, int]] = ()
    words: Sequence[int] = ()

    def html(self) -> str:
        """In a box that scrolls on its own."""
        return table(self.header, self.rows, self.best, self.groups, self.words)


def markdown(given: Table) -> str:
    """A table in Markdown, the best in bold; headings above the column names are left out."""
    best = given.best or [()] * len(given.rows)
    words = {0, *given.words}
    lines = [_line(given.header), _line(["---" if n in words else "---:" for n in range(len(given.header))])]
    for row, marked in zip(given.rows, best, strict=True):
        lines.append(_line([f"**{cell}**" if n in marked else cell for n, cell in enumerate(row)]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def every_row(backbone: Backbone, scheme: str) -> Table:
    """All rows of a backbone and a scheme, by method and multiply-accumulates, below the unpruned model.

    Of a setting only those options are given that differ within its line; `shared` has the others.
    """
    base = backbone.base
    scale, unit = unit_of(base.macs)
    header = [
        "method", "setting", "top-1, %", "drop", "top-5, %", "agreement, %", unit, "MACs, %", "images/s",
        "speed-up", "memory, MiB",
    ]  # fmt: skip
    rows = [_cells(base, base, scale, {})]
    for line in backbone.lines(scheme).values():
        same = _shared(line)
        rows += [_cells(row, base, scale, same) for row in line]
    return Table(header, rows, words=[1])


def shared(backbone: Backbone, scheme: str) -> str:
    """The options that all rows of a line share, line by line; "" if there are none."""
    found = {label: in_words(_shared(line)) for label, line in backbone.lines(scheme).items()}
    return "; ".join(f"{label}: {words}" for label, words in found.items() if words)


def _shared(line: Sequence[Row]) -> dict[str, str]:
    if len(line) < 2:
        return {}
    first, *others = (options_of(row.setting.config) for row in line)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _cells(row: Row, base: Row, scale: float, same: dict[str, str]) -> list[str]:
    mark = "†" if row.busy is not None and row.busy > BUSY else ""
    whole = row is base
    own = {name: value for name, value in options_of(row.setting.config).items() if name not in same}
    return [
        row.name,
        in_words(own),
        f"{row.top1:.2f}",
        NOTHING if whole else signed(base.top1 - row.top1),
        f"{row.top5:.2f}",
        NOTHING if whole else f"{row.agreement:.1f}",
        f"{row.macs / scale:.2f}",
        f"{share(row):.1f}",
        NOTHING if row.images_per_s is None else f"{mark}{row.images_per_s:,.{0 if row.images_per_s >= 100 else 1}f}",
        NOTHING if row.speedup is None else f"{mark}{row.speedup:.2f}",
        NOTHING if row.peak_mib is None else f"{row.peak_mib:,.0f}",
    ]


def overview(backbone: Backbone, scheme: str) -> Table:
    """Methods by share of multiply-accumulates, to the nearest ten percent; the best of each share is marked.

    Each cell is the method's best row there, with the row's own share behind it.
    """
    found = buckets(backbone, scheme)
    shares = list(found)
    header = ["method", *(f"about {share} %" for share in shares)]
    high = sum(share >= LOW for share in shares)
    spans = ((REGIMES["high"], high), (REGIMES["low"], len(shares) - high))
    groups = [("", 1), *((words, span) for words, span in spans if span)]
    rows, best = [], []
    for label in backbone.lines(scheme):
        cells, marked = [label], []
        for column, bucket in enumerate(found.values(), start=1):
            row = bucket.get(label)
            cells.append(NOTHING if row is None else f"{row.top1:.1f} ({share(row):.0f})")
            if row is not None and row.top1 == max(other.top1 for other in bucket.values()) and len(bucket) > 1:
                marked.append(column)
        rows.append(cells)
        best.append(marked)
    return Table(header, rows, best, groups)


def buckets(backbone: Backbone, scheme: str) -> dict[int, dict[str, Row]]:
    """For each share of multiply-accumulates, to the nearest ten percent, the best row of each line.

    The regimes' border, 45 %, is one between two shares. Shares come from the largest to the smallest.
    """
    found: dict[int, dict[str, Row]] = {}
    for label, rows in backbone.lines(scheme).items():
        for row in rows:
            own = found.setdefault(int((share(row) + 5) // 10 * 10), {})
            if label not in own or row.top1 > own[label].top1:
                own[label] = row
    return dict(sorted(found.items(), reverse=True))


def commands(rows: Sequence[Row]) -> Table:
    """The command that measures each row again."""
    header = ["method", "setting", "key", "command"]
    settings = [in_words(options_of(row.setting.config)) for row in rows]
    cells = [[r.name, words, r.setting.key, r.command or NOTHING] for r, words in zip(rows, settings, strict=True)]
    return Table(header, cells, words=[1, 3])


def share(row: Row) -> float:
    """Multiply-accumulates in percent of the unpruned model's."""
    return 100 * row.macs / row.base_macs


def signed(value: float) -> str:
    """Two decimals, and a proper minus sign."""
    return f"{value:.2f}".replace("-", "−")  # noqa: RUF001 - a minus sign

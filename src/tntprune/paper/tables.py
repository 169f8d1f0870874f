"""The paper's tables, ours and the authors' side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tntprune.paper.compare import SURE, Agreement, Measured, of_table, total
from tntprune.paper.entries import METHODS
from tntprune.paper.settings import MODELS, published, ranking
from tntprune.report.groups import SCHEMES
from tntprune.report.page import Table
from tntprune.report.tables import NOTHING, or_nothing, signed

SHORT = {
    "deit_base_distilled": "DeiT-B",
    "deit_small_distilled": "DeiT-S",
    "deit_tiny_distilled": "DeiT-T",
    "vit16_mlp768": "ViT/16",
}
MAIN_SINGLE = {  # the rates in the paper's main table of single-layer pruning
    "deit_small_distilled": ("0.8", "0.6", "0.5", "0.25"),
    "vit16_mlp768": ("160", "130", "100", "60"),
}


def main_single(measured: Sequence[Measured], backbone: str) -> Table | None:
    """Make the main table of single-layer pruning: drops in points, ours and the paper's, at four rates.

    None for a backbone that it is not of; a model that the paper has not takes the place of DeiT-S.
    """
    name = next((key for key, model in MODELS.items() if model == backbone), "deit_small_distilled")
    rates = MAIN_SINGLE.get(name, ())
    found = {(one.entry.method, one.entry.parameter): one for one in of_table(measured, backbone, "single")}
    if not found or not rates:
        return None
    unit = "tokens" if name == "vit16_mlp768" else "K"
    header = ["method", *(f"{who}, {unit} = {rate}" for rate in rates for who in ("ours", "paper"))]
    cells: list[list[str]] = []
    for method in METHODS:
        own = [found.get((method, rate)) for rate in rates]
        if any(own):
            authors = [one.entry.authors for one in own if one and not one.entry.own]
            rows_of = dict.fromkeys(SHORT[one.backbone] for one in authors if one)
            beside = f" (paper: {', '.join(rows_of)})" if rows_of else ""
            pairs = [(one.drop, one.their_drop) if one else (None, None) for one in own]
            cells.append([METHODS[method] + beside, *(_points(value) for pair in pairs for value in pair)])
    step = 1 if backbone in MODELS.values() else 2  # a substitute's rows of the paper are of several backbones
    least = {n: _smallest(cells, n) for n in range(1, len(header), step)}
    return Table(header, cells, [[n for n, value in least.items() if line[n] == value] for line in cells])


def _smallest(cells: Sequence[Sequence[str]], column: int) -> str | None:
    """Return the cell of the smallest drop; None where there are no two to compare."""
    values = [line[column] for line in cells if line[column] != NOTHING]
    return min(values, key=lambda cell: float(cell.replace("−", "-"))) if len(values) > 1 else None  # noqa: RUF001


def side_by_side(measured: Iterable[Measured]) -> Table:
    """List settings in the order of the paper's appendix, the smallest drop of each rate marked."""
    order = list(METHODS)
    rows = sorted(measured, key=lambda one: (one.entry.rank, order.index(one.entry.method)))
    header = [
        "method", "parameter", "top-1, %", "drop", "MACs, %", "speed-up", "paper: row of", "top-1, %", "drop",
        "MACs, %", "speed-up", "drop, ours less the paper's",
    ]  # fmt: skip
    groups = (("", 2), ("ours", 4), ("the paper's", 5), ("", 1))
    best = []
    for one in rows:
        others = [other for other in rows if other.entry.rank == one.entry.rank]
        marks = [3] if one.drop == min(other.drop for other in others) and len(others) > 1 else []
        drops = [other.their_drop for other in others if other.their_drop is not None and other.entry.own]
        if len(drops) > 1 and one.their_drop == min(drops):
            marks.append(8)  # not for a substitute, whose rows of the paper are of several backbones
        best.append(marks)
    return Table(header, [_cells(one) for one in rows], best, groups, words=[1, 6])


def _cells(one: Measured) -> list[str]:
    entry, row, authors = one.entry, one.row, one.entry.authors
    name = entry.name if not (authors and (authors.not_met or entry.note)) else f"{entry.name} *"
    ours = [f"{row.top1:.2f}", _points(one.drop), f"{100 * one.share:.1f}", or_nothing(row.speedup, "{:.2f}")]
    if authors is None:
        return [name, entry.parameter, *ours, *[NOTHING] * 6]
    theirs = [f"{authors.top1:.2f}", _points(authors.drop), f"{100 * authors.share:.1f}"]
    speedup = or_nothing(authors.speedup, "{:.2f}")
    return [name, entry.parameter, *ours, SHORT[authors.backbone], *theirs, speedup, _points(one.difference)]


def _points(value: float | None) -> str:
    return NOTHING if value is None else signed(value + 0.0 if round(value, 2) else 0.0)


def unpruned(measured: Iterable[Measured]) -> Table:
    """List the models that everything is compared with."""
    header = ["unpruned model", "top-1, %", "GMACs", "images/s", "paper: row of", "top-1, %", "GFLOPs", "images/s, A40"]
    rows = []
    for one in measured:
        if one.entry.config is None:
            speed, authors = or_nothing(one.row.images_per_s, "{:.1f}"), one.entry.authors
            theirs = [NOTHING] * 4
            if authors is not None:
                theirs = [SHORT[authors.backbone], f"{authors.top1:.2f}", f"{authors.gmacs:.2f}",
                          f"{authors.images_per_s}"]  # fmt: skip
            rows.append([one.entry.model, f"{one.row.top1:.2f}", f"{one.row.macs / 1e9:.2f}", speed, *theirs])
    return Table(header, rows, words=[4])


def rankings(found: Sequence[Agreement]) -> Table:
    """Show how well the order of methods agrees, by scheme and regime."""
    header = [
        "ours", "the paper's", "scheme", "regime", "rates", "Kendall's tau, mean", "pairs in the same order",
        "opposite, by chance perhaps", "opposite for sure",
    ]  # fmt: skip
    groups: dict[tuple[str, ...], list[Agreement]] = {}
    for one in _in_order(found):
        groups.setdefault((one.backbone, SHORT[one.against], SCHEMES[one.scheme], one.regime), []).append(one)
    rows = []
    for key, own in groups.items():
        t = total(own)
        rows.append([*key, str(t.rates), tau(t.tau), str(t.same), str(t.unclear), str(t.clear)])
    return Table(header, rows, words=[1, 2, 3])


def _in_order(found: Iterable[Agreement]) -> list[Agreement]:
    places = {"single": 0, "multi": 1, "high": 0, "low": 1}
    return sorted(found, key=lambda a: (a.backbone, a.against, places[a.scheme], places[a.regime], a.rank))


def orders(found: Sequence[Agreement]) -> Table:
    """Show the methods in the authors' order and in ours, at each rate."""
    rows = [[_where(one), _order(one.theirs), _order(one.ours), tau(one.tau)] for one in _in_order(found)]
    return Table(["rate", "the paper's order", "ours", "tau"], rows, words=[1, 2])


def _order(top1: dict[str, float]) -> str:
    """Name methods from the best on; what is equally good is said to be."""
    told, last = "", None
    for method, value in top1.items():
        told += ("" if last is None else " = " if value == last else " > ") + METHODS[method]
        last = value
    return told


def reversals(found: Sequence[Agreement]) -> Table:
    """List the pairs of methods that both put in opposite orders, by more than chance allows."""
    header = ["rate", "ahead in the paper", "behind in the paper", "paper's points", "our points", f"{SURE} errors"]
    rows = [
        [_where(one), METHODS[pair.better], METHODS[pair.worse], signed(pair.theirs), signed(pair.ours),
         f"{SURE * pair.error:.2f}"]
        for one in _in_order(found)
        for pair in one.pairs
        if pair.clear
    ]  # fmt: skip
    return Table(header, rows, words=[1, 2])


def tau(value: float) -> str:
    """Return Kendall's tau, or a dash where there is no order: all alike."""
    return signed(value) if value == value else NOTHING


def _where(one: Agreement) -> str:
    """Name a rate as the paper's table does."""
    ranks = ranking((one.against,))
    row = next(p.row for p in published() if ranks.get(p.name) == one.rank and p.row["scheme"] == one.scheme)
    rate = f"K = {row['keep']}" if row["keep"] else f"{row['tokens']} tokens"
    if one.scheme == "multi":
        rate = f"{row['gflops_bucket']} GFLOPs"
    return f"{SHORT[one.against]}, {SCHEMES[one.scheme]}, {rate}"

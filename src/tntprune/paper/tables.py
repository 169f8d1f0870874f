"""The paper's tables, ours and the authors' side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tntprune.paper.authors import ranking
from tntprune.paper.compare import SURE, Agreement, Measured, total
from tntprune.paper.names import METHODS
from tntprune.paper.settings import MODELS, published
from tntprune.report.tables import NOTHING, Table, signed

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
SCHEMES = {"single": "one location", "multi": "several locations"}


def main_single(measured: Sequence[Measured], backbone: str) -> Table | None:
    """The main table of single-layer pruning: drops in points, ours and the paper's, at four rates.

    None for a backbone that it is not of; a model that the paper has not takes the place of DeiT-S.
    """
    rows = [one for one in measured if one.entry.backbone == backbone and one.entry.table == "single"]
    name = next((key for key, model in MODELS.items() if model == backbone), "deit_small_distilled")
    rates = MAIN_SINGLE.get(name)
    if not rows or rates is None:
        return None
    unit = "tokens" if name == "vit16_mlp768" else "K"
    header = ["method", *(f"{who}, {unit} = {rate}" for rate in rates for who in ("ours", "paper"))]
    found = {(one.entry.method, one.entry.parameter): one for one in rows}
    cells: list[list[str]] = []
    for method in METHODS:
        own = [found.get((method, rate)) for rate in rates]
        if not any(own):
            continue
        theirs = [None if one is None or one.entry.authors is None else one.entry.authors.drop for one in own]
        pairs = zip([None if one is None else one.drop for one in own], theirs, strict=True)
        rows_of = {one.entry.authors.backbone for one in own if one and one.entry.authors and not one.entry.own}
        beside = f" (paper: {', '.join(SHORT[one] for one in rows_of)})" if rows_of else ""
        cells.append([METHODS[method] + beside, *(_points(value) for pair in pairs for value in pair)])
    step = 1 if backbone in MODELS.values() else 2  # a substitute's rows of the paper are of several backbones
    least = {n: _smallest(cells, n) for n in range(1, len(header), step)}
    return Table(header, cells, [[n for n, value in least.items() if line[n] == value] for line in cells])


def _smallest(cells: Sequence[Sequence[str]], column: int) -> str | None:
    """The cell of the smallest drop; None where there are no two to compare."""
    values = [line[column] for line in cells if line[column] != NOTHING]
    return min(values, key=lambda cell: float(cell.replace("−", "-"))) if len(values) > 1 else None  # noqa: RUF001


def side_by_side(measured: Iterable[Measured]) -> Table:
    """Settings in the order of the paper's appendix, the smallest drop of each rate marked."""
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
        drops = [other.entry.authors.drop for other in others if other.entry.authors is not None and other.entry.own]
        if len(drops) > 1 and one.entry.authors is not None and one.entry.authors.drop == min(drops):
            marks.append(8)  # not for a substitute, whose rows of the paper are of several backbones
        best.append(marks)
    return Table(header, [_cells(one) for one in rows], best, groups, words=[1, 6])


def _cells(one: Measured) -> list[str]:
    entry, row, authors = one.entry, one.row, one.entry.authors
    name = entry.name if not (authors and (authors.not_met or entry.note)) else f"{entry.name} *"
    ours = [f"{row.top1:.2f}", _points(one.drop), f"{100 * one.share:.1f}", _ratio(row.speedup)]
    if authors is None:
        return [name, entry.parameter, *ours, *[NOTHING] * 6]
    theirs = [f"{authors.top1:.2f}", _points(authors.drop), f"{100 * authors.share:.1f}", _ratio(authors.speedup)]
    return [name, entry.parameter, *ours, SHORT[authors.backbone], *theirs, _points(one.difference)]


def _points(value: float | None) -> str:
    return NOTHING if value is None else signed(value + 0.0 if round(value, 2) else 0.0)


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def unpruned(measured: Iterable[Measured]) -> Table:
    """The models that everything is compared with."""
    header = ["unpruned model", "top-1, %", "GMACs", "images/s", "paper: row of", "top-1, %", "GFLOPs", "images/s, A40"]
    rows = []
    for one in measured:
        if one.entry.config is not None:
            continue
        speed = NOTHING if one.row.images_per_s is None else f"{one.row.images_per_s:.1f}"
        cells = [one.entry.model, f"{one.row.top1:.2f}", f"{one.row.macs / 1e9:.2f}", speed]
        authors = one.entry.authors
        if authors is None:
            rows.append([*cells, *[NOTHING] * 4])
        else:
            speed = f"{authors.images_per_s}"
            rows.append([*cells, SHORT[authors.backbone], f"{authors.top1:.2f}", f"{authors.gmacs:.2f}", speed])
    return Table(header, rows, words=[4])


def rankings(found: Sequence[Agreement]) -> Table:
    """How well the order of methods agrees, by scheme and regime."""
    header = [
        "ours", "the paper's", "scheme", "regime", "rates", "Kendall's tau, mean", "pairs in the same order",
        "opposite, by chance perhaps", "opposite for sure",
    ]  # fmt: skip
    groups: dict[tuple[str, str, str, str], list[Agreement]] = {}
    for one in found:
        groups.setdefault((one.backbone, one.against, one.scheme, one.regime), []).append(one)
    rows = []
    for (backbone, against, scheme, regime), own in sorted(groups.items(), key=lambda item: _place(item[0])):
        t = total(own)
        rows.append([backbone, SHORT[against], SCHEMES[scheme], regime, str(t.rates), tau(t.tau), str(t.same),
                     str(t.unclear), str(t.clear)])  # fmt: skip
    return Table(header, rows, words=[1, 2, 3])


def _place(key: tuple[str, str, str, str]) -> tuple[str, str, int, int]:
    backbone, against, scheme, regime = key
    return backbone, against, list(SCHEMES).index(scheme), ("high", "low").index(regime)


def orders(found: Sequence[Agreement]) -> Table:
    """The methods in the authors' order and in ours, at each rate."""
    rows = []
    for one in sorted(found, key=lambda a: (*_place((a.backbone, a.against, a.scheme, a.regime)), a.rank)):
        where = f"{SHORT[one.against]}, {SCHEMES[one.scheme]}, {rate(one)}"
        rows.append([where, _order(one.theirs), _order(one.ours), tau(one.tau)])
    return Table(["rate", "the paper's order", "ours", "tau"], rows, words=[1, 2])


def _order(top1: dict[str, float]) -> str:
    """Methods from the best on; what is equally good is said to be."""
    told, last = "", None
    for method, value in top1.items():
        told += ("" if last is None else " = " if value == last else " > ") + METHODS[method]
        last = value
    return told


def reversals(found: Sequence[Agreement]) -> Table:
    """The pairs of methods that ours and the authors' figures put in opposite orders, by more than chance allows."""
    header = ["rate", "ahead in the paper", "behind in the paper", "paper's points", "our points", f"{SURE} errors"]
    rows = []
    for one in sorted(found, key=lambda a: (*_place((a.backbone, a.against, a.scheme, a.regime)), a.rank)):
        for pair in one.pairs:
            if pair.clear:
                where = f"{SHORT[one.against]}, {SCHEMES[one.scheme]}, {rate(one)}"
                figures = [signed(pair.theirs), signed(pair.ours), f"{SURE * pair.error:.2f}"]
                rows.append([where, METHODS[pair.better], METHODS[pair.worse], *figures])
    return Table(header, rows, words=[1, 2])


def tau(value: float) -> str:
    """Kendall's tau, or a dash where there is no order: all alike."""
    return signed(value) if value == value else NOTHING


def rate(one: Agreement) -> str:
    """A rate as the paper's table says it."""
    ranks = ranking((one.against,))
    row = next(p.row for p in published() if ranks.get(p.name) == one.rank and p.row["scheme"] == one.scheme
               and p.row["backbone"] == one.against)  # fmt: skip
    if one.scheme == "multi":
        return f"{row['gflops_bucket']} GFLOPs"
    return f"K = {row['keep']}" if row["keep"] else f"{row['tokens']} tokens"

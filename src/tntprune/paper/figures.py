"""The paper's figures: our rows and the authors' drawn alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tntprune.methods import to_dict
from tntprune.paper.compare import Measured, backbones_of, of_table
from tntprune.paper.entries import METHODS
from tntprune.paper.settings import Published, published
from tntprune.paper.tables import SHORT
from tntprune.report.figures import COLUMNS, draw_curves
from tntprune.report.groups import SCHEMES, grouped
from tntprune.report.plot_style import looks
from tntprune.sweep.results import ResultRow, Setting

IMAGES = 50_000  # that the authors counted


def figures(measured: Sequence[Measured]) -> Iterator[tuple[str, bytes]]:
    """Draw the paper's plots, of our rows and of what the authors reported: each a file name and a PNG."""
    known = looks(METHODS.values())
    for name, scheme, rows in drawn_rows(measured):
        (group,) = grouped(rows)
        lines = {label: line[0].name for own in group.backbones for label, line in own.lines(scheme).items()}
        # the look is that of the method in every figure, though a label may say "EViT, one block"
        styles = {label: look for name, look in known.items() for label, own in lines.items() if own == name}
        yield name, draw_curves(group.backbones, scheme, "png", styles)


def described(measured: Sequence[Measured]) -> Iterator[tuple[str, str]]:
    """Yield the file name and the caption of each plot."""
    for name, scheme, _ in drawn_rows(measured):
        whose = "as the authors reported it" if name.endswith("-paper.png") else "measured"
        yield name, f"Top-1 over multiply-accumulates and over speed-up, {SCHEMES[scheme]}, {whose}"


def drawn_rows(measured: Sequence[Measured]) -> Iterator[tuple[str, str, list[ResultRow]]]:
    """Yield the name of each figure's file, its scheme and its rows."""
    for scheme in SCHEMES:
        shown = [backbone for backbone in backbones_of(measured) if of_table(measured, backbone, scheme)]
        for first in range(0, len(shown), COLUMNS):
            part = shown[first : first + COLUMNS]
            number = f"-{first // COLUMNS + 1}" if first else ""
            rows = [row for backbone in part for row in _our_rows(measured, backbone, scheme)]
            yield f"figure-{scheme}{number}.png", scheme, rows
            authors = [one.entry.authors for backbone in part for one in of_table(measured, backbone, scheme)]
            theirs = list(dict.fromkeys(one.backbone for one in authors if one is not None))[:COLUMNS]
            if theirs:
                rows = [row for backbone in theirs for row in _their_rows(backbone, scheme)]
                yield f"figure-{scheme}{number}-paper.png", scheme, rows


def _our_rows(measured: Sequence[Measured], backbone: str, scheme: str) -> list[ResultRow]:
    """Return our rows as the paper draws them: EViT and DynamicViT in the column of the distilled model."""
    base = next(one.row for one in measured if one.entry.backbone == backbone and one.entry.config is None)
    found = {base.setting.key: base}
    for one in of_table(measured, backbone, scheme):
        setting = replace(one.row.setting, model=backbone, weights=base.setting.weights)
        found[one.row.setting.key] = replace(one.row, setting=setting, name=one.entry.name, scheme=scheme)
    return list(found.values())


def _their_rows(backbone: str, scheme: str) -> list[ResultRow]:
    """Return what the authors reported, as rows that can be drawn."""
    return [
        _as_row(one) for one in published() if one.row["backbone"] == backbone and one.row["scheme"] in ("", scheme)
    ]


def _as_row(one: Published) -> ResultRow:
    authors = one.authors
    config = None if one.config is None else to_dict(one.config)
    return ResultRow(
        setting=Setting(f"{SHORT[authors.backbone]}, as published", "", config, None, "published", IMAGES),
        name=METHODS.get(one.row["method"], "unpruned"), scheme=one.row["scheme"] or "unpruned", images=IMAGES,
        skipped=0, right=round(authors.top1 * IMAGES / 100), right5=0, agreeing=0, macs=round(authors.gmacs * 1e9),
        base_macs=round(authors.base[1] * 1e9), tokens=[], images_per_s=authors.images_per_s, speedup=authors.speedup,
    )  # fmt: skip

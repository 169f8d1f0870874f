"""The paper's figures: our rows and the authors' drawn alike, and the token maps' names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tntprune.methods import to_dict
from tntprune.paper.compare import Measured, backbones_of
from tntprune.paper.entries import TokenMap
from tntprune.paper.names import METHODS
from tntprune.paper.settings import Published, published
from tntprune.paper.tables import SCHEMES, SHORT
from tntprune.report.figures import curves
from tntprune.report.groups import grouped
from tntprune.report.plot_style import Look, looks
from tntprune.sweep.results import Row, Setting

COLUMNS = 3  # backbones in one figure


def figures(measured: Sequence[Measured]) -> Iterator[tuple[str, bytes]]:
    """The paper's plots: our rows, and what the authors reported, each a file name and a PNG."""
    for scheme in SCHEMES:
        for name, rows in _drawn(measured, scheme):
            yield name, curves(rows, scheme, "png", _styles(rows, scheme))


def _styles(rows: Sequence[Row], scheme: str) -> dict[str, Look]:
    """The look of each line: that of its method in every figure, though a label may say "EViT, one block"."""
    lines = [backbone.lines(scheme) for group in grouped(rows) for backbone in group.backbones]
    names = {label: line[0].name for own in lines for label, line in own.items()}
    known = looks(METHODS.values())
    return {label: look for method, look in known.items() for label, name in names.items() if name == method}


def map_file(one: TokenMap) -> str:
    """The name of a figure of token maps."""
    return f"maps-{one.backbone}-{one.training}.png"


def map_caption(one: TokenMap) -> str:
    """What it shows."""
    return f"{one.backbone}, {one.name}: half of the tokens kept after each of the blocks 1 to 5, each on its own"


def _drawn(measured: Sequence[Measured], scheme: str) -> list[tuple[str, list[Row]]]:
    """The rows of each figure of a scheme, by the name of its file."""
    shown = [b for b in backbones_of(measured) if any(_is_of(one, b, scheme) for one in measured)]
    found = []
    for first in range(0, len(shown), COLUMNS):
        part = shown[first : first + COLUMNS]
        number = f"-{first // COLUMNS + 1}" if first else ""
        rows = [row for backbone in part for row in _own_rows(measured, backbone, scheme)]
        found.append((f"figure-{scheme}{number}.png", rows))
        theirs = list(dict.fromkeys(name for b in part for name in _beside(measured, b, scheme)))[:COLUMNS]
        if printed := [row for name in theirs for row in _their_rows(name, scheme)]:
            found.append((f"figure-{scheme}{number}-paper.png", printed))
    return found


def _is_of(one: Measured, backbone: str, scheme: str) -> bool:
    return one.entry.backbone == backbone and one.entry.table == scheme


def _own_rows(measured: Sequence[Measured], backbone: str, scheme: str) -> list[Row]:
    """Our rows as the paper draws them: EViT and DynamicViT in the column of the distilled model."""
    base = next(one.row for one in measured if one.entry.backbone == backbone and one.entry.config is None)
    found = {base.setting.key: base}
    for one in measured:
        if _is_of(one, backbone, scheme):
            setting = replace(one.row.setting, model=backbone, weights=base.setting.weights)
            found[one.row.setting.key] = replace(one.row, setting=setting, name=one.entry.name, scheme=scheme)
    return list(found.values())


def _beside(measured: Sequence[Measured], backbone: str, scheme: str) -> list[str]:
    found = [one.entry.authors.backbone for one in measured if _is_of(one, backbone, scheme) and one.entry.authors]
    return list(dict.fromkeys(found))


def _their_rows(backbone: str, scheme: str) -> list[Row]:
    """What the authors reported, as rows that can be drawn."""
    own = [one for one in published() if one.row["backbone"] == backbone]
    base = next(one for one in own if one.config is None)
    return [_as_row(one, base) for one in own if one.row["scheme"] in ("", scheme)]


def _as_row(one: Published, base: Published) -> Row:
    config = None if one.config is None else to_dict(one.config)
    label = f"{SHORT[base.row['backbone']]}, as published"
    images = 50_000
    speedup = one.images_per_s and base.images_per_s and one.images_per_s / base.images_per_s
    return Row(
        setting=Setting(label, "", config, None, "published", images),
        name=METHODS.get(one.row["method"], "unpruned"), scheme=one.row["scheme"] or "unpruned", images=images,
        skipped=0, right=round(one.top1 * images / 100), right5=0, agreeing=0, macs=round(one.gmacs * 1e9),
        base_macs=round(base.gmacs * 1e9), tokens=[], images_per_s=one.images_per_s, speedup=speedup,
    )  # fmt: skip


def pictures(measured: Sequence[Measured], folder: str) -> str:
    """The plots in Markdown."""
    found = []
    for scheme, words in SCHEMES.items():
        for name, _ in _drawn(measured, scheme):
            whose = "as the authors reported it" if name.endswith("-paper.png") else "measured"
            caption = f"Top-1 over multiply-accumulates and over speed-up, {words}, {whose}"
            found.append(picture(f"{caption}.", folder + name))
    return "\n\n".join(found)


def picture(caption: str, file: str) -> str:
    """One picture in Markdown, with its caption below."""
    return f"![{caption}]({file})\n\n{caption}"

"""The whole report: from rows to one page."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from html import escape
from typing import Any

from tntprune import __version__
from tntprune.errors import UserError
from tntprune.report import tables
from tntprune.report.facts import measured
from tntprune.report.figures import curves, described_curves
from tntprune.report.groups import SCHEMES, Backbone, Group, grouped, line_names
from tntprune.report.page import figure, page, paragraphs, picture
from tntprune.report.plot_style import Look, looks
from tntprune.report.summary import NOISE, standard_error, summary
from tntprune.sweep.results import Row
from tntprune.system.units import unit_of

LARGEST = 5_000_000  # bytes of a page
COLUMNS = 3  # backbones in one figure


def build(
    rows: Iterable[Row],
    title: str,
    lead: str = "",
    maps: Sequence[tuple[str, bytes]] = (),
    extra_sections: Sequence[tuple[str, str]] = (),
) -> str:
    """One self-contained HTML page.

    Args:
        rows: Any number, with the unpruned model of each backbone. Those that cannot be compared, because images,
            precision or batch size differ, get figures and tables of their own.
        title: Of the page.
        lead: A sentence or two below it.
        maps: Pictures of token maps: caption and the bytes of a picture file.
        extra_sections: Headings and HTML, which come after the summary.

    Raises:
        UserError: there is no row, an unpruned one is missing, matplotlib is not installed, a map is no picture, or the
            page would be larger than 5 MB.
    """
    rows = list(rows)
    groups = grouped(rows)
    styles = looks(line_names(groups))
    sections = [("Summary", _summary(groups)), *extra_sections]
    for group in groups:
        sections += _sections(group, styles, f" on {group.label}" if len(groups) > 1 else "")
    if maps:
        sections.append(("Token maps", "".join(_map(caption, data) for caption, data in maps)))
    sections.append(("How this was measured", measured(rows, groups)))
    made = page(title, lead, sections, f"{len(rows)} rows; page made by tntprune {__version__}, {date.today()}.")
    made = made.encode("utf-8", "backslashreplace").decode()  # a file name need not be UTF-8
    if len(made.encode()) > LARGEST:
        raise UserError(
            f"the page would have {len(made.encode()) / 1e6:.1f} MB; expected at most {LARGEST / 1e6:.0f}: "
            f"give fewer rows ({len(rows)} now) or maps ({len(maps)})"
        )
    return made


def figures(rows: Iterable[Row]) -> Iterator[tuple[str, Any]]:
    """Every figure of the page for a file of its own: its name, and a function from a form to its bytes."""
    groups = grouped(rows)
    styles = looks(line_names(groups))
    for number, group in enumerate(groups, start=1):
        for scheme in group.schemes:
            for part, backbones in enumerate(_columns(group, scheme), start=1):
                words = ["curves", scheme, f"data{number}" if len(groups) > 1 else "", f"{part}" if part > 1 else ""]
                own = _rows_of(backbones)
                yield "-".join(filter(None, words)), lambda form, o=own, s=scheme: curves(o, s, form, styles)


def _sections(group: Group, styles: dict[str, Look], on: str) -> list[tuple[str, str]]:
    drawn, compared, listed = "", "", ""
    for scheme in group.schemes:
        for backbones in _columns(group, scheme):
            own = _rows_of(backbones)
            wide, narrow = (curves(own, scheme, "svg", styles, narrow) for narrow in (False, True))
            image = picture(wide, described_curves(backbones, scheme), "svg", narrow)
            drawn += figure(image, _caption(backbones, scheme))
        for backbone in group.backbones:
            if backbone.lines(scheme):
                heading = f"<h3>{escape(backbone.label)}, {SCHEMES[scheme]}</h3>\n"
                compared += heading + tables.overview(backbone, scheme).html()
                same = tables.shared(backbone, scheme)
                note = f'<p class="note">In all rows of a method: {escape(same)}.</p>' if same else ""
                listed += heading + note + tables.every_row(backbone, scheme).html()
    compared_words = (
        "Top-1 in percent at equal shares of the unpruned model's multiply-accumulates. In brackets is the share of "
        "the setting that was measured; ≈ is interpolated between a method's two settings around that share. The star "
        "marks the highest accuracy at the column's share; it can be a tie with others, see the summary."
    )
    listed_words = (
        "The drop is in points of top-1 against the unpruned model; agreement is the share of images on which the "
        "first guess is the unpruned model's. A dash is what was not measured or has no meaning; "
        f"† a speed taken while other programs used more than {tables.BUSY} processors."
    )
    if not group.schemes:
        scale, unit = unit_of(max(b.base.macs for b in group.backbones))
        bases = [[b.label, f"{b.base.top1:.2f}", f"{b.base.macs / scale:.2f}"] for b in group.backbones]
        return [(f"The unpruned models{on}", tables.Table(["model", "top-1, %", unit], bases).html())]
    return [
        (f"Accuracy over cost{on}", drawn),
        (f"Methods at equal cost{on}", paragraphs([compared_words]) + compared),
        (f"Every setting{on}", paragraphs([listed_words]) + listed),
    ]


def _columns(group: Group, scheme: str) -> list[list[Backbone]]:
    shown = [backbone for backbone in group.backbones if backbone.lines(scheme)]
    return [shown[first : first + COLUMNS] for first in range(0, len(shown), COLUMNS)]


def _rows_of(backbones: Sequence[Backbone]) -> list[Row]:
    return [row for backbone in backbones for row in (backbone.base, *backbone.rows)]


def _caption(backbones: Sequence[Backbone], scheme: str) -> str:
    own = _rows_of(backbones)
    error = max(standard_error(row) for row in own)
    counted = sorted({row.images for row in own})
    images = f"{counted[0]:,}" if len(counted) == 1 else f"{counted[0]:,} to {counted[-1]:,}"
    machines = sorted({row.timed_on for row in own if row.timed_on})
    mixed = f" Speed-ups come from {len(machines)} machines ({'; '.join(machines)}) and differ for that reason too."
    columns, models = (", one column a backbone", "models") if len(backbones) > 1 else ("", "model")
    return (
        f"Top-1 accuracy on {images} images against multiply-accumulates of one image (top) and speed-up over the "
        f"unpruned model, timed in turns with it (bottom), tokens removed at {SCHEMES[scheme]}{columns}. The dashed "
        f"line and the star are the unpruned {models}. Better is up and to the left on top, up and to the right below. "
        f"One standard error of a point is at most {error:.1f}." + (mixed if len(machines) > 1 else "")
    )


def _summary(groups: Sequence[Group]) -> str:
    said = ""
    for topic, sentences in summary(groups):
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        said += f"<h3>{escape(topic)}</h3>\n<ul>{items}</ul>\n"
    return paragraphs(_mixed(groups)) + said + f'<p class="note">{escape(NOISE)}</p>'


def _mixed(groups: Sequence[Group]) -> list[str]:
    if len(groups) == 1:
        return []
    labels = "; ".join(group.label for group in groups)
    return [f"These rows are of {len(groups)} kinds, shown apart because they cannot be compared: {labels}."]


def _map(caption: str, data: bytes) -> str:
    small, form = _small(caption, data)
    return figure(picture(small, f"Token maps: {caption}", form), caption)


def _small(caption: str, data: bytes, most: int = 500_000, width: int = 1800) -> tuple[bytes, str]:
    """A picture as it is, or smaller where it is large, with its form."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            if len(data) <= most and image.format in ("PNG", "JPEG", "WEBP"):
                return data, image.format.lower()
            image.load()
            less = image.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise UserError(f"{caption}: no picture that can be read ({error}); expected a PNG") from None
    less.thumbnail((width, 10 * width))
    out = io.BytesIO()
    less.save(out, "WEBP", quality=85)
    return out.getvalue(), "webp"

"""The whole report: from rows to one page."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from statistics import median
from typing import Any

from tntprune import __version__
from tntprune.errors import UserError
from tntprune.report import tables
from tntprune.report.figures import COLUMNS, described_curves, draw_curves
from tntprune.report.groups import SCHEMES, BackboneRows, Group, grouped, line_names
from tntprune.report.page import Table, page, part, picture
from tntprune.report.plot_style import Look, looks
from tntprune.report.summary import NOISE, standard_error, summary
from tntprune.sweep.results import ResultRow
from tntprune.system.units import unit_of

LARGEST = 5_000_000  # bytes of a page
MOST = 8  # different values of a fact that are shown
COMPARED = (
    "Top-1 in percent at equal shares of the unpruned model's multiply-accumulates. In brackets is the share of "
    "the setting that was measured; ≈ is interpolated between a method's two settings around that share. The star "
    "marks the highest accuracy at the column's share; it can be a tie with others, see the summary."
)
LISTED = (
    "The drop is in points of top-1 against the unpruned model; agreement is the share of images on which the "
    "first guess is the unpruned model's. A dash is what was not measured or has no meaning; "
    f"† a speed taken while other programs used more than {tables.BUSY} processors."
)


def build(
    rows: Iterable[ResultRow],
    title: str,
    lead: str = "",
    maps: Sequence[tuple[str, bytes]] = (),
    extra_sections: Sequence[tuple[str, str]] = (),
) -> str:
    """Return one self-contained HTML page.

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
    kinds = [group.label for group in groups]
    sections = [("Summary", part("summary", kinds, summary(groups), NOISE)), *extra_sections]
    for group in groups:
        sections += _sections(group, styles, f" on {group.label}" if len(groups) > 1 else "")
    if maps:
        sections.append(("Token maps", part("figures", [_map(caption, data) for caption, data in maps])))
    timed = any(row.images_per_s is not None for row in rows)
    facts = Table([], _facts(rows, groups), words=[1])
    sections.append(("How this was measured", part("measured", timed, facts, len(rows), tables.commands(rows))))
    made = page(title, lead, sections, f"{len(rows)} rows; page made by tntprune {__version__}, {date.today()}.")
    made = made.encode("utf-8", "backslashreplace").decode()  # a file name need not be UTF-8
    if len(made.encode()) > LARGEST:
        raise UserError(
            f"the page would have {len(made.encode()) / 1e6:.1f} MB; expected at most {LARGEST / 1e6:.0f}: "
            f"give fewer rows ({len(rows)} now) or maps ({len(maps)})"
        )
    return made


def figures(rows: Iterable[ResultRow]) -> Iterator[tuple[str, Any]]:
    """Yield every figure of the page for a file of its own: its name, and a function from a form to its bytes."""
    groups = grouped(rows)
    styles = looks(line_names(groups))
    for number, group in enumerate(groups, start=1):
        for scheme in group.schemes:
            for turn, own in enumerate(_columns(group, scheme), start=1):
                words = ["curves", scheme, f"data{number}" if len(groups) > 1 else "", f"{turn}" if turn > 1 else ""]
                yield "-".join(filter(None, words)), lambda form, o=own, s=scheme: draw_curves(o, s, form, styles)


def _sections(group: Group, styles: dict[str, Look], on: str) -> list[tuple[str, str]]:
    if not group.schemes:
        scale, unit = unit_of(max(b.base.macs for b in group.backbones))
        bases = [[b.label, f"{b.base.top1:.2f}", f"{b.base.macs / scale:.2f}"] for b in group.backbones]
        return [(f"The unpruned models{on}", Table(["model", "top-1, %", unit], bases).html())]
    drawn, compared, listed = [], [], []
    for scheme in group.schemes:
        for backbones in _columns(group, scheme):
            wide, narrow = (draw_curves(backbones, scheme, "svg", styles, narrow) for narrow in (False, True))
            image = picture(wide, described_curves(backbones, scheme), "svg", narrow)
            drawn.append((image, _caption(backbones, scheme)))
        for backbone in group.backbones:
            if backbone.lines(scheme):
                heading = f"{backbone.label}, {SCHEMES[scheme]}"
                compared.append((heading, "", tables.overview(backbone, scheme)))
                same = tables.shared(backbone, scheme)
                note = same and f"In all rows of a method: {same}."
                listed.append((heading, note, tables.every_row(backbone, scheme)))
    return [
        (f"Accuracy over cost{on}", part("figures", drawn)),
        (f"Methods at equal cost{on}", part("tables", COMPARED, compared)),
        (f"Every setting{on}", part("tables", LISTED, listed)),
    ]


def _columns(group: Group, scheme: str) -> list[list[BackboneRows]]:
    shown = [backbone for backbone in group.backbones if backbone.lines(scheme)]
    return [shown[first : first + COLUMNS] for first in range(0, len(shown), COLUMNS)]


def _caption(backbones: Sequence[BackboneRows], scheme: str) -> str:
    own = [row for backbone in backbones for row in (backbone.base, *backbone.rows)]
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


def _map(caption: str, data: bytes) -> tuple[str, str]:
    """Return a picture as it is, or smaller where it is large, and its caption."""
    from PIL import Image, UnidentifiedImageError

    alt = f"Token maps: {caption}"
    try:
        with Image.open(io.BytesIO(data)) as image:
            if len(data) <= 500_000 and image.format in ("PNG", "JPEG", "WEBP"):
                return picture(data, alt, image.format.lower()), caption
            less = image.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise UserError(f"{caption}: no picture that can be read ({error}); expected a PNG") from None
    less.thumbnail((1800, 18_000))
    out = io.BytesIO()
    less.save(out, "WEBP", quality=85)
    return picture(out.getvalue(), alt, "webp"), caption


def _facts(rows: Sequence[ResultRow], groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Say on what the rows were measured, with what, and what went wrong."""
    facts = [("Images", "; ".join(group.label for group in groups)), ("Skipped", _skipped(rows))]
    for name, heading in (("hardware", "Hardware"), ("versions", "Versions"), ("date", "Dates")):
        values = Counter(_words(row.about[name]) for row in rows if row.about.get(name))
        several = [f"{value} ({count} rows)" for value, count in values.items()]
        told = "; ".join(values if len(values) == 1 else several[:MOST])
        more = f"; and {len(values) - MOST} more" if len(values) > MOST else ""
        facts.append((heading, told + more if values else "not recorded"))
    timed = dict.fromkeys(row.timed_on for row in rows if row.timed_on)
    if set(timed) - {row.about.get("hardware") for row in rows}:
        facts.append(("Speed measured on", "; ".join(map(str, timed))))
    if seconds := [row.about["seconds"] for row in rows if isinstance(row.about.get("seconds"), int | float)]:
        facts.append(("Time", f"{sum(seconds) / 60:,.1f} minutes for {len(seconds)} rows"))
    if bases := [backbone for group in groups for backbone in group.backbones if backbone.base.images_per_s]:
        facts.append(("Unpruned", "; ".join(f"{one.label} {one.base.images_per_s:,.1f} images/s" for one in bases)))
    return [*facts, ("Other programs", _busy(rows))]


def _words(value: Any) -> str:
    return ", ".join(f"{name} {own}" for name, own in value.items()) if isinstance(value, dict) else str(value)


def _skipped(rows: Sequence[ResultRow]) -> str:
    most = max(row.skipped for row in rows)
    if most == 0:
        return "none; every image could be read"
    some = sum(row.skipped > 0 for row in rows)
    return f"up to {most:,} images that could not be read, in {some} of {len(rows)} rows; they are not counted"


def _busy(rows: Sequence[ResultRow]) -> str:
    known = [row.busy for row in rows if row.busy is not None]
    if not known:
        return "speed was not measured" if all(row.images_per_s is None for row in rows) else "not recorded"
    marked = sum(busy > tables.BUSY for busy in known)
    return (
        f"used {median(known):.2f} processors in the median row while speed was measured, {max(known):.2f} at most; "
        f"{f'{marked} rows are marked †' if marked else 'no row is marked for it'}"
    )

"""`tntprune report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tntprune.cli.console import tell
from tntprune.cli.flags import Device, HostFlags, Json, Weights, flag
from tntprune.errors import UsageError, UserError
from tntprune.system.flags import Written

if TYPE_CHECKING:
    from tntprune.sweep.results import ResultRow

BLOCKS = (1, 2, 3, 4, 5)  # of the paper's token maps
KEEP = 0.5
LARGEST = 100_000_000  # bytes of a picture of token maps


def report(
    results: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        flag("results files of `tntprune sweep`; they need a row of each unpruned model", "FILE..."),
    ],
    out: Annotated[Path, flag("the page to write", "HTML"), Written()] = Path("report.html"),
    figures: Annotated[Path | None, flag("write every figure as PNG and SVG to this folder too", "DIR"), Written()] = (
        None
    ),
    title: Annotated[str, flag("title of the page", "TEXT"), Written()] = "Token pruning: results",
    maps: Annotated[
        tuple[Path, ...],
        flag("pictures of token maps to show, made by `tntprune show`; a file's name is its caption", "PNG..."),
    ] = (),
    photos: Annotated[
        tuple[Path, ...],
        flag(
            "photos for token maps, with --model and --reducer; one map for each trained block from 1 to 5, with half "
            "of the tokens removed there only",
            "PHOTO...",
        ),
    ] = (),
    model: Annotated[str | None, flag("model of the token maps", "MODEL")] = None,
    weights: Weights = None,
    reducer: Annotated[
        str | None, flag("reduction of the token maps: a folder made by train, a Hub id, or pretrained", "RUN")
    ] = None,
    device: Device = "cpu",
    json: Json = False,
) -> int:
    """Write curves, tables and token maps of measured settings into one self-contained page.

    Rows of several files are put together. Rows with other images, precision or batch size are shown apart.
    """
    from tntprune.report.build import build
    from tntprune.report.build import figures as all_figures
    from tntprune.serialization.checkpoint import files_of
    from tntprune.system.storage import check_output, make_folder, write

    if not results:
        raise UsageError("no results given; expected one or more files that tntprune sweep wrote")
    if bool(photos) != bool(model and reducer):
        raise UsageError("token maps need --photos, --model and --reducer; expected all of them, or none")
    found: dict[str, ResultRow] = {}
    for path in results:
        for row in _rows(path):
            known = found.get(row.setting.key)
            if known is None or row.images_per_s is not None or known.images_per_s is None:
                found[row.setting.key] = row  # the last one, but none without a speed after one that has it
    rows = list(found.values())
    drawings: list[tuple[Path, Any, str]] = []
    if figures is not None:
        forms = ("png", "svg")
        drawings = [(figures / f"{name}.{form}", draw, form) for name, draw in all_figures(rows) for form in forms]
    for file in (out, *(path for path, _, _ in drawings)):
        check_output(file, [*results, *maps, *photos, weights, *files_of(reducer)])
    drawn = [(path.stem.replace("_", " ").replace("-", " "), _bytes(path)) for path in maps]
    if model and reducer:
        drawn.append(_maps(model, HostFlags(weights=weights, device=device), reducer, photos))
    lead = f"{len(rows)} settings from {', '.join(path.name for path in results)}."
    made = build(rows, title, lead, drawn)
    written = []
    if figures is not None:
        make_folder(figures)
    for path, draw, form in drawings:
        written.append(str(path))
        write(path, draw(form))
    make_folder(out.parent)
    write(out, made.encode())
    told = f"{len(rows)} rows: {out}" + (f", and {len(written)} figures in {figures}" if figures else "")
    tell(json, {"report": str(out), "figures": written, "rows": len(rows)}, told)
    return 0


def _rows(path: Path) -> list[ResultRow]:
    from tntprune.sweep.results_file import ResultsFile

    if not path.is_file():
        raise UserError(
            f"{path}: {'not a file' if path.exists() else 'no such file'}; expected what tntprune sweep wrote"
        )
    rows = ResultsFile(path).rows()
    if not rows:
        raise UserError(f"{path}: no row in it; expected what tntprune sweep wrote")
    return list(rows.values())


def _bytes(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a file; expected a picture")
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise UserError(f"{path}: {size / 1e6:.0f} MB; expected a picture of at most {LARGEST / 1e6:.0f}")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a picture") from None


def _maps(model: str, host: HostFlags, reducer: str, photos: tuple[Path, ...]) -> tuple[str, bytes]:
    """Draw the paper's figure of token maps: its caption and a PNG."""
    from tntprune.methods.learned import blocks_of
    from tntprune.report.draw import photo_maps, row_titles, sheet
    from tntprune.serialization.checkpoint import load_, read

    loaded = host.load(model)
    learned = blocks_of(read(reducer, loaded).learned)
    blocks = tuple(block for block in BLOCKS if block in learned) or tuple(learned) or BLOCKS
    built = load_(loaded, reducer, at=blocks, keep=KEEP)
    maps = photo_maps(built, photos, each=True)
    caption = (
        f"{model} with {reducer}: kept tokens are clear, merged ones under faint stripes and dropped ones under strong "
        "ones, where half of the tokens go after one block; each column is a block on its own."
    )
    return caption, sheet(maps, row_titles(photos))

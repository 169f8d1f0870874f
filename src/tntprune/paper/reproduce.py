"""Carries a plan out: trainings, settings, token maps, pages. What is there already is not done again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tntprune.backbones.models import load_model, shape_of
from tntprune.errors import UsageError, UserError
from tntprune.paper import page
from tntprune.paper.compare import Measured
from tntprune.paper.entries import PaperPlan, TokenMap
from tntprune.paper.figures import figures
from tntprune.paper.trainings import RecipeName, folder, spent, train
from tntprune.report.draw import photo_maps, row_titles, sheet, write_picture
from tntprune.serialization.checkpoint import load_
from tntprune.sweep import SweepRequest, carry_out, plan_sweep
from tntprune.sweep.results import ResultRow
from tntprune.sweep.sweep_photos import Listing
from tntprune.system.distributed import ALONE, ProcessGroup
from tntprune.system.precision import Precision
from tntprune.system.storage import check_output, make_folder, write

RESULTS, PAGE, REPORT = "results.jsonl", "paper.md", "report.html"
SHOWN = 4  # photos in a figure of token maps


@dataclass(frozen=True)
class Options:
    """How a plan is carried out: the flags of `tntprune paper`, whose help says what each is.

    Args:
        train_data: None where everything is trained already.
        trainings: Where trainings lie; None is a folder in `out`.
        weights: Files by model; the Hub is asked for others.
        parts: That a training's batches are worked through in.
        command: That was given, for the pages.
    """

    data: Path
    train_data: Path | None
    out: Path
    recipe: RecipeName = "published"
    trainings: Path | None = None
    weights: dict[str, Path] = field(default_factory=dict)
    photos: tuple[Path, ...] = ()
    limit: int | None = None
    speed: bool = True
    precision: Precision = "fp32"
    batch_size: int = 32
    together: int = 8
    on_bad_image: Literal["error", "skip"] = "error"
    device: str = "cpu"
    workers: int | None = None
    seed: int = 0
    parts: int | None = None
    command: str = ""

    @property
    def trainings_folder(self) -> Path:
        """Where trainings lie."""
        return self.trainings or self.out / "trainings"


def run(plan: PaperPlan, options: Options, group: ProcessGroup = ALONE, progress: bool = True) -> list[Measured]:
    """Train, measure, draw and write.

    Returns:
        What was measured of each entry, in the plan's order.

    Raises:
        UsageError: what is needed was not given.
        UserError: something given cannot be used.
    """
    _check(plan, options)
    for file in (RESULTS, PAGE, REPORT):
        check_output(options.out / file, [options.data, *options.weights.values(), *options.photos])
    with group.main_first():
        make_folder(options.out)
    train(plan, options, group, progress and group.main)
    measured = _measure(plan, options, group, progress) if plan.all else []
    if group.main:
        maps = draw_maps(plan.maps, options, group.device(options.device))
        about = page.About(options.command, options.recipe, spent(plan, options.trainings_folder), RESULTS)
        write_pages(plan, measured, maps, about, options.out)
    group.wait()
    return measured


def _check(plan: PaperPlan, options: Options) -> None:
    """Refuse what cannot end well before hours are spent on it."""
    for model, file in options.weights.items():
        if not file.is_file():
            raise UserError(f"{file}: no such file; expected weights of {model}")
    if "vit16" in plan.models and "vit16" not in options.weights:
        raise UsageError("vit16: its authors released no weights; expected --weights vit16=FILE, or other --backbones")
    for photo in options.photos:
        if not photo.is_file():
            raise UserError(f"{photo}: no such photo; expected one for the token maps")
    first = plan.models[0]
    Listing(options.data, shape_of(first, weights=options.weights.get(first)), options.limit)


def _measure(plan: PaperPlan, options: Options, group: ProcessGroup, progress: bool) -> list[Measured]:
    requests = [
        SweepRequest(
            entry.model, entry.config,
            entry.training and folder(options.trainings_folder, entry.model, entry.training), entry.name, entry.scheme,
        )
        for entry in plan.runs
    ]  # fmt: skip
    made = plan_sweep(
        requests, options.data, weights=options.weights, batch_size=options.batch_size, precision=options.precision,
        limit=options.limit,
    )  # fmt: skip
    if made.left_out:
        raise UserError(f"a setting cannot be measured: {made.left_out[0]}")
    rows = carry_out(
        made, options.out / RESULTS, device=options.device, workers=options.workers, together=options.together,
        speed=options.speed, on_bad_image=options.on_bad_image, group=group, progress=progress,
    )  # fmt: skip
    found = {id(planned.request): row for planned, row in zip(made.settings, rows, strict=True)}
    return join(plan, {entry.run: found[id(asked)] for entry, asked in zip(plan.runs, requests, strict=True)})


def join(plan: PaperPlan, rows: dict[str, ResultRow]) -> list[Measured]:
    """Join the entries of a plan with their rows, which are given by what was run."""
    bases = {entry.model: rows[entry.run] for entry in plan.all if entry.config is None}
    every = (*plan.entries, *plan.bases, *plan.ablation)
    return [Measured(entry, rows[entry.run], bases[entry.model]) for entry in every]


def draw_maps(maps: Sequence[TokenMap], options: Options, device: str) -> list[tuple[str, bytes]]:
    """Draw a picture for each figure of token maps and write it; return its caption and the PNG."""
    found = []
    for one in maps:
        model = load_model(one.backbone, options.weights.get(one.backbone), device)
        photos = list(options.photos) or Listing(options.data, model, SHOWN).paths
        changes = {name: getattr(one.config, name) for name in ("at", "keep", "similar")}
        load_(model, folder(options.trainings_folder, one.backbone, one.training), **changes)
        picture = sheet(photo_maps(model, photos, each=True), row_titles(photos))
        write_picture(options.out / one.file, picture)
        found.append((one.caption, picture))
    return found


def write_pages(
    plan: PaperPlan, measured: Sequence[Measured], maps: Sequence[tuple[str, bytes]], about: page.About, out: Path
) -> None:
    """Write paper.md with its figures, and report.html."""
    from tntprune.report.build import build

    for name, data in figures(measured):
        write_picture(out / name, data)
    write(out / PAGE, page.text(plan, measured, about).encode("utf-8", "backslashreplace"))
    rows = list({one.row.setting.key: one.row for one in measured if one.entry.table != "ablation"}.values())
    if any(row.setting.config for row in rows):
        print(f"writing {out / REPORT}", file=sys.stderr)
        made = build(rows, page.TITLE, page.lead(plan, measured), maps, page.sections(measured))
        write(out / REPORT, made.encode())

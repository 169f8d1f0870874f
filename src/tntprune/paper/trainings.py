"""What has to be trained before the paper's settings can be run: once for each model and method."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tntprune.methods import TNT
from tntprune.paper.cost import Task
from tntprune.paper.entries import Agenda
from tntprune.paper.names import LEARNERS
from tntprune.system.distributed import ALONE, World
from tntprune.training.run_folder import LOG, read_log

if TYPE_CHECKING:
    from tntprune.training.recipes import Recipe

RecipeName = Literal["published", "short"]


def recipe(name: str, kind: RecipeName, seed: int = 0, parts: int | None = None) -> Recipe:
    """How something is trained.

    Args:
        name: Of LEARNERS.
        kind: "published", as each method's own paper has it, or "short", minutes for a thousand photos.
        seed: Of everything random.
        parts: That a step's batch is worked through in; None leaves it to the number of processes.
    """
    from tntprune.training import recipes

    config = LEARNERS[name]
    found = (recipes.published if kind == "published" else recipes.short)(config)
    if isinstance(config, TNT):
        found = replace(found, config=config)  # the authors' training, but of our scorer too
    return recipes.changed(found, {"seed": seed, "micro_batches": parts})


def tasks(plan: Agenda, kind: RecipeName) -> list[Task]:
    """The trainings that a plan needs."""
    found = []
    for model, name in plan.trainings:
        training = recipe(name, kind).training
        assert training.epochs is not None  # every recipe says how many
        found.append(Task(model, name, training.epochs, training.backbone_lr > 0))
    return found


def folder(trainings: Path, model: str, name: str) -> Path:
    """Where a training lives."""
    return trainings / f"{model}-{name}"


def train(
    plan: Agenda,
    data: Path | None,
    trainings: Path,
    kind: RecipeName,
    *,
    weights: dict[str, Path],
    device: str = "cpu",
    seed: int = 0,
    parts: int | None = None,
    world: World = ALONE,
    workers: int | None = None,
    progress: bool = True,
) -> None:
    """Train what a plan needs and what is not there yet; a training that was interrupted goes on.

    Args:
        plan: What is to be run.
        data: The photos, in class folders.
        trainings: Where trainings lie, one folder each.
        kind: See `recipe`.
        weights: Files of weights by model; the Hub is asked for others.
        device: Where.
        seed: Of everything random.
        parts: See `recipe`.
        world: The processes that work together.
        workers: Processes that read photos.
        progress: Show bars.

    Raises:
        UsageError: photos are needed and none are given, or what is there was trained with another recipe.
        UserError: a training fails.
    """
    from tqdm import tqdm

    from tntprune.backbones.models import load_model
    from tntprune.errors import UsageError
    from tntprune.reduce import reduce_
    from tntprune.serialization.checkpoint import FILE
    from tntprune.training.runs import train_folder

    found = {(model, name): folder(trainings, model, name) for model, name in plan.trainings}
    missing = {key: out for key, out in found.items() if not (out / FILE).is_file()}
    begun = {key for key, out in missing.items() if (out / LOG).is_file()}
    for out in found.values():
        before = None if out in missing.values() else recipe_of(out)
        if before not in (None, kind):
            raise UsageError(
                f"{out}: trained with the {before} recipe, given --recipe {kind}; expected --recipe {before}, or other "
                "--out or --trainings"
            )
    missing, begun = world.gather((missing, begun))[0]  # as the main process found it, before any began
    if missing and data is None:
        which = ", ".join(out.name for out in missing.values())
        raise UsageError(f"{which}: to be trained first; expected --train-data DIR, or --trainings DIR with them in it")
    for number, ((model, name), out) in enumerate(missing.items(), 1):
        if progress:
            tqdm.write(f"training {name} on {model}, {number} of {len(missing)}: {out}", file=sys.stderr)
        chosen = recipe(name, kind, seed, parts)
        reduced = reduce_(load_model(model, weights.get(model), device), chosen.config)
        assert data is not None
        about = {"model": model, "recipe": kind}
        train_folder(
            reduced, data, out, chosen, world=world, workers=workers, resume=(model, name) in begun, about=about,
            progress=progress,
        )  # fmt: skip


def recipe_of(out: Path) -> str | None:
    """The recipe that an ended training was given; None where its file does not say."""
    from tntprune.serialization.checkpoint import FILE, read
    from tntprune.serialization.plan import parsed

    note = parsed(read(out / FILE).made_by) or {}
    return note.get("recipe")


def spent(plan: Agenda, trainings: Path) -> dict[str, float]:
    """Seconds that each training took, over all the times it was resumed."""
    found = {}
    for model, name in plan.trainings:
        times = [float(line["seconds"]) for line in read_log(folder(trainings, model, name)) if "seconds" in line]
        if times:
            found[f"{model} {name}"] = times[-1]
    return found

"""What has to be trained before the paper's settings can be run: once for each model and method."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tntprune.methods import TNT
from tntprune.paper.entries import LEARNERS, PaperPlan
from tntprune.training.run_folder import LOG, read_log

if TYPE_CHECKING:
    from tntprune.paper.reproduce import Options
    from tntprune.system.distributed import ProcessGroup
    from tntprune.training.recipes import Recipe

RecipeName = Literal["published", "short"]


@dataclass(frozen=True)
class PlannedTraining:
    """One training: how many passes over how many images, and whether the model itself is trained.

    Args:
        model: Name.
        name: Of what is trained.
        epochs: Passes over the data.
        tunes: Whether the model itself is trained too.
    """

    model: str
    name: str
    epochs: int
    tunes: bool


def recipe(name: str, kind: RecipeName, seed: int = 0, parts: int | None = None) -> Recipe:
    """Return how something is trained.

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


def planned_trainings(plan: PaperPlan, kind: RecipeName) -> list[PlannedTraining]:
    """Return the trainings that a plan needs."""
    found = []
    for model, name in plan.trainings:
        training = recipe(name, kind).training
        assert training.epochs is not None  # every recipe says how many
        found.append(PlannedTraining(model, name, training.epochs, training.backbone_lr > 0))
    return found


def folder(trainings: Path, model: str, name: str) -> Path:
    """Return where a training lives."""
    return trainings / f"{model}-{name}"


def train(plan: PaperPlan, options: Options, group: ProcessGroup, progress: bool = True) -> None:
    """Train what a plan needs and what is not there yet; a training that was interrupted goes on.

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

    kind, data = options.recipe, options.train_data
    found = {(model, name): folder(options.trainings_folder, model, name) for model, name in plan.trainings}
    missing = {key: out for key, out in found.items() if not (out / FILE).is_file()}
    begun = {key for key, out in missing.items() if (out / LOG).is_file()}
    for key, out in found.items():
        before = None if key in missing else recipe_of(out)
        if before not in (None, kind):
            raise UsageError(
                f"{out}: trained with the {before} recipe, given --recipe {kind}; expected --recipe {before}, or other "
                "--out or --trainings"
            )
    missing, begun = group.gather((missing, begun))[0]  # as the main process found it, before any began
    if missing and data is None:
        which = ", ".join(out.name for out in missing.values())
        raise UsageError(f"{which}: to be trained first; expected --train-data DIR, or --trainings DIR with them in it")
    for number, ((model, name), out) in enumerate(missing.items(), 1):
        if progress:
            tqdm.write(f"training {name} on {model}, {number} of {len(missing)}: {out}", file=sys.stderr)
        chosen = recipe(name, kind, options.seed, options.parts)
        reduced = reduce_(load_model(model, options.weights.get(model), group.device(options.device)), chosen.config)
        assert data is not None
        train_folder(
            reduced, data, out, chosen, group=group, workers=options.workers, resume=(model, name) in begun,
            about={"model": model, "recipe": kind}, progress=progress,
        )  # fmt: skip


def recipe_of(out: Path) -> str | None:
    """Return the recipe that an ended training was given; None where its file does not say."""
    from tntprune.serialization.checkpoint import FILE, read
    from tntprune.serialization.plan import parsed

    note = parsed(read(out / FILE).made_by) or {}
    return note.get("recipe")


def spent(plan: PaperPlan, trainings: Path) -> dict[str, float]:
    """Return the seconds that each training took, over all the times it was resumed."""
    found = {}
    for model, name in plan.trainings:
        times = [float(line["seconds"]) for line in read_log(folder(trainings, model, name)) if "seconds" in line]
        if times:
            found[f"{model} {name}"] = times[-1]
    return found

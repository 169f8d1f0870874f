"""`tntprune train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tntprune.cli.console import tell
from tntprune.cli.options import MethodOptions, apply, config_from
from tntprune.cli.shared_flags import (
    Device,
    ImgSize,
    Json,
    Model,
    Reducer,
    Root,
    Samples,
    Seed,
    Split,
    Then,
    Weights,
    Workers,
    load,
)
from tntprune.cli.training_flags import Resume, SaveEvery, TensorBoard, TrainingFlags, Val
from tntprune.errors import UsageError
from tntprune.system.flags import Written


def train(
    model: Model,
    data: Annotated[
        str,
        tyro.conf.arg(
            metavar="DIR",
            help="photos, in class folders where the loss needs labels; or hfds/NAME, hfids/NAME, wds/DIR, torch/NAME",
        ),
    ],
    out: Annotated[Path, tyro.conf.arg(metavar="RUN", help="where the reducer, the log and checkpoints go"), Written()],
    method: Annotated[
        str | None,
        tyro.conf.arg(metavar="NAME", help="a method that learns (tnt), or with --unfreeze any", help_behavior_hint=""),
    ] = None,
    reducer: Reducer = None,
    reduction: MethodOptions = MethodOptions(),
    then: Then = (),
    preset: Annotated[
        Literal["none", "short", "published"],
        tyro.conf.arg(
            help="what is not given: the defaults told below; short: the method's in minutes on a thousand photos; "
            "published: its authors' on ImageNet"
        ),
    ] = "none",
    training: TrainingFlags = TrainingFlags(),
    val: Val = None,
    split: Split = None,
    val_split: Split = None,
    root: Root = None,
    samples: Samples = None,
    weights: Weights = None,
    img_size: ImgSize = None,
    device: Device = "cpu",
    seed: Seed = 0,
    workers: Workers = None,
    save_every: SaveEvery = 50,
    tensorboard: TensorBoard = False,
    resume: Resume = False,
    json: Json = False,
) -> int:
    """Train what a method learns, on a frozen model or together with it; or with --unfreeze fine-tune the model under a
    reduction that is there, with the unpruned model as the teacher.

    Several processes: torchrun --nproc-per-node 8 -m tntprune train ...
    """
    from dataclasses import replace
    from itertools import product

    from tntprune.backbones.attach import reduction_of
    from tntprune.methods import Random
    from tntprune.reduce import reduce_
    from tntprune.serialization.checkpoint import FILE, WEIGHTS, files_of
    from tntprune.system.distributed import join
    from tntprune.system.storage import check_output
    from tntprune.training.config import Training
    from tntprune.training.jobs import train_folder
    from tntprune.training.recipes import Recipe, changed, published, short
    from tntprune.training.run_folder import ended
    from tntprune.training.runs import BEST, EMA

    options = {**vars(training), "seed": seed}
    tunes = options["unfreeze"] is not None
    _check(tunes, method, reducer, then, preset)
    if tunes:
        recipe = changed(Recipe(Random(), Training()), options)  # what is wrong is told before a model is loaded
    else:
        config = config_from(method or "tnt", reduction)
        recipe = {"none": lambda c: Recipe(c, Training()), "short": short, "published": published}[preset](config)
        recipe = changed(recipe, options)
    places = () if out.is_file() else (out, out / BEST, out / EMA)  # a file is told in other words
    for place, name in product(places, (FILE, WEIGHTS)):
        check_output(place / name, [weights, *files_of(reducer)])
    world = join(device)
    built = load(model, weights, world.device(device), img_size)
    if tunes:
        built = apply(built, method, reducer, reduction, then)
        recipe = replace(recipe, config=reduction_of(built).config)
    else:
        built = reduce_(built, recipe.config)
    about: dict[str, Any] = {"model": model, "weights": weights and str(weights.resolve())}
    if img_size is not None:
        about["img_size"] = list(img_size)
    if reducer is not None:
        about["reducer"] = str(Path(reducer).resolve()) if Path(reducer).exists() else reducer
    over = resume and ended(out) is not None
    found = train_folder(
        built, data, out, recipe, val=val, split=split, val_split=val_split, root=root, samples=samples,
        workers=workers, resume=resume, save_every=save_every, about=about, tensorboard=tensorboard, world=world,
    )  # fmt: skip
    if not world.main:
        return 0
    told = {"reducer": str(found.path), **found._asdict(), "seconds": round(found.seconds, 1)}
    del told["path"]
    tell(json, told, f"the training had ended already: {found.path}" if over else str(found))
    return 0


def _check(tunes: bool, method: str | None, reducer: str | None, then: tuple[str, ...], preset: str) -> None:
    """Refuse what does not go with fine-tuning, or goes with nothing else."""
    if not tunes and (reducer is not None or then):
        what = "--then" if reducer is None else f"--reducer {reducer}"
        raise UsageError(f"{what} without --unfreeze; expected --unfreeze norms, for example, or neither")
    if tunes and method is None and reducer is None:
        raise UsageError("--unfreeze, and nothing that removes tokens; expected --reducer RUN or --method tome too")
    if tunes and preset != "none":
        raise UsageError(f"--preset {preset} is for what a method learns, and with --unfreeze it learns nothing")

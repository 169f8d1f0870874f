"""`tntprune train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tntprune.console import (
    Device,
    ImgSize,
    Json,
    Model,
    Root,
    Samples,
    Seed,
    Split,
    Weights,
    Workers,
    load,
    tell,
)  # fmt: skip
from tntprune.options import MethodOptions, config_from
from tntprune.trainflags import Resume, SaveEvery, TensorBoard, TrainingFlags, Val


def train(
    model: Model,
    data: Annotated[
        str,
        tyro.conf.arg(
            metavar="DIR",
            help="photos, in class folders where the loss needs labels; or hfds/NAME, hfids/NAME, wds/DIR, torch/NAME",
        ),
    ],
    out: Annotated[Path, tyro.conf.arg(metavar="RUN", help="where the reducer, the log and checkpoints go")],
    method: Annotated[str, tyro.conf.arg(metavar="NAME", help="a method that learns")] = "tnt",
    reduction: MethodOptions = MethodOptions(),
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
    """Train what a method learns, on a frozen model or together with it.

    Several processes: torchrun --nproc-per-node 8 -m tntprune train ...
    """
    from tntprune.jobs import train_folder
    from tntprune.recipes import Recipe, changed, published, short
    from tntprune.reduce import reduce_
    from tntprune.runfolder import ended
    from tntprune.training import Training
    from tntprune.world import join

    config = config_from(method, reduction)
    recipe = {"none": lambda c: Recipe(c, Training()), "short": short, "published": published}[preset](config)
    recipe = changed(recipe, {**vars(training), "seed": seed})
    world = join(device)
    built = reduce_(load(model, weights, world.device(device), img_size), recipe.config)
    about: dict[str, Any] = {"model": model, "weights": weights and str(weights.resolve())}
    if img_size is not None:
        about["img_size"] = list(img_size)
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

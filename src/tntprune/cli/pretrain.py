"""`tntprune pretrain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from tntprune.cli.console import tell
from tntprune.cli.shared_flags import Device, ImgSize, Json, Model, PhotosOf, Root, Samples, Seed, Split, Workers
from tntprune.cli.training_flags import Resume, SaveEvery, ScratchFlags, TensorBoard, Val
from tntprune.system.flags import Within, Written


def pretrain(
    model: Model,
    data: PhotosOf,
    out: Annotated[Path, tyro.conf.arg(metavar="RUN", help="where the weights, the log and checkpoints go"), Written()],
    num_classes: Annotated[
        int | None,
        tyro.conf.arg(metavar="INT", help="of the model (as many as class folders)", help_behavior_hint=""),
        Within(1, 1_000_000),
    ] = None,
    training: ScratchFlags = ScratchFlags(),
    val: Val = None,
    split: Split = None,
    val_split: Split = None,
    root: Root = None,
    samples: Samples = None,
    img_size: ImgSize = None,
    device: Device = "cpu",
    seed: Seed = 0,
    workers: Workers = None,
    save_every: SaveEvery = 50,
    tensorboard: TensorBoard = False,
    resume: Resume = False,
    json: Json = False,
) -> int:
    """Train a backbone itself from random weights, by DeiT's recipe; for --weights RUN/model.safetensors.

    Several processes: torchrun --nproc-per-node 8 -m tntprune pretrain ...
    """
    from tntprune.system.distributed import join
    from tntprune.training.jobs import train_folder
    from tntprune.training.pretraining import classes_of, untrained
    from tntprune.training.recipes import changed, scratch
    from tntprune.training.run_folder import ended

    recipe = changed(scratch(), {**vars(training), "backbone_lr": vars(training)["lr"], "seed": seed})
    world = join(device)
    classes, names = classes_of(data, split, num_classes)
    built = untrained(model, recipe, classes, world.device(device), img_size, names)
    about: dict[str, Any] = {"model": model, "classes": classes}
    if img_size is not None:
        about["img_size"] = list(img_size)
    over = resume and ended(out) is not None
    found = train_folder(
        built, data, out, recipe, val=val, split=split, val_split=val_split, root=root, samples=samples,
        workers=workers, resume=resume, save_every=save_every, about=about, backbone=True, tensorboard=tensorboard,
        world=world,
    )  # fmt: skip
    if not world.main:
        return 0
    told = {"weights": str(found.path), "classes": classes, **found._asdict(), "seconds": round(found.seconds, 1)}
    del told["path"]
    tell(json, told, f"the training had ended already: {found.path}" if over else str(found))
    return 0

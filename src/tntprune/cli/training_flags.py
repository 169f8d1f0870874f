"""The options of a training and of its images as flags; what is not given takes what the recipe says."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tntprune.cli.shared_flags import MAX_BATCH
from tntprune.system.flags import MANY, MAX_PARTS, Within

MOST_RATE = 1000.0
SHARE, BELOW_ONE = Within(0, 1), Within(0, 1, below=True)
RANGES: dict[str, Within] = {
    "epochs": Within(1, 1_000_000),
    "batch_size": Within(1, MAX_BATCH),
    "parts": Within(1, MAX_PARTS),
    "lr": Within(0, MOST_RATE, above=True),
    "backbone_lr": Within(0, MOST_RATE),
    "rank": Within(1, 65536),
    "distill": SHARE,
    "freeze_epochs": Within(0, 1_000_000),
    "weight_decay": Within(0, MOST_RATE),
    "label_smoothing": BELOW_ONE,
    "warmup": BELOW_ONE,
    "warmup_lr": Within(0, MOST_RATE),
    "min_lr": Within(0, MOST_RATE),
    "clip": Within(0, 1e6, above=True),
    "ema": BELOW_ONE,
    "drop_path": BELOW_ONE,
    "crop": Within(0, 1, above=True),
    "hflip": SHARE,
    "color_jitter": Within(0, 100),
    "random_erasing": SHARE,
    "mixup": Within(0, 100),
    "cutmix": Within(0, 100),
    "repeats": Within(1, 1000),
}

FLAGS: dict[str, tuple[Any, str, str, str]] = {  # type, what stands for a value, what it is, the default as it is told
    "epochs": (int, "INT", "passes over the photos", "as many as make 120 steps, or 24 a block that learns"),
    "batch_size": (int, "INT", "photos a step, over all processes", "16"),
    "parts": (int, "INT", "of a batch, worked through one by one or by several processes", "one a process"),
    "lr": (float, "FLOAT", "peak learning rate", "0.01"),
    "backbone_lr": (float, "FLOAT", "of the model itself; 0 keeps it frozen", "0, or what suits --unfreeze"),
    "unfreeze": (
        Literal["all", "head", "norms", "lowrank"], "{all,head,norms,lowrank}",
        "fine-tune this of the model under --reducer RUN, or a --method that needs no training", "nothing",
    ),
    "rank": (int, "INT", "of --unfreeze lowrank", "8"),
    "distill": (
        float, "FLOAT", "weight of the divergence from the unpruned model with --unfreeze; the rest: labels", "1",
    ),
    "freeze_epochs": (int, "INT", "epochs before --backbone-lr begins", "0"),
    "weight_decay": (float, "FLOAT", "AdamW's", "0"),
    "label_smoothing": (float, "FLOAT", "of training against labels; the authors' is 0.1", "0"),
    "warmup": (float, "FLOAT", "share of the steps in which the rate rises", "0.1"),
    "warmup_lr": (float, "FLOAT", "where it rises from", "lr / 100"),
    "min_lr": (float, "FLOAT", "where it ends", "lr / 100"),
    "clip": (float, "FLOAT", "largest norm of the gradients", "no limit"),
    "ema": (float, "FLOAT", "decay of a moving average, saved in RUN/ema", "0: none"),
    "drop_path": (float, "FLOAT", "stochastic depth; on a frozen model too", "0"),
    "amp": (
        Literal["auto", "none", "bf16", "fp16"], "{auto,none,bf16,fp16}",
        "precision of the model, under autocast; auto: bf16 where it is fast", "auto",
    ),
    "crop": (float, "FLOAT", "smallest share of the area in random crops", "0.35"),
    "hflip": (float, "FLOAT", "probability of mirror images", "0.5"),
    "auto_augment": (str, "TEXT", "timm's RandAugment and the like, or none; such as rand-m9-mstd0.5-inc1", "none"),
    "color_jitter": (float, "FLOAT", "of brightness, contrast, saturation", "0"),
    "random_erasing": (float, "FLOAT", "probability of an erased rectangle", "0"),
    "mixup": (float, "FLOAT", "blend two photos; the authors' is 0.8", "0"),
    "cutmix": (float, "FLOAT", "paste one photo into another; the authors' is 1", "0"),
    "repeats": (int, "INT", "times a photo comes in an epoch; the authors' is 3", "1"),
}  # fmt: skip

Val = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="DIR",
        help="labelled photos to validate on after each epoch; the best goes to RUN/best",
        help_behavior_hint="",
    ),
]
SaveEvery = Annotated[int, tyro.conf.arg(metavar="STEPS", help="between checkpoints"), Within(1, MANY)]
TensorBoard = Annotated[bool, tyro.conf.arg(help="also log for TensorBoard, in RUN/tensorboard")]
Resume = Annotated[bool, tyro.conf.arg(help="continue the training in RUN")]

TUNED = ("backbone_lr", "freeze_epochs", "unfreeze", "rank", "distill")  # of a model that has its weights
SCRATCH = {  # what `recipes.scratch` says
    "epochs": "300", "batch_size": "1024", "lr": "0.001 at 1024 photos a step", "weight_decay": "0.05",
    "label_smoothing": "0.1", "warmup": "1/60", "warmup_lr": "1e-6", "min_lr": "1e-5", "ema": "0.99996",
    "drop_path": "0.1", "crop": "0.08", "auto_augment": "rand-m9-mstd0.5-inc1", "color_jitter": "0.3",
    "random_erasing": "0.25", "mixup": "0.8", "cutmix": "1", "repeats": "3",
}  # fmt: skip


def _fields(defaults: dict[str, str], without: tuple[str, ...] = ()) -> list[tuple[str, Any, Any]]:
    found = []
    for name, (kind, metavar, about, default) in FLAGS.items():
        if name not in without:
            told = f"{about.split(';')[0] if name in defaults else about} ({defaults.get(name, default)})"
            flag = tyro.conf.arg(metavar=metavar, help=told, help_behavior_hint="")
            marks = (flag, RANGES[name]) if name in RANGES else (flag,)
            found.append((name, Annotated[(kind | None, *marks)], field(default=None)))
    return found


if TYPE_CHECKING:

    class TrainingFlags:
        """Options of the training."""

    class ScratchFlags:
        """Options of the training."""
else:
    TrainingFlags = make_dataclass("TrainingFlags", _fields({}), frozen=True)
    ScratchFlags = make_dataclass("ScratchFlags", _fields(SCRATCH, TUNED), frozen=True)
    TrainingFlags.__doc__ = ScratchFlags.__doc__ = "Options of the training."

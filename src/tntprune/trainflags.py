"""The options of a training and of its images as flags; what is not given takes what the preset says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro


def _flag(metavar: str, help: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help=help, help_behavior_hint="")


@dataclass(frozen=True)
class TrainingFlags:
    """Options of the training."""

    epochs: Annotated[int | None, _flag("INT", "passes over the photos (5)")] = None
    batch_size: Annotated[int | None, _flag("INT", "photos a step, over all processes (16)")] = None
    parts: Annotated[
        int | None, _flag("INT", "that a batch is worked through in; the result is the same (one a process)")
    ] = None
    lr: Annotated[float | None, _flag("FLOAT", "peak learning rate (0.01)")] = None
    backbone_lr: Annotated[float | None, _flag("FLOAT", "of the model itself; 0 keeps it frozen (0)")] = None
    freeze_epochs: Annotated[int | None, _flag("INT", "epochs before --backbone-lr begins (0)")] = None
    weight_decay: Annotated[float | None, _flag("FLOAT", "AdamW's (0)")] = None
    label_smoothing: Annotated[float | None, _flag("FLOAT", "of training against labels; the authors' is 0.1 (0)")] = (
        None
    )
    warmup: Annotated[float | None, _flag("FLOAT", "share of the steps in which the rate rises (0.1)")] = None
    warmup_lr: Annotated[float | None, _flag("FLOAT", "where it rises from (lr / 100)")] = None
    min_lr: Annotated[float | None, _flag("FLOAT", "where it ends (lr / 100)")] = None
    clip: Annotated[float | None, _flag("FLOAT", "largest norm of the gradients (no limit)")] = None
    ema: Annotated[float | None, _flag("FLOAT", "decay of a moving average, saved in RUN/ema (0: none)")] = None
    drop_path: Annotated[float | None, _flag("FLOAT", "stochastic depth, on a frozen model too (0)")] = None
    amp: Annotated[
        Literal["auto", "none", "bf16", "fp16"] | None,
        _flag("{auto,none,bf16,fp16}", "precision of the model, under autocast; auto: bf16 where it is fast (auto)"),
    ] = None
    crop: Annotated[float | None, _flag("FLOAT", "smallest share of the area in random crops (0.35)")] = None
    hflip: Annotated[float | None, _flag("FLOAT", "probability of mirror images (0.5)")] = None
    auto_augment: Annotated[str | None, _flag("TEXT", "timm's, such as rand-m9-mstd0.5-inc1 (none)")] = None
    color_jitter: Annotated[float | None, _flag("FLOAT", "of brightness, contrast, saturation (0)")] = None
    random_erasing: Annotated[float | None, _flag("FLOAT", "probability of an erased rectangle (0)")] = None
    mixup: Annotated[float | None, _flag("FLOAT", "blend two photos; the authors' is 0.8 (0)")] = None
    cutmix: Annotated[float | None, _flag("FLOAT", "paste one photo into another; the authors' is 1 (0)")] = None
    repeats: Annotated[int | None, _flag("INT", "times a photo comes in an epoch; the authors' is 3 (1)")] = None

"""What a plan costs: multiply-accumulates in closed form, and the time that they take on a device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tntprune.analysis.macs import macs
from tntprune.backbones.base import find_backbone
from tntprune.backbones.models import random_model, shape_of
from tntprune.methods import Config
from tntprune.paper.entries import Agenda
from tntprune.reduce import reduce_, restore_
from tntprune.system.clock import wait
from tntprune.system.precision import Precision, autocast

VAL, TRAIN = 50_000, 1_281_167  # images of ImageNet-1k
ROUNDS = 2
TOGETHER = 8  # settings that are run on each batch
TIMED = 12 * 32  # images that a setting is timed on
FROZEN, TUNED = 3.0, 4.0  # passes that a step of training is worth, on a frozen model and on one that is tuned
HOW = (
    "a few images through each unpruned model with random weights on {device}, the fastest of {rounds} rounds, scaled "
    "by multiply-accumulates and images; a training step counts as {frozen:g} passes, {tuned:g} where the model itself "
    "is trained. Reading photos is not in it"
)

_shape = cache(shape_of)


@cache
def count(model: str, config: Config | None) -> int:
    """Multiply-accumulates of a model, by its name, with or without a reduction. No weights, nothing is run."""
    shape = restore_(_shape(model))
    return macs(shape if config is None else reduce_(shape, config)).macs


@dataclass(frozen=True)
class Task:
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


@dataclass(frozen=True)
class Estimate:
    """Seconds on this device.

    Args:
        evaluating: Of all settings.
        training: Of each training, by "model name".
        images: That are evaluated.
        photos: That are trained on.
        per_image: Of each unpruned model.
        how: It was worked out.
    """

    evaluating: float
    training: dict[str, float]
    images: int
    photos: int
    per_image: dict[str, float]
    how: str

    @property
    def total(self) -> float:
        """Everything."""
        return self.evaluating + sum(self.training.values())


def estimate(
    plan: Agenda,
    trainings: list[Task],
    device: str,
    precision: Precision = "fp32",
    images: int = VAL,
    photos: int = TRAIN,
    speed: bool = True,
    per_image: Mapping[str, float] | None = None,
) -> Estimate:
    """The time a plan takes.

    Args:
        plan: What is to be run.
        trainings: What is to be trained before.
        device: Where.
        precision: Of the forward pass: "fp32", "bf16" or "fp16".
        images: To evaluate.
        photos: To train on.
        speed: Whether times are taken as well.
        per_image: Seconds of each unpruned model, if they are known; else they are measured.
    """
    pace = dict(per_image or {})
    listed = {entry.model: entry.backbone for entry in plan.all}
    for name in plan.models:
        like = listed.get(name, name)  # plain DeiT takes as long as the distilled one that it is listed under
        if like not in pace:
            pace[like] = seconds(like, device, precision)
        pace.setdefault(name, pace[like] * count(name, None) / count(like, None))
    shared = 1 / TOGETHER  # the unpruned model runs beside each group of settings
    work = sum(
        (count(entry.model, entry.config) / count(entry.model, None) + shared) * pace[entry.model]
        for entry in plan.runs
    )
    taught = {
        f"{task.model} {task.name}": task.epochs * photos * (TUNED if task.tunes else FROZEN) * pace[task.model]
        for task in trainings
    }
    how = HOW.format(device=device, rounds=ROUNDS, frozen=FROZEN, tuned=TUNED)
    return Estimate(work * (images + speed * TIMED), taught, images, photos, pace, how)


@torch.inference_mode()
def seconds(name: str, device: str, precision: Precision = "fp32") -> float:
    """Of one image through an unpruned model with random weights."""
    model: Any = random_model(name, device)
    where = torch.device(device)
    batch = 32 if where.type == "cuda" else 1
    x = torch.randn(batch, *find_backbone(model).input_size(model), device=where)
    best = float("inf")
    for turn in range(ROUNDS + 1):
        wait(where)
        begin = time.perf_counter()
        with autocast(where, precision):
            model(x)
        wait(where)
        if turn:  # the first one chooses kernels
            best = min(best, time.perf_counter() - begin)
    return best / batch


def duration(seconds: float) -> str:
    """A time as a person says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"

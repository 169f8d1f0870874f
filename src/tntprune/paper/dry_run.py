"""The plan on paper: what would be run, its multiply-accumulates in closed form, and how long it would take here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tntprune.analysis.macs import macs
from tntprune.backbones.base import find_backbone
from tntprune.backbones.models import random_model, shape_of
from tntprune.data.images import find_images
from tntprune.methods import Config, to_dict
from tntprune.paper.entries import Entry, PaperPlan
from tntprune.paper.tables import SHORT
from tntprune.paper.trainings import PlannedTraining, RecipeName, planned_trainings
from tntprune.reduce import reduce_, restore_
from tntprune.system.clock import wait
from tntprune.system.precision import Precision, autocast

VAL, TRAIN = 50_000, 1_281_167  # images of ImageNet-1k
ROUNDS = 2
TOGETHER = 8  # settings that are run on each batch
TIMED = 12 * 32  # images that a setting is timed on
FROZEN, TUNED = 3.0, 4.0  # passes that a step of training is worth, on a frozen model and on one that is tuned
HOW = (
    f"a few images through each unpruned model with random weights on {{device}}, the fastest of {ROUNDS} rounds, "
    f"scaled by multiply-accumulates and images; a training step counts as {FROZEN:g} passes, {TUNED:g} where the "
    "model itself is trained. Reading photos is not in it"
)
HEADER = f"{'method':36} {'parameter':>20} {'GMACs':>7} {'of all':>7}  {'GFLOPs':>7} {'of all':>7}  needs"
HEADINGS = {"single": "one location", "multi": "several locations", "ablation": "ablation"}

_shape = cache(shape_of)


@cache
def count(model: str, config: Config | None) -> int:
    """Return the multiply-accumulates of a model, by its name, with or without a reduction; without weights or runs."""
    shape = restore_(_shape(model))
    return macs(shape if config is None else reduce_(shape, config)).macs


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
    plan: PaperPlan,
    trainings: list[PlannedTraining],
    device: str,
    precision: Precision = "fp32",
    images: int = VAL,
    photos: int = TRAIN,
    speed: bool = True,
    per_image: Mapping[str, float] | None = None,
) -> Estimate:
    """Estimate the time that a plan takes.

    Args:
        plan: What is to be run.
        trainings: What is to be trained before.
        device: Where.
        precision: Of the forward pass.
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
        f"{one.model} {one.name}": one.epochs * photos * (TUNED if one.tunes else FROZEN) * pace[one.model]
        for one in trainings
    }
    return Estimate(work * (images + speed * TIMED), taught, images, photos, pace, HOW.format(device=device))


@torch.inference_mode()
def seconds(name: str, device: str, precision: Precision = "fp32") -> float:
    """Time one image through an unpruned model with random weights."""
    model: Any = random_model(name, device)
    where = torch.device(device)
    batch = 32 if where.type == "cuda" else 1
    x = torch.randn(batch, *find_backbone(model).input_size(model), device=where)
    times = []
    for _ in range(ROUNDS + 1):
        wait(where)
        begin = time.perf_counter()
        with autocast(where, precision):
            model(x)
        wait(where)
        times.append(time.perf_counter() - begin)
    return min(times[1:]) / batch  # the first one chooses kernels


def duration(seconds: float) -> str:
    """Return a time as a person says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def dry_run(
    plan: PaperPlan,
    data: Path | None,
    train_data: Path | None,
    recipe: RecipeName,
    limit: int | None,
    device: str,
    precision: Precision,
    speed: bool = True,
) -> tuple[dict[str, Any], str]:
    """Return the plan as JSON values, and as text for a person.

    Without `data` and `train_data` the photos of ImageNet are counted, 50,000 and 1,281,167.
    """
    trainings = planned_trainings(plan, recipe)
    images, photos = (
        usual if folder is None else len(find_images(folder)) for folder, usual in ((data, VAL), (train_data, TRAIN))
    )
    found = estimate(plan, trainings, device, precision, min(images, limit or images), photos, speed)
    told = {
        "settings": [_setting(entry) for entry in plan.entries],
        "ablation": [_setting(entry) for entry in plan.ablation],
        "bases": [_setting(entry) for entry in plan.bases],
        "maps": [{"backbone": m.backbone, "name": m.name, "config": to_dict(m.config)} for m in plan.maps],
        "left_out": plan.told_left_out,
        "trainings": [{**asdict(one), "recipe": recipe} for one in trainings],
        "estimate": {**asdict(found), "total": found.total},
    }
    return told, _text(plan, trainings, found, recipe)


def _setting(entry: Entry) -> dict[str, Any]:
    authors = entry.authors
    return {
        **entry.row,
        "macs": count(entry.model, entry.config),
        "model": entry.model,
        "config": None if entry.config is None else to_dict(entry.config),
        "training": entry.training,
        "authors": None if authors is None else asdict(authors),
        "note": entry.note or (authors.not_met if authors is not None else ""),
    }


def _text(plan: PaperPlan, trainings: list[PlannedTraining], found: Estimate, recipe: str) -> str:
    lines = []
    last = None
    for entry in (*plan.entries, *plan.bases, *plan.ablation):
        group = (entry.backbone, entry.table)
        if group != last and entry.table != "unpruned":
            lines += ["", f"{entry.backbone}, {HEADINGS[entry.table]}", ""]
            lines += [f"{'':57} {'here':>15}  {'the paper':>15}", HEADER]
            last = group
        lines.append(_line(entry))
    lines.append("")
    if any(entry.authors is not None and entry.authors.not_met for entry in plan.all):
        lines += ["* what the paper prints is not what its setting takes; `settings.note` of --json says more", ""]
    lines += [f"left out: {method} on {backbone}: {reason}" for backbone, method, reason in plan.left_out]
    lines += [f"token maps: {one.backbone}, {one.name}, each of blocks 1 to 5 on its own" for one in plan.maps]
    lines += ["", f"trainings, {recipe} recipe:"]
    for one in trainings:
        about = "together with the model" if one.tunes else "on the frozen model"
        told, name = duration(found.training[f"{one.model} {one.name}"]), f"{one.model} {one.name}"
        lines.append(f"  {name}: {one.epochs} epochs of {found.photos} photos {about}, {told}")
    lines += [
        "",
        f"{len(plan.runs)} settings to run on {found.images} photos: {duration(found.evaluating)}",
        f"with the trainings: {duration(found.total)}",
        f"estimated from {found.how}.",
    ]
    return "\n".join(lines).lstrip("\n")


def _line(entry: Entry) -> str:
    macs, authors = count(entry.model, entry.config), entry.authors
    ours = f"{macs / 1e9:7.2f} {macs / count(entry.model, None):7.0%}"
    theirs = f"{authors.gmacs:7.2f} {authors.share:7.0%}" if authors is not None else f"{'':15}"
    if entry.table == "unpruned":
        return f"{entry.model + ', unpruned':57} {ours}  {theirs}".rstrip()
    if authors is not None:
        theirs += ("" if entry.own else f"  of {SHORT[authors.backbone]}") + (" *" if authors.not_met else "")
    plain = f" on {entry.model}" if entry.model != entry.backbone else ""
    needs = "" if entry.training is None else f"  training {entry.training}{plain}"
    return f"{entry.name:36} {entry.parameter:>20} {ours}  {theirs}{needs}".rstrip()

"""The plan on paper: what would be run, what it costs, and how long it would take here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from tntprune.methods import to_dict
from tntprune.paper.cost import TRAIN, VAL, Estimate, Task, count, duration, estimate
from tntprune.paper.entries import Agenda, Entry
from tntprune.paper.tables import SHORT
from tntprune.paper.trainings import RecipeName, tasks

HEADER = f"{'method':36} {'parameter':>20} {'GMACs':>7} {'of all':>7}  {'GFLOPs':>7} {'of all':>7}  needs"
HEADINGS = {"single": "one location", "multi": "several locations", "ablation": "ablation"}


def dry(
    plan: Agenda,
    data: Path | None,
    train_data: Path | None,
    recipe: RecipeName,
    limit: int | None,
    device: str,
    precision: Literal["fp32", "bf16", "fp16"],
    speed: bool = True,
) -> tuple[dict[str, Any], str]:
    """The plan as JSON values, and as text for a person.

    Args:
        plan: What would be run.
        data: Photos to evaluate; ImageNet's 50,000 are counted without.
        train_data: Photos to train on; ImageNet's 1,281,167 are counted without.
        recipe: See `tntprune.paper.trainings.recipe`.
        limit: Photos to evaluate at most.
        device: Where.
        precision: Of the forward pass.
        speed: Whether times would be taken.
    """
    todo = tasks(plan, recipe)
    images, photos = _images(data, VAL), _images(train_data, TRAIN)
    found = estimate(plan, todo, device, precision, min(images, limit or images), photos, speed)
    told = {
        "settings": [_setting(entry) for entry in plan.entries],
        "ablation": [_setting(entry) for entry in plan.ablation],
        "bases": [_setting(entry) for entry in plan.bases],
        "maps": [{"backbone": m.backbone, "name": m.name, "config": to_dict(m.config)} for m in plan.maps],
        "left_out": [{"backbone": b, "method": m, "reason": reason} for b, m, reason in plan.left_out],
        "trainings": [{**asdict(task), "recipe": recipe} for task in todo],
        "estimate": {**asdict(found), "total": found.total},
    }
    return told, _text(plan, todo, found, recipe)


def _images(folder: Path | None, usual: int) -> int:
    from tntprune.data.images import find_images

    return usual if folder is None else len(find_images(folder))


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


def _text(plan: Agenda, todo: list[Task], found: Estimate, recipe: str) -> str:
    lines = []
    last = None
    for entry in (*plan.entries, *plan.bases, *plan.ablation):
        group = (entry.backbone, entry.table)
        if group != last and entry.table != "unpruned":
            lines += ["", f"{entry.backbone}, {HEADINGS[entry.table]}", ""]
            lines += [f"{'':57} {'here':>15}  {'the paper':>15}", HEADER]
        last = group if entry.table != "unpruned" else last
        lines.append(_line(entry))
    lines.append("")
    if any(entry.authors is not None and entry.authors.not_met for entry in plan.all):
        lines += ["* what the paper prints is not what its setting takes; `settings.note` of --json says more", ""]
    lines += [f"left out: {method} on {backbone}: {reason}" for backbone, method, reason in plan.left_out]
    lines += [f"token maps: {one.backbone}, {one.name}, each of blocks 1 to 5 on its own" for one in plan.maps]
    lines += ["", f"trainings, {recipe} recipe:"]
    for task in todo:
        about = "together with the model" if task.tunes else "on the frozen model"
        time = found.training[f"{task.model} {task.name}"]
        lines.append(
            f"  {task.model} {task.name}: {task.epochs} epochs of {found.photos} photos {about}, {duration(time)}"
        )
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
    if authors is not None and not entry.own:
        theirs += f"  of {SHORT[authors.backbone]}"
    if authors is not None and authors.not_met:
        theirs += " *"
    plain = f" on {entry.model}" if entry.model != entry.backbone else ""
    needs = "" if entry.training is None else f"  training {entry.training}{plain}"
    return f"{entry.name:36} {entry.parameter:>20} {ours}  {theirs}{needs}".rstrip()

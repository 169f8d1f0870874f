"""`tntprune paper`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from tntprune.console import Device, Json, Seed, Workers, tell


def paper(
    data: Annotated[
        Path | None,
        tyro.conf.arg(metavar="DIR", help="photos to evaluate, in class folders", help_behavior_hint=""),
    ] = None,
    train_data: Annotated[
        Path | None,
        tyro.conf.arg(metavar="DIR", help="photos to train on, in class folders", help_behavior_hint=""),
    ] = None,
    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="DIR", help="where results, trainings and pages go", help_behavior_hint=""),
    ] = None,
    backbones: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="MODEL...",
            help="the paper's four, or any other model, for which the whole plan is made",
            help_behavior_hint="",
        ),
    ] = (),
    only: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="NAME...",
            help="parts (single, multi, ablation, maps) and methods (random, topk, zerotprune, dynamicvit, tome, evit, "
            "tnt, tnt-mlp, tnt-relative)",
            help_behavior_hint="",
        ),
    ] = (),
    weights: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="FILE...",
            help="weights of the one model that is run, or MODEL=FILE for each; without them timm asks the Hub",
            help_behavior_hint="",
        ),
    ] = (),
    recipe: Annotated[
        Literal["published", "short"],
        tyro.conf.arg(help="train as each method's paper says, or for minutes on a thousand photos"),
    ] = "published",
    trainings: Annotated[
        Path | None,
        tyro.conf.arg(metavar="DIR", help="trainings that are there already (OUT/trainings)", help_behavior_hint=""),
    ] = None,
    photos: Annotated[
        tuple[Path, ...],
        tyro.conf.arg(metavar="FILE...", help="photos for the token maps (four of --data)", help_behavior_hint=""),
    ] = (),
    limit: Annotated[
        int | None,
        tyro.conf.arg(metavar="INT", help="photos to evaluate, spread over the classes", help_behavior_hint=""),
    ] = None,
    dry_run: Annotated[bool, tyro.conf.arg(help="print the plan, its MACs and an estimate of the time")] = False,
    speed: Annotated[bool, tyro.conf.arg(help="leave out images/s and memory")] = True,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], tyro.conf.arg(help="of the forward pass; the head stays in fp32")
    ] = "fp32",
    batch_size: Annotated[int, tyro.conf.arg(metavar="INT", help="photos at a time")] = 32,
    together: Annotated[
        int | None,
        tyro.conf.arg(metavar="INT", help="settings for which photos are read once", help_behavior_hint=""),
    ] = None,
    device: Device = "cpu",
    workers: Workers = None,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Every table and figure of the paper, beside what its authors reported.

    Trains what learns, evaluates every setting, and writes results.jsonl, report.html and paper.md. What was done is
    not done again: run the same command to continue.
    """
    from tntprune.paper.names import BACKBONES
    from tntprune.paper.plan import make_plan

    plan = make_plan(backbones or BACKBONES, only)
    if dry_run:
        from tntprune.paper.dry import dry

        told, text = dry(plan, data, train_data, recipe, limit, device, precision)
        tell(json, told, text)
        return 0
    return 1

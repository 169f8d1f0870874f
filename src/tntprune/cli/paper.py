"""`tntprune paper`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from tntprune.cli.console import tell
from tntprune.cli.shared_flags import BatchSize, Device, Json, OnBadImage, Seed, Workers
from tntprune.system.flags import MANY, MAX_PARTS, Within, Written


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
        Written(),
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
        tyro.conf.arg(
            metavar="INT", help="photos to evaluate, chosen at random and always the same", help_behavior_hint=""
        ),
        Within(1, MANY),
    ] = None,
    dry_run: Annotated[bool, tyro.conf.arg(help="print the plan, its MACs and an estimate of the time")] = False,
    speed: Annotated[bool, tyro.conf.arg(help="leave out images/s and memory", help_behavior_hint="")] = True,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], tyro.conf.arg(help="of the forward pass; the head stays in fp32")
    ] = "fp32",
    batch_size: BatchSize = 32,
    together: Annotated[
        int, tyro.conf.arg(metavar="INT", help="settings for which photos are read once"), Within(1, 10_000)
    ] = 8,
    on_bad_image: OnBadImage = "error",
    parts: Annotated[
        int | None,
        tyro.conf.arg(
            metavar="INT",
            help="that the batches of trainings are worked through in: more need less memory (one a process)",
            help_behavior_hint="",
        ),
        Within(1, MAX_PARTS),
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
    import shlex
    import sys

    from tntprune.errors import UsageError
    from tntprune.paper.agenda import make_plan
    from tntprune.paper.names import BACKBONES

    plan = make_plan(backbones or BACKBONES, only)
    if dry_run:
        from tntprune.paper.dry import dry

        told, text = dry(plan, data, train_data, recipe, limit, device, precision, speed)
        tell(json, told, text)
        return 0
    if data is None or out is None:
        raise UsageError("expected --data DIR with photos and --out DIR; --dry-run alone needs neither")
    from tntprune.paper.reproduce import PAGE, REPORT, RESULTS, Options, run
    from tntprune.paper.summary import summary
    from tntprune.system.distributed import join

    world = join(device)
    options = Options(
        data, train_data, out, recipe, trainings, weights_of(weights, plan.models), photos, limit, speed, precision,
        batch_size, together, on_bad_image, device, workers, seed, parts, shlex.join(["tntprune", *sys.argv[1:]]),
    )  # fmt: skip
    measured = run(plan, options, world)
    if world.main:
        written = {name: str(out / name) for name in (RESULTS, PAGE, REPORT) if (out / name).exists()}
        told, text = summary(plan, measured, written)
        tell(json, told, text)
    return 3 if any(one.row.skipped for one in measured) else 0


def weights_of(given: tuple[str, ...], models: list[str]) -> dict[str, Path]:
    """Files of weights by model.

    Raises:
        UsageError: it does not say which model a file is of, or a model is not run.
    """
    from tntprune.errors import UsageError

    found = {}
    for text in given:
        model, equals, file = text.partition("=")
        if not equals and (len(models) > 1 or len(given) > 1):
            raise UsageError(f"--weights {text}: {len(models)} models are run; expected {models[0]}=FILE and so on")
        if equals and model not in models:
            raise UsageError(f"--weights {text}: {model} is not run; expected one of {', '.join(models)}")
        found[model if equals else models[0]] = Path(file if equals else text)
    return found

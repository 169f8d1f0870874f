"""`tntprune paper`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tntprune.cli.console import tell
from tntprune.cli.flags import BatchSize, Device, Json, OnBadImage, Seed, Workers, flag
from tntprune.errors import UsageError
from tntprune.system.flags import MANY, MAX_MICRO_BATCHES, Whole, Written


def paper(
    data: Annotated[Path | None, flag("photos to evaluate, in class folders", "DIR")] = None,
    train_data: Annotated[Path | None, flag("photos to train on, in class folders", "DIR")] = None,
    out: Annotated[Path | None, flag("folder for results, trainings and pages", "DIR"), Written()] = None,
    backbones: Annotated[
        tuple[str, ...],
        flag("models (the paper's four); any other gets the whole plan", "MODEL..."),
    ] = (),
    only: Annotated[
        tuple[str, ...],
        flag(
            "parts (single, multi, ablation, maps) and methods (random, topk, zerotprune, dynamicvit, tome, evit, "
            "tnt, tnt-mlp, tnt-relative)",
            "NAME...",
        ),
    ] = (),
    weights: Annotated[
        tuple[str, ...],
        flag("weights of the model, or MODEL=FILE for each; otherwise from the Hub", "FILE..."),
    ] = (),
    recipe: Annotated[
        Literal["published", "short"],
        flag("train as each paper says, or for minutes on a thousand photos"),
    ] = "published",
    trainings: Annotated[Path | None, flag("folder with finished trainings (OUT/trainings)", "DIR")] = None,
    photos: Annotated[tuple[Path, ...], flag("photos for the token maps (four of --data)", "FILE...")] = (),
    limit: Annotated[
        int | None, flag("photos to evaluate, chosen at random and always the same"), Whole(1, MANY)
    ] = None,
    dry_run: Annotated[bool, flag("print the plan, its MACs and an estimate of the time")] = False,
    speed: Annotated[bool, flag("do not measure speed and memory")] = True,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], flag("precision of the forward pass; the head stays in fp32")
    ] = "fp32",
    batch_size: BatchSize = 32,
    together: Annotated[int, flag("settings to run on each batch of photos"), Whole(1, 10_000)] = 8,
    on_bad_image: OnBadImage = "error",
    micro_batches: Annotated[
        int | None,
        flag("parts of a training batch; more parts need less memory (one per process)"),
        Whole(1, MAX_MICRO_BATCHES),
    ] = None,
    device: Device = "cpu",
    workers: Workers = None,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Run every table and figure of the paper, beside what its authors reported.

    Trains the methods, evaluates every setting, and writes results.jsonl, report.html and paper.md. After a stop, the
    same command continues.
    """
    import shlex
    import sys

    from tntprune.errors import UsageError
    from tntprune.paper.entries import BACKBONES
    from tntprune.paper.plan import make_plan

    plan = make_plan(backbones or BACKBONES, only)
    if dry_run:
        from tntprune.paper.dry_run import dry_run as dry

        told, text = dry(plan, data, train_data, recipe, limit, device, precision, speed)
        tell(json, told, text)
        return 0
    if data is None or out is None:
        raise UsageError("expected --data DIR with photos and --out DIR; --dry-run alone needs neither")
    from tntprune.paper.reproduce import PAGE, REPORT, RESULTS, Options, run
    from tntprune.paper.summary import summary
    from tntprune.system.distributed import join

    group = join(device)
    options = Options(
        data, train_data, out, recipe, trainings, weights_of(weights, plan.models), photos, limit, speed, precision,
        batch_size, together, on_bad_image, device, workers, seed, micro_batches,
        shlex.join(["tntprune", *sys.argv[1:]]),
    )  # fmt: skip
    measured = run(plan, options, group)
    if group.main:
        written = {name: str(out / name) for name in (RESULTS, PAGE, REPORT) if (out / name).exists()}
        told, text = summary(plan, measured, written)
        tell(json, told, text)
    return 3 if any(one.row.skipped for one in measured) else 0


def weights_of(given: tuple[str, ...], models: list[str]) -> dict[str, Path]:
    """Return files of weights by model.

    Raises:
        UsageError: it does not say which model a file is of, or a model is not run.
    """
    found = {}
    for text in given:
        model, equals, file = text.partition("=")
        if not equals and (len(models) > 1 or len(given) > 1):
            raise UsageError(f"--weights {text}: {len(models)} models are run; expected {models[0]}=FILE and so on")
        if equals and model not in models:
            raise UsageError(f"--weights {text}: {model} is not run; expected one of {', '.join(models)}")
        found[model if equals else models[0]] = Path(file if equals else text)
    return found

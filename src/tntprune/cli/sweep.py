"""`tntprune sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from tntprune.bench import DType
from tntprune.cli.console import tell
from tntprune.cli.flags import BatchSize, Device, ImgSize, Json, Limit, OnBadImage, Workers, flag
from tntprune.errors import UsageError
from tntprune.system.flags import Whole, Written
from tntprune.system.units import unit_of

if TYPE_CHECKING:
    from tntprune.sweep import SweepPlan, SweepRequest
    from tntprune.sweep.results import ResultRow


def sweep(
    models: Annotated[
        tyro.conf.Positional[tuple[str, ...]], flag("timm models, hf:FOLDER_OR_ID, vit16 or digits_vit", "MODEL...")
    ],
    data: Annotated[Path, flag("photos in class folders (WordNet ids for ImageNet)", "DIR")],
    out: Annotated[Path, flag("results file; rows that it has are not measured again", "JSONL"), Written()],
    methods: Annotated[
        tuple[str, ...],
        flag(
            'methods that need no training: "evit" "tome r=13" "random at=3" "evit at=4 then tome at=7,10 r=9"',
            "TEXT...",
        ),
    ] = (),
    reducers: Annotated[
        tuple[str, ...],
        flag(
            'folders made by train, or pretrained, with options to change: runs/tnt "runs/tnt similar=40" '
            "MODEL=runs/other",
            "RUN...",
        ),
    ] = (),
    at: Annotated[tuple[str, ...], flag('blocks, for methods without at=: 3 "3,4,5"', "AT...")] = (),
    rates: Annotated[
        tuple[str, ...],
        flag(
            'shares to keep, for methods without keep=, tokens= and r=: 0.5 "0.9,0.8,0.7" (one for each location); '
            "ToMe without at= acts in every block, so give it r= instead",
            "RATE...",
        ),
    ] = (),
    weights: Annotated[
        tuple[str, ...],
        flag("weights to load, or MODEL=FILE for several models; otherwise from the Hub", "FILE..."),
    ] = (),
    random_weights: Annotated[bool, flag("use random weights, to measure speed only")] = False,
    img_size: ImgSize = None,
    device: Device = "cpu",
    batch_size: BatchSize = 32,
    workers: Workers = None,
    precision: Annotated[DType, flag("precision; bf16 and fp16 by autocast, with the head in fp32")] = "fp32",
    together: Annotated[
        int, flag("settings to run on each batch of photos; a stop loses at most this many"), Whole(1, 10_000)
    ] = 8,
    speed: Annotated[bool, flag("do not measure speed; a later sweep can add it")] = True,
    rounds: Annotated[int, flag("how many times each setting is timed, at least 3"), Whole(3, 100_000)] = 10,
    limit: Limit = None,
    on_bad_image: OnBadImage = "error",
    dry_run: Annotated[bool, flag("list the settings, their MACs and finished rows, and stop")] = False,
    json: Json = False,
) -> int:
    """Measure accuracy, agreement, MACs, speed and memory of many settings; write one line per setting.

    A setting that is in the file is not measured again: if it is stopped, the same command goes on. The unpruned model
    is always measured too. Under torchrun the processes share the settings. Exit code 3 if photos were skipped or
    settings left out.
    """
    from tntprune.backbones.models import check_device, check_name
    from tntprune.methods.checks import check_whole
    from tntprune.sweep import carry_out, plan_sweep
    from tntprune.sweep.grid import by_model
    from tntprune.sweep.results_file import ResultsFile
    from tntprune.system.distributed import join
    from tntprune.system.storage import check_output

    check_whole("models", len(models), 1)
    for model in models:
        check_name(model)
    check_device(device)
    files = {name: Path(file) for name, file in by_model(weights, models, "file")}
    check_output(out, [data, *files.values()])
    made = plan_sweep(
        _jobs(models, methods, reducers, at, rates, img_size), data, weights=files, batch_size=batch_size,
        precision=precision, limit=limit, img_size=img_size, random_weights=random_weights,
    )  # fmt: skip
    if dry_run:
        _tell_plan(json, made, ResultsFile(out).rows())
        return 3 if made.left_out else 0
    group = join(device)
    rows = carry_out(
        made, out, device=device, workers=workers, together=together, speed=speed, rounds=rounds,
        on_bad_image=on_bad_image, group=group,
    )  # fmt: skip
    if group.main:
        told = {"out": str(out), "rows": [_plain(row) for row in rows], "left_out": made.left_out}
        tell(json, told, _table(rows) + f"\n\n{len(rows)} rows in {out}")
    return 3 if made.left_out or any(row.skipped for row in rows) else 0


def _jobs(
    models: Sequence[str], methods: Sequence[str], reducers: Sequence[str], at: Sequence[str], rates: Sequence[str],
    img_size: tuple[int, int] | None,
) -> list[SweepRequest]:  # fmt: skip
    """Measure every model with every method, at every location and rate."""
    from tntprune.backbones.models import shape_of
    from tntprune.sweep import SweepRequest
    from tntprune.sweep.grid import by_model, of_methods, of_reducer

    configs = [config for text in methods for config in of_methods(text, at, rates)]
    shapes = {name: shape_of(name, img_size) for name in models} if reducers else {}
    saved = [(name, *of_reducer(text, at, rates, shapes[name])) for name, text in by_model(reducers, models, "run")]
    if (at or rates) and not (methods or reducers):
        raise UsageError("--at and --rates were given without --methods or --reducers; expected one of them")
    found = []
    for model in models:
        found.append(SweepRequest(model, None))
        found += [SweepRequest(model, config) for config in configs]
        found += [
            SweepRequest(model, one, folder) for name, folder, several in saved if name == model for one in several
        ]
    return found


def _plain(row: ResultRow) -> dict[str, Any]:
    import json

    return json.loads(row.to_json())  # type: ignore[no-any-return]


def _tell_plan(json: bool, made: SweepPlan, rows: dict[str, ResultRow]) -> None:
    settings = list({one.key: one for one in made.settings}.values())
    told: list[dict[str, Any]] = [
        {
            "key": one.key, "model": one.setting.model, "name": one.name, "scheme": one.scheme,
            "config": one.setting.config, "macs": one.macs, "base_macs": one.base_macs, "done": one.key in rows,
            "timed": one.key in rows and rows[one.key].images_per_s is not None, "command": one.command,
        }
        for one in settings
    ]  # fmt: skip
    lines = []
    for model in dict.fromkeys(one.setting.model for one in settings):
        scale, unit = unit_of(next(one["base_macs"] for one in told if one["model"] == model))
        lines += [f"{model}, {settings[0].setting.images} photos", f"  {unit:>6}  {'scheme':8}  setting"]
        for one in told:
            if one["model"] == model:
                state = "  (done)" if one["timed"] else "  (done, not timed)" if one["done"] else ""
                what = _setting(one["name"], one["config"])
                lines.append(f"  {one['macs'] / scale:6.2f}  {one['scheme']:8}  {what}{state}")
    lines += [f"left out: {line}" for line in made.left_out]
    lines.append(f"{len(told)} settings, {sum(one['done'] for one in told)} of them done")
    tell(json, {"settings": told, "left_out": made.left_out}, "\n".join(lines))


def _table(rows: Sequence[ResultRow]) -> str:
    """For a person, by model, scheme and MACs."""
    order = {"unpruned": 0, "single": 1, "multi": 2}
    unique = {row.setting.key: row for row in rows}.values()
    found = []
    for model in dict.fromkeys(row.setting.model for row in unique):
        own = [row for row in unique if row.setting.model == model]
        scale, unit = unit_of(own[0].base_macs)
        head = f"{'top-1':>6} {'top-5':>6} {'agrees':>6} {unit:>6} {'images/s':>8} {'times':>5} {'MiB':>7}"
        found += ["", f"{model}, {own[0].images} photos", f"{'scheme':8} {head}  setting"]
        for row in sorted(own, key=lambda row: (order.get(row.scheme, 3), row.macs)):
            figures = f"{row.top1:6.2f} {row.top5:6.2f} {row.agreement:6.2f} {row.macs / scale:6.2f}"
            speed = f"{_number(row.images_per_s, 8, 1)} {_number(row.speedup, 5, 2)} {_number(row.peak_mib, 7, 1)}"
            found.append(f"{row.scheme:8} {figures} {speed}  {_setting(row.name, row.setting.config)}")
    return "\n".join(found[1:])


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def _setting(name: str, config: dict[str, Any] | None) -> str:
    from tntprune.methods import from_dict
    from tntprune.methods.text import described

    return name if config is None else f"{name}: {described(from_dict(config))}"

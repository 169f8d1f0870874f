"""`tntprune bench`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tntprune.bench import Backend, DType
from tntprune.cli.console import tell
from tntprune.cli.flags import GROUP, MAX_WORKERS, ImgSize, Json, Model, Reduction, Seed, flag
from tntprune.system.flags import MAX_BATCH, Whole, Within, Written
from tntprune.system.units import unit_of

if TYPE_CHECKING:
    from torch import nn

    from tntprune.methods import Config


def bench(
    model: Model,
    reduction: Annotated[Reduction, GROUP] = Reduction(),
    also: Annotated[
        tuple[str, ...],
        flag('more methods for the same run, such as "tome r=13" "evit keep=0.7"', "TEXT..."),
    ] = (),
    rates: Annotated[
        tuple[float, ...],
        flag("keep rates to time, for methods that take one"),
        Within(0, 1, above=True),
    ] = (),
    weights: Annotated[Path | None, flag("weights to load (random weights; the time is the same)", "FILE")] = None,
    img_size: ImgSize = None,
    batch_sizes: Annotated[tuple[int, ...], flag("images at a time"), Whole(1, MAX_BATCH)] = (1, 8),
    dtypes: Annotated[tuple[DType, ...], flag("precision of weights and images")] = ("fp32",),
    backends: Annotated[tuple[Backend, ...], flag("ways to run the model")] = ("eager",),
    device: Annotated[tuple[str, ...], flag("cpu, cuda or mps", "DEVICE...")] = ("cpu",),
    threads: Annotated[int | None, flag("threads of torch on the CPU"), Whole(1, 1024)] = None,
    rounds: Annotated[int, flag("how many times each setting is timed"), Whole(3, 100_000)] = 20,
    latency_curve: Annotated[bool, flag("also time the model at sixteen numbers of tokens")] = False,
    data: Annotated[
        Path | None, flag("photos: also measure the loader alone, and loader and model together", "DIR")
    ] = None,
    workers: Annotated[int, flag("processes that read photos"), Whole(0, MAX_WORKERS)] = 1,
    plot: Annotated[Path | None, flag("a picture to write (.png, .svg, .pdf)", "PNG"), Written()] = None,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Time methods, keep rates, batch sizes, precisions and backends against each other, in turns.

    Always measured too: the unpruned model, random removal, and the bound (tokens cut off without choosing).
    A setting is timed only if its output agrees with the eager model's. Exit code 3 if some were left out.
    """
    import torch

    from tntprune.backbones.models import check_device
    from tntprune.bench.benchmark import bench as run
    from tntprune.bench.benchmark import merged
    from tntprune.bench.candidates import BESIDE, candidates
    from tntprune.bench.latency_curve import curve_table
    from tntprune.bench.latency_curve import latency_curve as curve
    from tntprune.bench.pipeline import throughput, throughput_table
    from tntprune.data.folders import all_photos
    from tntprune.methods.checks import check_whole
    from tntprune.report.bench_plot import plot as draw
    from tntprune.serialization.checkpoint import files_of
    from tntprune.system.storage import check_output

    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    if plot is not None:
        check_output(plot, [weights, data, *files_of(reduction.reducer)])
    photos = all_photos(data) if data is not None else []
    check_whole("device", len(device), 1)
    for where in device:
        check_device(where)  # all of them before any is measured
    benchmarks, points, flow = [], [], []
    for where in device:
        built = _model(model, weights, where, img_size)
        configs, trained = _configs(reduction, also, rates), _trained(built, reduction, rates)
        benchmarks.append(
            run(built, configs, reduced=trained, batch_sizes=batch_sizes, dtypes=dtypes, backends=backends,
                rounds=rounds, last_block=reduction.last_block)
        )  # fmt: skip
        if latency_curve:
            points += curve(built, batch_sizes=batch_sizes, dtypes=dtypes, backends=backends, rounds=rounds)
        if photos:
            every = candidates(built, configs, trained, reduction.last_block)
            models = [one for one in every if one.method not in BESIDE]
            flow.append(throughput(models, photos, batch=max(batch_sizes), workers=workers))
    found = merged(benchmarks)
    text = [f"{model}: {_unpruned(built)}", str(found)]
    if points:
        text += ["", "time against tokens", curve_table(points)]
    for one in flow:
        text += ["", throughput_table(one)]
    if plot is not None:
        draw(plot, found.results, points, model, found.stamp)
        text += ["", f"drawn to {plot}"]
    told: dict[str, Any] = {
        "model": model, "stamp": found.stamp, "threads": torch.get_num_threads(), "rounds": rounds,
        "others": found.others, "results": [asdict(row) for row in found.results],
        "failed": [asdict(one) for one in found.failed], "notes": found.notes,
        "curve": [asdict(point) for point in points], "pipeline": [asdict(one) for models in flow for one in models],
    }  # fmt: skip
    tell(json, told, "\n".join(text))
    return 3 if found.failed else 0


def _model(name: str, weights: Path | None, device: str, img_size: tuple[int, int] | None) -> nn.Module:
    from tntprune.backbones.models import load_model, random_model

    if weights is None:
        return random_model(name, device, img_size)
    return load_model(name, weights, device, img_size)


def _unpruned(model: nn.Module) -> str:
    from tntprune.analysis.macs import macs

    whole = macs(model).base_macs
    scale, unit = unit_of(whole)
    return f"{whole / scale:.2f} {unit} unpruned"


def _configs(reduction: Reduction, also: tuple[str, ...], rates: tuple[float, ...]) -> list[Config]:
    """Return what to time; a method with further reductions behind it is one config."""
    from tntprune.methods import TNT, Combination
    from tntprune.methods.text import config_from_text

    found: list[Config] = []
    if reduction.reducer is None:
        own = reduction.configs()
        found += [Combination(parts=own)] if len(own) > 1 else own
    found += map(config_from_text, also)
    if not found and reduction.reducer is None:
        found.append(TNT())
    varied = [[one.changed(keep=rate) for rate in rates] if rates and one.by_share else [one] for one in found]
    return [config for configs in varied for config in configs]


def _trained(model: nn.Module, reduction: Reduction, rates: tuple[float, ...]) -> list[nn.Module]:
    """Return the trained reduction, at each rate, each on weights that it shares with the model."""
    from tntprune.backbones.attach import twin_of

    if reduction.reducer is None:
        return []
    every: list[dict[str, Any]] = [{"keep": (rate,)} for rate in rates] or [{}]
    return [reduction.apply(twin_of(model), **changes) for changes in every]

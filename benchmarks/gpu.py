"""Checks and times tntprune on a GPU in one command of under ten minutes. Writes a page and a JSON file.

python benchmarks/gpu.py --out runs/gpu

It needs torch, timm and this package. What there was no time for is named on the page. Without a GPU it runs on the CPU
at small sizes, which shows that it works and nothing else. It has never been run on a GPU so far.
"""

from __future__ import annotations

import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import tyro
from timm.models.deit import VisionTransformerDistilled
from torch import nn

from tntprune import ATS, TNT, AViT, DynamicViT, EViT, EvoViT, Random, ToMe, TopK, ZeroTPrune, macs, reduce_
from tntprune.analysis.speed_bound import Slicing, beside
from tntprune.backbones.attach import twin_of
from tntprune.bench import Backend
from tntprune.bench.backends import DTYPES, TOLERANCE, difference, first_run, prepared
from tntprune.errors import UserError, UserNote
from tntprune.methods import Config
from tntprune.system.clock import in_turns, peak_memory, wait
from tntprune.system.environment import stamp
from tntprune.system.storage import make_folder, write
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer, learning

METHODS: dict[str, Config] = {
    "TNT": TNT(at=1, keep=0.5),
    "TNT that drops": TNT(at=1, keep=0.5, how="drop", similar=5),
    "random drop": Random(at=1, keep=0.5),
    "Top-K": TopK(at=1, keep=0.5),
    "EViT": EViT(at=1, keep=0.5),
    "DynamicViT": DynamicViT(at=1, keep=0.5),
    "ToMe": ToMe(r=13),
    "Zero-TPrune": ZeroTPrune(at=1, keep=0.5, iterations=5),
    "A-ViT, half": AViT(at=1, keep=0.5),
    "Evo-ViT": EvoViT(at=1, keep=0.5),
    "ATS": ATS(at=1, keep=0.5),
}
WAITS = ("ATS",)  # its number of tokens differs from image to image, and it asks the device for the largest
GOAL = 0.9  # of the ratio of MACs, at the largest batch


@dataclass(frozen=True)
class Scale:
    """The sizes and limits of a run.

    Args:
        models: To time, by their names in timm.
        batches: Images at a time.
        compiled: Models and batches whose compiled passes are timed, the most telling first.
        training: Images in a training step.
        seconds: For all checks of compiled models, and for everything; the least that a setting is timed for.
    """

    models: tuple[str, ...]
    batches: tuple[int, ...]
    compiled: tuple[tuple[str, int], ...]
    training: int
    seconds: tuple[float, float, float]


SMALL, BASE, LARGE = "deit_small_patch16_224", "deit_base_patch16_224", "vit_large_patch16_224"
GPU = Scale((SMALL, BASE, LARGE), (1, 64, 256), ((SMALL, 256), (SMALL, 1), (BASE, 256)), 64, (150, 540, 0.3))
CPU = Scale(("test_vit",), (1, 2), (), 2, (0, 540, 0.0))


@dataclass
class Found:
    """All that was found, as the JSON file has it."""

    device: str
    stamp: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, list[str]] = field(default_factory=dict)
    times: list[dict[str, Any]] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def small_model() -> nn.Module:
    """Make a model of 2 blocks, 196 patches and heads of 64 entries, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size: dict[str, int] = {"img_size": 112, "patch_size": 8, "embed_dim": 128, "depth": 2, "num_heads": 2}
        model = VisionTransformerDistilled(**size, num_classes=7).eval()
        for parameter in model.parameters():  # random weights attend to all tokens nearly alike
            parameter.data.add_(0.05 * torch.randn_like(parameter))
        return model


def photos(model: Any, batch: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random images of a model's own size."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, *model.patch_embed.img_size, generator=generator).to(device, dtype)


@torch.inference_mode()
def check(found: Found, device: torch.device, seconds: float) -> None:
    """Compare every method, precision and backend with fp32 on the CPU: all eager ones, then compiled ones."""
    backends: list[Backend] = ["eager", "cudagraphs", "compile"] if device.type == "cuda" else ["eager"]
    begin = time.perf_counter()
    for backend in backends:
        for dtype in ("bf16", "fp32", "fp16"):
            for name, config in METHODS.items():
                what = f"check of {name}, {dtype}, {backend}"
                if backend != "eager" and (name in WAITS or time.perf_counter() - begin > seconds):
                    found.left_out.append(what)
                    continue
                plain = reduce_(small_model(), config)
                images = photos(plain, 4, torch.device("cpu"))
                wanted = plain(images)
                model = plain.to(device, DTYPES[dtype])
                try:
                    out = first_run(prepared(model, backend), images.to(device, DTYPES[dtype]), backend)
                    apart = difference(out.float().cpu(), wanted)
                    row = {"difference": apart, "same": apart <= TOLERANCE[dtype]}
                except (UserError, RuntimeError) as error:
                    row = {"error": str(error).splitlines()[0], "same": False}
                found.checks.append({"method": name, "dtype": dtype, "backend": backend, **row})


@torch.inference_mode()
def waits(found: Found, device: torch.device) -> None:
    """Note which methods wait for the GPU in a pass; torch raises an error where they do."""
    if device.type != "cuda":
        found.left_out.append("waiting for the device: there is no GPU")
        return
    for name, config in METHODS.items():
        model = reduce_(small_model(), config).to(device)
        images = photos(model, 4, device)
        model(images)
        wait(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(images)
            found.waits[name] = "no"
        except RuntimeError as error:
            found.waits[name] = f"yes: {str(error).splitlines()[0]}"
        finally:
            torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def kernels(found: Found, device: torch.device) -> None:
    """Note which kernels of fused attention ran, without a reduction and with each."""
    for name, config in {"unpruned": None, **METHODS}.items():
        model = small_model().to(device, torch.bfloat16)
        run = model if config is None else reduce_(model, config)
        images = photos(model, 4, device, torch.bfloat16)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(images)
        begins = "aten::_scaled_dot_product_"
        ran = {one.key.removeprefix(begins) for one in profile.key_averages() if one.key.startswith(begins)}
        found.kernels[name] = sorted(ran - {"attention_math"}) or sorted(ran)


def variants(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model and its reduction."""
    depth = len(model.blocks)  # type: ignore[arg-type]
    third = max(1, depth // 4)
    at = tuple(range(third, depth, third))[:3]
    configs: dict[str, Config] = {
        "TNT": TNT(at=third, keep=0.5),
        "a plan": TNT(at=at, keep=(0.7,) * len(at)),
        "ToMe": ToMe(r=max(1, 156 // depth)),
        "random drop": Random(at=third, keep=0.5),
    }
    found = {"unpruned": model, **{name: reduce_(twin_of(model), config) for name, config in configs.items()}}
    return {**found, "bound of TNT": beside(found["TNT"], Slicing)}


def graphed(model: nn.Module, images: torch.Tensor) -> Callable[[], Any]:
    """Return a call that replays an eager pass, which is recorded as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(images)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(images)
    return graph.replay


def settings(scale: Scale, device: torch.device) -> Iterator[tuple[str, int, str]]:
    """Give models, batches and backends, the quick ones first."""
    for backend in ("eager", "graphs") if device.type == "cuda" else ("eager",):
        for model in scale.models:
            for batch in scale.batches:
                yield model, batch, backend
    for model, batch in scale.compiled:
        yield model, batch, "compile"


@torch.inference_mode()
def times(found: Found, scale: Scale, device: torch.device, until: float) -> None:
    """Time all variants of a setting in turns, against the unpruned model of the same round."""
    for name, batch, backend in settings(scale, device):
        what = f"{name}, batch {batch}, {backend}"
        if time.perf_counter() > until:
            found.left_out.append(f"time of {what}")
            continue
        model = timm.create_model(name).eval().to(device, torch.bfloat16)
        images = photos(model, batch, device, torch.bfloat16)
        ready: dict[str, Callable[[], Any]] = {}
        models = variants(model)
        for variant, one in models.items():
            if backend == "compile" and time.perf_counter() > until:
                found.left_out.append(f"time of {what}, {variant}")
                continue
            try:
                if backend == "graphs":
                    ready[variant] = graphed(one, images)
                else:
                    run = prepared(one, "compile" if backend == "compile" else "eager")
                    first_run(run, images, "compile" if backend == "compile" else "eager")
                    ready[variant] = partial(run, images)
            except (UserError, RuntimeError) as error:
                found.left_out.append(f"time of {what}, {variant}: {str(error).splitlines()[0]}")
        if "unpruned" not in ready:
            continue
        once = in_turns([ready["unpruned"]], 3, device, progress=False)[0].median / 1000
        rounds = min(50, max(5, int(scale.seconds[2] / once)))
        spent = dict(zip(ready, in_turns(list(ready.values()), rounds, device, progress=False), strict=True))
        whole = macs(model).macs
        for variant, one in spent.items():
            peak = peak_memory(ready[variant], device) if backend == "eager" and device.type == "cuda" else None
            found.times.append({
                "model": name, "batch": batch, "backend": backend, "variant": variant, "ms": one.median,
                "speedup": median(a / b for a, b in zip(spent["unpruned"].all, one.all, strict=True)),
                "macs": whole / macs(models["TNT" if "bound" in variant else variant]).macs, "peak": peak,
            })  # fmt: skip


def training(found: Found, scale: Scale, device: torch.device) -> None:
    """Time a step of TNT's training, and its peak memory."""
    name = scale.models[0]
    model = reduce_(timm.create_model(name).to(device), TNT(at=1))
    images = photos(model, scale.training, device)
    labels = torch.zeros(scale.training, dtype=torch.long, device=device)
    amp: Any = "bf16" if device.type == "cuda" else "none"
    trainer = Trainer(model, Training(epochs=1, batch_size=scale.training, amp=amp), 30)
    number = iter(range(30))

    def step() -> None:
        trainer.step(next(number), [(images, labels)])

    with learning(model):
        spent = in_turns([step], 5, device, progress=False)[0]
        peak = peak_memory(step, device) if device.type == "cuda" else None
    found.training.append({"model": name, "batch": scale.training, "amp": amp, "ms": spent.median, "peak": peak})


def table(rows: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    """Return a table in Markdown."""

    def word(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "**no**"
        return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)

    lines = [names, ["---"] * len(names), *([word(row.get(name)) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(found: Found, scale: Scale) -> str:
    """Return the page."""
    cuda = found.device == "cuda"
    largest, goals = scale.batches[-1], []
    for row in found.times:
        if row["variant"] in ("unpruned", "bound of TNT"):
            continue
        if row["batch"] == largest:
            goals.append({**row, "goal": f"{GOAL} of {row['macs']:.2f}", "met": row["speedup"] >= GOAL * row["macs"]})
        elif row["batch"] == 1:
            goals.append({**row, "goal": "not slower", "met": row["speedup"] >= 1})
    rows = [{**row, "MB": None if row["peak"] is None else row["peak"] / 1e6} for row in found.times]
    parts = {
        "Correct": "Logits against fp32 on the CPU: root mean square of the difference, as a share of theirs. In low "
        "precision two tokens whose scores are nearly the same may change places.\n\n"
        + table(found.checks, ("method", "dtype", "backend", "difference", "same", "error")),
        "Waits for the device": table(
            [{"method": name, "waits": told} for name, told in found.waits.items()], ("method", "waits")
        ),
        "Kernels of attention, in bf16": table(
            [{"method": name, "kernels": ", ".join(ran)} for name, ran in found.kernels.items()], ("method", "kernels")
        ),
        "Time, in bf16": "Medians; speed-ups are medians of ratios to the unpruned model of the same round. `macs` is "
        "how many times fewer multiply-accumulates there are. MB is the peak beside the weights.\n\n"
        + table(rows, ("model", "batch", "backend", "variant", "ms", "speedup", "macs", "MB")),
        "Goals": table(goals, ("model", "batch", "backend", "variant", "speedup", "goal", "met")),
        "Training step": table(found.training, ("model", "batch", "amp", "ms", "peak")),
        "Left out": "\n".join(f"- {line}" for line in found.left_out) or "Nothing.",
        "Failed": "\n".join(f"- {name}: {told}" for name, told in found.failed.items()) or "Nothing.",
    }
    about = (
        "What does the library give on a GPU?"
        if cuda
        else "**There was no GPU. This run, on a CPU at small sizes, shows that the script works, and its times say "
        "nothing. It has never been run on a GPU so far.**"
    )
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items())
    return f"# On a GPU\n\n{about}\n\nWritten by `python benchmarks/gpu.py` on {found.stamp}.\n\n{body}\n"


def main(out: Path = Path("runs/gpu"), device: str = "cuda" if torch.cuda.is_available() else "cpu") -> None:
    """Check and time everything, and write `gpu.md` and `gpu.json`.

    Args:
        out: The folder for both.
        device: A GPU, or the CPU, for a small run.
    """
    warnings.simplefilter("ignore", UserNote)  # nothing here was trained
    begin, place = time.perf_counter(), torch.device(device)
    scale, found = GPU if place.type == "cuda" else CPU, Found(place.type, stamp(device))
    make_folder(out)
    parts: dict[str, Callable[[], None]] = {
        "kernels": partial(kernels, found, place),
        "waits": partial(waits, found, place),
        "training": partial(training, found, scale, place),
        "checks": partial(check, found, place, scale.seconds[0]),
        "times": partial(times, found, scale, place, begin + scale.seconds[1]),
    }
    for name, part in parts.items():
        print(f"{time.perf_counter() - begin:4.0f} s: {name}", flush=True)
        try:
            part()
        except Exception as error:  # time on a GPU is dear: the other parts are run all the same
            traceback.print_exc()
            found.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        write(out / "gpu.json", json.dumps(asdict(found), indent=1).encode())  # what is found is kept, whatever follows
        write(out / "gpu.md", page(found, scale).encode())
    print(f"{time.perf_counter() - begin:4.0f} s: see {out / 'gpu.md'}")
    if found.failed:
        raise SystemExit(f"failed: {', '.join(found.failed)}")


if __name__ == "__main__":
    tyro.cli(main)

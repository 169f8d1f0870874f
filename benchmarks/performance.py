"""What stands between a reduction and the speed that its tokens allow. Writes docs/results/performance.md and its picture.

python benchmarks/performance.py --out runs/performance

Each part is kept in the folder as JSON and is not measured again; delete a file to measure that part anew. Part "speed"
and part "training" want a machine that nobody else uses; part "compiled" takes about ten minutes of one processor.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import torch.nn.functional as F
import tyro
from timm.models.deit import VisionTransformerDistilled
from torch import nn
from tqdm import tqdm

from stamps import written
from tntprune import TNT, AViT, DynamicViT, EViT, EvoViT, Random, ToMe, TopK, UserError, ZeroTPrune, reduce_
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.backbones.base import find_backbone
from tntprune.bench.backends import difference, first_run, prepared
from tntprune.bench.benchmark import bench
from tntprune.bench.latency_curve import CurvePoint, latency_curve
from tntprune.bench.rows import BenchRow
from tntprune.methods import Config
from tntprune.report.bench_plot import plot
from tntprune.system.environment import stamp
from tntprune.system.storage import write
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer, learning

MODEL = "deit_small_distilled_patch16_224"
CONFIGS = (TNT(at=3, keep=0.5), TNT(at=3, keep=0.5, similar=25))  # the default, which merges, and one that drops
BOUND = {1: 0.95, 8: 0.97, 32: 0.97}  # how near the bound TNT is to be, by batch size
MACS = 0.95  # how much of the saved work is to be saved time, at batches of 8 and 32
SAME = 1e-5  # what a compiled model's output may differ by
STEP = 2.0  # times as fast as a plain loop
RATES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95)
INDUCTOR = (0.25, 0.5, 0.8)  # of these; each takes a C++ compiler ten seconds
STATIC: dict[str, Config] = {
    "random": Random(at=1),
    "tnt": TNT(at=1),
    "tnt, similar dropped": TNT(at=1, similar=3),
    "tnt, similar merged": TNT(at=1, similar=3, similar_how="merge"),
    "topk": TopK(at=1),
    "evit": EViT(at=1),
    "dynamicvit": DynamicViT(at=1),
    "tome": ToMe(at=1, keep=0.5),
    "zerotprune": ZeroTPrune(at=1, iterations=5),
    "avit": AViT(at=1),
    "evovit": EvoViT(at=1),
}


def speed(rounds: int) -> dict[str, Any]:
    """Time every batch size and precision, eager and compiled."""
    model = timm.create_model(MODEL).eval()
    rows: list[dict[str, Any]] = []
    others = 0.0
    for dtype in ("fp32", "bf16"):
        for batch in BOUND:
            found = bench(
                model, CONFIGS, batch_sizes=(batch,), dtypes=(dtype,), backends=("eager", "compile"), rounds=rounds
            )
            print(found)
            rows += [asdict(row) for row in found.results]
            others = max(others, found.others or 0.0)
    return {"rows": rows, "others": others, "rounds": rounds}


def curve(rounds: int) -> dict[str, Any]:
    """Time against tokens."""
    model = timm.create_model(MODEL).eval()
    points = latency_curve(model, batch_sizes=(1, 8), dtypes=("fp32", "bf16"), rounds=rounds)
    return {"points": [asdict(point) for point in points], "rounds": rounds}


def kernels(rounds: int = 40) -> dict[str, Any]:
    """Time the two kernels of the page alone, in milliseconds: the fastest of the rounds."""
    products = {}
    weight, bias = torch.randn(384, 1536).bfloat16(), torch.randn(384).bfloat16()
    with torch.inference_mode():
        for rows in (800, 1000):
            x = torch.randn(rows, 1536).bfloat16()
            products[str(rows)] = 1000 * min(_timed(lambda x=x: F.linear(x, weight, bias)) for _ in range(rounds))  # type: ignore[misc]
    attention = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, function in (("fused", F.scaled_dot_product_attention), ("plain", _plain_attention)):
            # 8 images, 6 heads, 198 tokens
            heads = [torch.randn(8, 6, 198, 64).to(dtype).requires_grad_() for _ in range(3)]
            spent = [_timed(lambda heads=heads, run=function: run(*heads).sum().backward()) for _ in range(rounds)]  # type: ignore[misc]
            attention[f"{str(dtype).removeprefix('torch.')} {name}"] = 1000 * min(spent)
    return {"products": products, "attention": attention}


def _plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    attention: torch.Tensor = (query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)).softmax(-1)  # (B, heads, n, n)
    return attention @ value


@dataclass(frozen=True)
class Step:
    """Time a training step of the library beside a plain loop: seconds, their ratio, and the difference of the gradients."""

    recipe: str
    amp: str
    plain: float
    ours: float
    ratio: float
    gradients: float


def training(rounds: int, batch: int = 16) -> dict[str, Any]:
    """Both recipes in both precisions."""
    return {"steps": [asdict(_step(r, a, rounds, batch)) for r in ("relative", "paper") for a in ("none", "bf16")]}


def _step(recipe: str, amp: str, rounds: int, batch: int) -> Step:
    model = timm.create_model(MODEL).eval()
    reduce_(model, TNT(at=3, keep=0.5, recipe=recipe))  # type: ignore[arg-type]
    plain = copy.deepcopy(model).train().requires_grad_(True)
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(batch)
    trainer = Trainer(model, Training(epochs=1, batch_size=batch, amp=amp), rounds + 2)  # type: ignore[arg-type]
    times: list[tuple[float, float]] = []
    apart = []
    with learning(model):
        for number in tqdm(range(rounds + 2), desc=f"{recipe}, {amp}", unit="step"):
            reduction_of(plain).load_state_dict(reduction_of(model).state_dict())
            trainer.seed(number)
            one = _timed(lambda number=number: _plain_step(plain, images, labels, amp, trainer, number))  # type: ignore[misc]
            other = _timed(lambda number=number: trainer.step(number, [(images, labels)]))  # type: ignore[misc]
            apart.append(_apart(plain, model))
            times.append((one, other))
    own, ours = (median(side) for side in zip(*times[2:], strict=True))
    return Step(recipe, amp, own, ours, median(a / b for a, b in times[2:]), median(apart))


def _plain_step(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, amp: str, trainer: Trainer, number: int
) -> None:
    """Run a plain training loop: the teacher's pass, the whole model in training mode, autograd through all of it."""
    trainer.seed(trainer.training.seed * 1_000_003 + number)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp == "bf16"):
        if reduction_of(model).kl:
            with torch.no_grad():
                target = base_of(model).eval()(images).float().log_softmax(1)
            model.train()  # eval() above reached the parts that both share
            answer = find_backbone(model).answer(model, images).logits.float().log_softmax(1)
            loss = F.kl_div(answer, target, reduction="batchmean", log_target=True)
        else:
            loss = F.cross_entropy(find_backbone(model).answer(model, images).ce_logits.float(), labels)
    loss.backward()


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _apart(plain: nn.Module, model: nn.Module) -> float:
    """Return the norm of the difference of the scorers' gradients, as a share of the norm."""
    pairs = [
        (a.grad, b.grad)
        for a, b in zip(reduction_of(plain).parameters(), reduction_of(model).parameters(), strict=True)
        if b.grad is not None
    ]
    flat = [torch.cat([one.flatten() for one in side]) for side in zip(*pairs, strict=True)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


def compiled(kept: Path) -> dict[str, Any]:
    """Time every method with fixed counts at fifteen rates, on a small model; go on where it stopped."""
    torch.manual_seed(0)
    size: dict[str, int] = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = VisionTransformerDistilled(**size, num_classes=7).eval()
    images = torch.randn(2, 3, 48, 48)
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    settings = [("aot_eager", rate) for rate in RATES] + [("inductor", rate) for rate in INDUCTOR]
    with torch.inference_mode(), tqdm(total=len(STATIC) * len(settings), unit="graph") as bar:
        for name, config in STATIC.items():
            own = found.setdefault(name, {})
            for compiler, rate in settings:
                bar.update()
                if f"{compiler} {rate}" in own:
                    continue
                reduce_(model, config.changed(keep=rate))
                run = prepared(model, "compile", compiler)
                try:
                    own[f"{compiler} {rate}"] = difference(first_run(run, images, "compile"), model(images))
                except UserError as error:
                    own[f"{compiler} {rate}"] = str(error)
                write(kept, json.dumps(found).encode())
            torch.compiler.reset()
    return {"methods": found}


def main(
    out: Path = Path("runs/performance"), rounds: int = 30, page: Path = Path("docs/results/performance.md")
) -> None:
    """Measure what has not been measured yet, and write the page.

    Args:
        out: Where the parts are kept.
        rounds: Passes of each setting.
        page: The page to write; the picture goes beside it.
    """
    torch.set_num_threads(2)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "speed": lambda: speed(rounds),
        "training": lambda: training(max(3, rounds // 3)),
        "curve": lambda: curve(max(3, rounds // 3)),
        "kernels": kernels,
        "compiled": lambda: compiled(out / "compiled-so-far.json"),
    }
    out.mkdir(parents=True, exist_ok=True)
    known = {}
    for name, measured in parts.items():
        file = out / f"{name}.json"
        if not file.exists():
            write(file, json.dumps({"stamp": stamp(), **measured()}).encode())
        known[name] = json.loads(file.read_text())
    rows = [BenchRow.read(row) for row in known["speed"]["rows"]]
    points = [CurvePoint(**point) for point in known["curve"]["points"]]
    plot(page.parent / "latency.png", rows, points, MODEL, known["speed"]["stamp"])
    write(page, PAGE.format(**told(known, rows)).encode())
    written(page)


def told(known: dict[str, Any], rows: list[BenchRow]) -> dict[str, str]:
    """Write the page from its parts."""
    table = []
    for row in rows:
        name = row.method + (", dropping" if row.method == "tnt" and "similar" in row.options else "")
        limit = {"bound": "the limit"}.get(row.method, "")
        if row.method == "tnt":
            limit = f"bound {_verdict((row.bound_ratio or 0) >= BOUND[row.batch])}"
            if row.batch > 1 and row.backend == "compile":  # the faster of the two
                limit += f", MAC ratio {_verdict((row.speedup or 0) >= MACS * row.mac_ratio)}"
        bound = "" if row.bound_ratio is None else f"{row.bound_ratio:.3f}"
        table.append(
            f"| {row.dtype} | {row.batch} | {row.backend} | {name} | {row.median_ms:.1f} | {row.p10_ms:.1f} | "
            f"{row.p90_ms:.1f} | {row.speedup:.2f} | {bound} | {limit} |"
        )
    steps = [
        f"| {step['recipe']} | {'bf16 autocast' if step['amp'] == 'bf16' else 'fp32'} | {step['plain']:.2f} | "
        f"{step['ours']:.2f} | {step['ratio']:.2f} | {_verdict(step['ratio'] >= STEP)} | "
        f"{100 * step['gradients']:.2g} % |"
        for step in known["training"]["steps"]
    ]
    graphs = []
    for name, results in known["compiled"]["methods"].items():
        cells = [name]
        alike = [one for one in results.values() if isinstance(one, float) and one <= SAME]
        for compiler, rates in (("aot_eager", RATES), ("inductor", INDUCTOR)):
            own = [results[f"{compiler} {rate}"] for rate in rates]
            whole = [one for one in own if isinstance(one, float) and one <= SAME]
            cells += [f"{len(whole)} of {len(own)}", f"{max(whole):.1g}" if whole else ""]
        odd = {one if isinstance(one, str) else f"differs by {one:.1g}" for one in results.values() if one not in alike}
        failed = sorted(odd)
        graphs.append(f"| {' | '.join([*cells, '; '.join(failed)])} |")
    products, attention = known["kernels"]["products"], known["kernels"]["attention"]
    eight = {
        row.backend: row.median_ms for row in rows if (row.dtype, row.batch, row.method) == ("bf16", 8, "unpruned")
    }
    ratio = max(row.mac_ratio for row in rows if row.method == "tnt")
    return {
        "table": "\n".join(table), "steps": "\n".join(steps), "graphs": "\n".join(graphs), "ratio": f"{ratio:.3f}",
        "wanted": f"{MACS * ratio:.2f}", "rounds": str(known["speed"]["rounds"]), "model": MODEL,
        "stamp": known["speed"]["stamp"], "others": f"{known['speed']['others']:.2f}",
        **{f"rows{rows}": f"{spent:.2f}" for rows, spent in products.items()},
        **{name.replace(" ", "_"): f"{spent:.0f}" for name, spent in attention.items()},
        "frozen": f"{eight['compile'] / eight['eager']:.2f}", "kernels_stamp": known["kernels"]["stamp"],
        "training_stamp": known["training"]["stamp"], "compiled_stamp": known["compiled"]["stamp"],
    }  # fmt: skip


def _verdict(met: bool) -> str:
    return "yes" if met else "**no**"


PAGE = Path(__file__).with_name("performance.md").read_text()


if __name__ == "__main__":
    tyro.cli(main)

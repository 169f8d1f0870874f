"""What a reduction itself costs: its own time as a share of the forward pass. Writes docs/results/overhead.md.

python benchmarks/overhead.py

DeiT-S (distilled) with random weights, half of the patch tokens kept at block 3. "Own" is the time spent in the method
(scoring, selecting, gathering or merging) with the attention map where one has to be built, over the time of the whole
forward pass. "Against slicing" is how much longer the pass takes than one that cuts the same numbers of tokens off at
the same places, in turns; of ATS as many as can stay at most, so that it comes off better there than it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import timm
import torch
import tyro
from torch import nn
from tqdm import tqdm

from stamps import written
from tntprune import ATS, TNT, AViT, DynamicViT, EViT, EvoViT, Random, ToMe, TopK, ZeroTPrune, reduce_
from tntprune.analysis.speed_bound import Slicing, beside
from tntprune.backbones.attach import reduction_of
from tntprune.methods import Config
from tntprune.methods.base import Method
from tntprune.ops.attention import Heads
from tntprune.system.clock import keep_memory
from tntprune.system.environment import stamp
from tntprune.system.storage import write

MODEL = "deit_small_distilled_patch16_224"
METHODS: dict[str, tuple[Config, float]] = {  # with the most that its own time may be, in percent
    "random drop": (Random(at=3, keep=0.5), 3),
    "TNT": (TNT(at=3, keep=0.5), 8),
    "TNT, 25 similar": (TNT(at=3, keep=0.5, similar=25, recipe="relative"), 3),
    "TNT, 25 similar merged": (TNT(at=3, keep=0.5, similar=25, similar_how="merge"), 8),
    "Top-K": (TopK(at=3, keep=0.5), 3),
    "EViT": (EViT(at=3, keep=0.5), 3),
    "DynamicViT": (DynamicViT(at=3, keep=0.5), 3),
    "Zero-TPrune, 25 similar": (ZeroTPrune(at=3, keep=0.5, similar=25, beyond=False), 3),
    "ATS": (ATS(at=3, keep=0.5), 3),
    "A-ViT, half": (AViT(at=3, keep=0.5), 3),
    "Evo-ViT": (EvoViT(at=3, keep=0.5), 3),
    "ToMe": (ToMe(at=3, keep=0.5), 8),
    "ToMe, r=13 in every block": (ToMe(r=13), 8),
}


@contextmanager
def clocked(method: Method) -> Iterator[list[float]]:
    """Return the seconds spent in a method's calls, and in building attention maps for it."""
    spent: list[float] = []

    def timed(function: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object) -> object:
            begin = time.perf_counter()
            out = function(*args)
            spent.append(time.perf_counter() - begin)
            return out

        return run

    whole, built = method.forward, Heads.map
    method.forward = timed(whole)  # type: ignore[method-assign]

    def build(self: Heads) -> torch.Tensor:
        begin = time.perf_counter()
        out = built(self)
        if self.attention is None:
            spent.append(time.perf_counter() - begin)
        return out

    Heads.map = build  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        del method.forward
        Heads.map = built  # type: ignore[method-assign]


@dataclass(frozen=True)
class Cost:
    """Percent of the forward pass, milliseconds of it, and percent more than slicing takes."""

    own: float
    milliseconds: float
    slicing: float


@torch.inference_mode()
def cost(model: nn.Module, config: Config, images: torch.Tensor, rounds: int) -> Cost:
    """Measure one method."""
    reduce_(model, config)
    method = reduction_of(model)
    bound = beside(model, Slicing)
    keep_memory(images.device)
    shares, totals, ratios = [], [], []
    for number in range(rounds + 2):  # two to warm up
        seconds = {}
        for name in ("own", "slicing") if number % 2 else ("slicing", "own"):
            begin = time.perf_counter()
            (model if name == "own" else bound)(images)
            seconds[name] = time.perf_counter() - begin
        with clocked(method) as spent:
            begin = time.perf_counter()
            model(images)
            whole = time.perf_counter() - begin
        if number >= 2:
            shares.append(100 * sum(spent) / whole)
            totals.append(1000 * seconds["own"])
            ratios.append(100 * (seconds["own"] / seconds["slicing"] - 1))
    return Cost(median(shares), median(totals), median(ratios))


def main(batch: int = 8, rounds: int = 25, page: Path = Path("docs/results/overhead.md")) -> None:
    """Measure every method and write the page.

    Args:
        batch: Images at a time.
        rounds: Passes of each method.
        page: The page to write.
    """
    lines = []
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        model = timm.create_model(MODEL).eval().to(dtype)
        for name, (config, most) in tqdm(METHODS.items(), desc=str(dtype), unit="method"):
            found = cost(model, config, images.to(dtype), rounds)
            verdict = "yes" if found.own < most else "**no**"
            lines.append(
                f"| {name} | {str(dtype).removeprefix('torch.')} | {found.own:.2f} % | {most} % | {verdict} | "
                f"{found.slicing:+.1f} % | {found.milliseconds:.0f} |"
            )
    write(page, PAGE.format(model=MODEL, rows="\n".join(lines), stamp=stamp(), batch=batch, rounds=rounds).encode())
    written(page)


PAGE = """# Cost of each method

`{model}` with random weights, batch size {batch}, half of the patch tokens kept at block 3.

- **Own time**: scores, selection, merging and attention maps as a share of the pass, median of {rounds}.
- **Against slicing**: extra time over a model that cuts off as many tokens without choosing, median of {rounds} paired ratios.
  Optimistic for ATS, which is compared with the most tokens that it can keep.

Written by `python benchmarks/overhead.py` on {stamp}.

| method | precision | own time | limit | within the limit | against slicing | ms per batch |
|---|---|---:|---:|---|---:|---:|
{rows}
"""


if __name__ == "__main__":
    tyro.cli(main)

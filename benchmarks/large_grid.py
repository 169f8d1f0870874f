"""Times and weighs models on large grids, unpruned and with fewer tokens. Writes docs/results/large-grids.md.

python benchmarks/large_grid.py

ViT-S/16 at 1024 x 1024 (4,096 patches) and DINOv3 ViT-S/16 at 768 x 768 (2,304), one image at a time, with random
weights. It takes about ten minutes of two processors that nobody else uses; fewer rounds take less.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median

import timm
import torch
import tyro
from tqdm import tqdm

from stamps import written
from tntprune import TNT, Random, ToMe, macs, reduce_
from tntprune.backbones.attach import reduction_of, twin_of
from tntprune.methods import Config
from tntprune.system.clock import in_turns, peak_memory
from tntprune.system.environment import stamp
from tntprune.system.storage import write

MODELS = {"vit_small_patch16_224": 1024, "vit_small_patch16_dinov3": 768}
METHODS: dict[str, Config] = {
    "TNT": TNT(at=3, keep=0.5),
    "TNT that drops": TNT(at=3, keep=0.5, how="drop"),
    "ToMe, after block 3": ToMe(at=3, keep=0.5),
    "ToMe, in every block": ToMe(keep=(0.93,) * 12),
    "random drop": Random(at=3, keep=0.5),
}


@torch.inference_mode()
def rows(name: str, size: int, methods: dict[str, Config], rounds: int, batch: int) -> list[str]:
    """Return a line of the table for a model, and one for each method on it."""
    model = timm.create_model(name, img_size=size).eval()
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    models = {"unpruned": model, **{title: reduce_(twin_of(model), config) for title, config in methods.items()}}
    for one in list(models.values())[1:]:
        reduction_of(one).warned = True  # what it has learned changes neither time nor memory
    times = in_turns([partial(one, images) for one in models.values()], rounds, images.device, warmup=1)
    peaks = [peak_memory(partial(one, images), images.device) for one in tqdm(models.values(), desc="memory")]
    work = [macs(one) for one in models.values()]
    lines = []
    for title, spent, peak, cost in zip(models, times, peaks, work, strict=True):
        assert peak is not None and peaks[0] is not None
        ratio = median(a / b for a, b in zip(times[0].all, spent.all, strict=True))
        own = 100 * sum(cost.reduction.values()) / cost.macs
        lines.append(
            f"| {name}, {size} | {title} | {cost.macs / 1e9:.1f} G | {cost.base_macs / cost.macs:.2f} | {own:.1f} % | "
            f"{spent.median:.0f} | {ratio:.2f} | {peak / 1e6:.0f} | {peak / peaks[0]:.2f} |"
        )
    return lines


def main(rounds: int = 7, batch: int = 1, page: Path = Path("docs/results/large-grids.md")) -> None:
    """Measure every model and method, and write the page.

    Args:
        rounds: Passes of each, at least 3.
        batch: Images at a time.
        page: The page to write.
    """
    lines = [line for name, size in MODELS.items() for line in rows(name, size, METHODS, rounds, batch)]
    write(page, PAGE.format(rows="\n".join(lines), stamp=stamp(), batch=batch, rounds=rounds).encode())
    written(page)


PAGE = """# Large grids

Random weights, fp32, batch size {batch}. Half of the patches go after block 3; "in every block" merges 7 % in each.

- **Own**: the method's share of the MACs.
- **Speed-up**: median of {rounds} paired ratios to the unpruned model.
- **Peak**: most memory at a time beside the weights, and its ratio to the unpruned model's.

Memory grows with the number of tokens, not with its square. Zero-TPrune is left out: it needs the whole attention map, 400 MB for 4,096
patches and 6 heads.

Written by `python benchmarks/large_grid.py` on {stamp}.

| model | method | MACs | fewer by | own | ms | speed-up | peak, MB | of unpruned |
|---|---|---:|---:|---:|---:|---:|---:|---:|
{rows}
"""


if __name__ == "__main__":
    tyro.cli(main)

"""Large grids: time, memory and MACs, and what windows change in the answers. Writes docs/results/large-grids.md.

python benchmarks/large_grid.py --weights ../shared/data/vit_tiny_patch16_224.safetensors --data ../shared/data/calibration-1000/images

Time and memory: ViT-S/16 at 1024 x 1024 (4,096 patches) and DINOv3 ViT-S/16 at 768 x 768 (2,304), one image at a time,
with random weights. Answers: the real ViT-Tiny at 384 x 384. It takes about eight minutes of one processor that nobody
else uses.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median

import timm
import torch
import torch.nn.functional as F
import tyro
from torch.utils.data import DataLoader
from tqdm import tqdm

from stamps import written
from tntprune import TNT, Random, ToMe, load_, macs, reduce_
from tntprune.backbones.attach import reduction_of, twin_of
from tntprune.backbones.models import load_model
from tntprune.data.folders import all_photos
from tntprune.data.loading import Photos, collate
from tntprune.data.transforms import transform_for
from tntprune.methods import Config
from tntprune.system.clock import in_turns, peak_memory
from tntprune.system.environment import stamp
from tntprune.system.storage import write

MODELS = {"vit_small_patch16_224": 1024, "vit_small_patch16_dinov3": 768}
SLOWLY = (0.93,) * 12  # of a method that acts in every block
METHODS: dict[str, Config] = {
    "TNT": TNT(at=3, keep=0.5),
    "TNT, windows of 16": TNT(at=3, keep=0.5, window=16),
    "TNT that drops": TNT(at=3, keep=0.5, how="drop"),
    "ToMe, after block 3": ToMe(at=3, keep=0.5),
    "ToMe, in every block": ToMe(keep=SLOWLY),
    "ToMe, in every block, windows of 16": ToMe(keep=SLOWLY, window=16),
    "random drop": Random(at=3, keep=0.5),
}
REAL, SIZE = "vit_tiny_patch16_224", 384
JUDGED: dict[str, Config] = {
    "TNT, keep 0.5": TNT(at=3, keep=0.5),
    "ToMe, after block 3": ToMe(at=3, keep=0.5),
    "ToMe, in every block": ToMe(keep=SLOWLY),
}
WINDOWS = (None, 12, 6, 4)  # patches along a side, of 24: 1, 4, 16 and 36 windows where all tokens are there


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


@torch.inference_mode()
def answers(weights: Path, data: Path, size: int, photos: int) -> list[str]:
    """Return a line for each method and window: how far its answers are from the unpruned model's."""
    model = load_model(REAL, weights, img_size=(size, size))
    found = all_photos(data)
    found = found[:: max(1, len(found) // photos)][:photos]
    loader = DataLoader(Photos(found, transform_for(model)), batch_size=10, collate_fn=collate)
    whole = [(batch.images, model(batch.images).log_softmax(1)) for batch in tqdm(loader, desc="unpruned")]
    lines = []
    for title, config in JUDGED.items():
        for window in WINDOWS:
            reduced = twin_of(model)
            if config.must_train:
                load_(reduced, "pretrained", at=config.at, keep=config.keep, window=window)
            else:
                reduce_(reduced, config.changed(window=window))
            far, same, count = 0.0, 0, 0
            for images, wanted in tqdm(whole, desc=f"{title}, {window}"):
                own = reduced(images).log_softmax(1)
                far += F.kl_div(own, wanted, reduction="sum", log_target=True).item()
                same += int((own.argmax(1) == wanted.argmax(1)).sum())
                count += len(images)
            cost = macs(reduced)
            share = 100 * sum(cost.reduction.values()) / cost.macs
            lines.append(
                f"| {title} | {window or 'all pairs'} | {share:.2f} % | {far / count:.4f} | {100 * same / count:.0f} % |"
            )
    return lines


def main(
    weights: Path,
    data: Path,
    rounds: int = 5,
    batch: int = 1,
    photos: int = 100,
    size: int = SIZE,
    page: Path = Path("docs/results/large-grids.md"),
) -> None:
    """Measure every model and method, and write the page.

    Args:
        weights: Of vit_tiny_patch16_224.
        data: A folder of photos.
        rounds: Passes of each, at least 3.
        batch: Images at a time, where time and memory are measured.
        photos: Photos at most, where answers are compared.
        size: Of these, in pixels.
        page: The page to write.
    """
    compared = answers(weights, data, size, photos)
    lines = [line for name, own in MODELS.items() for line in rows(name, own, METHODS, rounds, batch)]
    text = PAGE.format(
        rows="\n".join(lines), answers="\n".join(compared), stamp=stamp(), batch=batch, rounds=rounds, photos=photos,
        size=size,
    )  # fmt: skip
    write(page, text.encode())
    written(page)


PAGE = """# Large grids

Random weights, fp32, batch size {batch}. Half of the patches go after block 3; "in every block" merges 7 % in each.

- **Own**: the method's share of the MACs.
- **Speed-up**: median of {rounds} paired ratios to unpruned.
- **Peak**: most memory at a time beside the weights.

Memory grows with the number of tokens, not with its square. Left out: Zero-TPrune, which needs the whole attention map (400 MB).

Written by `python benchmarks/large_grid.py` on {stamp}.

| model | method | MACs | fewer by | own | ms | speed-up | peak, MB | of unpruned |
|---|---|---:|---:|---:|---:|---:|---:|---:|
{rows}

## Windows

Real ViT-Tiny at {size} x {size}, {photos} calibration photos; TNT's scorers are the shipped ones.

| method | window | own | KL to unpruned | same top-1 |
|---|---:|---:|---:|---:|
{answers}
"""


if __name__ == "__main__":
    tyro.cli(main)

"""Whether reading and augmenting photos keeps the model busy. Writes docs/results/loading.md.

python benchmarks/loading.py --data ../shared/data/calibration-1000/images

First the loader alone, with more and more processes that read; then TNT's training on a frozen model with random
weights, on images that are in memory already and on photos, with a clock on what the training waits for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import tyro

from stamps import written
from tntprune import TNT, reduce_
from tntprune.data.augment import PRESETS, Augmentation
from tntprune.data.batches import WHOLE, Pair, PhotoSource, Share, Source, TensorSource
from tntprune.data.folders import all_photos
from tntprune.data.loading import Photos, default_workers
from tntprune.data.mixing import Mixer
from tntprune.data.transforms import transform_for
from tntprune.system.environment import stamp
from tntprune.system.storage import write
from tntprune.training.calibrate import fit
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer

MODELS = {"ViT-Tiny": "vit_tiny_patch16_224", "DeiT-S": "deit_small_distilled_patch16_224"}


@dataclass
class Watched:
    """Wrap a source, with a clock on the waits after the first batch, which starts the processes."""

    source: Source
    waited: float = 0.0

    @property
    def per_epoch(self) -> int:
        return self.source.per_epoch

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        found = self.source.batches(first, last, share)
        for step in range(first, last):
            begin = time.perf_counter()
            pair = next(found)
            self.waited += time.perf_counter() - begin if step > first else 0.0
            yield pair


def photo_source(data: Path, model: torch.nn.Module, augmentation: Augmentation, batch: int, workers: int) -> Source:
    """Photos as a training has them."""
    photos = Photos(all_photos(data), transform_for(model, augmentation))
    mixer = Mixer(augmentation, 1000, 0.1, 0) if augmentation.mixes else None
    pin = next(model.parameters()).is_cuda
    return PhotoSource(photos, batch, 0, workers, False, augmentation.repeats, mixer, pin)


def alone(source: Source, steps: int, batch: int) -> float:
    """Images/s of a source of which nothing is made, after the first batch."""
    begin = 0.0
    for number, _ in enumerate(source.batches(0, steps + 1)):
        if number == 0:
            begin = time.perf_counter()
    return steps * batch / (time.perf_counter() - begin)


def trained(model: torch.nn.Module, source: Source, steps: int, batch: int) -> tuple[float, float]:
    """Images/s of a training after its first step, and the percentage of that time in which it waits for images."""
    watched, times = Watched(source), []

    def note(number: int, loss: float, trainer: Trainer) -> None:
        times.append(time.perf_counter())
        if number > steps:
            raise StopIteration

    epochs = -(-(steps + 1) // source.per_epoch)
    with suppress(StopIteration):
        fit(model, watched, Training(epochs=epochs, batch_size=batch), after=note, progress=False)
    seconds = times[steps] - times[0]
    return steps * batch / seconds, 100 * watched.waited / seconds


def main(
    data: Path, batch: int = 32, steps: int = 15, most: int | None = None, device: str = "cpu",
    page: Path = Path("docs/results/loading.md"),
) -> None:  # fmt: skip
    """Measure and write the page.

    Args:
        data: A folder of photos of a usual size.
        batch: Images a step.
        steps: Steps of each measurement, after a first one.
        most: Processes that read, at most; twice the usual number if not given.
        device: Of the training.
        page: The page to write.
    """
    usual = default_workers()
    counts = [n for n in (0, 1, 2, 4, 8, 16, 32) if n <= (2 * usual if most is None else most)]
    reading, training = [], []
    first = timm.create_model(next(iter(MODELS.values()))).eval()
    for workers in counts:
        rates = [alone(photo_source(data, first, made, batch, workers), steps, batch) for made in PRESETS.values()]
        reading.append(f"| {workers} | " + " | ".join(f"{rate:.0f}" for rate in rates) + " |")
        print(reading[-1], flush=True)
    for title, name in MODELS.items():
        model = reduce_(timm.create_model(name).eval().to(device), TNT(at=3, keep=0.5))
        images = torch.randn(batch * (steps + 1), 3, 224, 224)
        cells = [f"{trained(model, TensorSource(images, None, batch, 0), steps, batch)[0]:.1f}"]
        for made in PRESETS.values():
            rate, waiting = trained(model, photo_source(data, model, made, batch, usual), steps, batch)
            cells.append(f"{rate:.1f} ({waiting:.1f} %)")
        training.append(f"| {title} | " + " | ".join(cells) + " |")
        print(training[-1], flush=True)
    words = {
        "reading": "\n".join(reading), "training": "\n".join(training), "stamp": stamp(device), "batch": batch,
        "steps": steps, "workers": usual,
    }  # fmt: skip
    write(page, PAGE.format(**words).encode())
    written(page)


PAGE = """# Data loading

Do the reader processes keep the model busy? Photos are prepared as in training, {batch} per batch, {steps} steps
after a first one. "light": the default augmentation. "authors": that of TNT's authors.

Written by `python benchmarks/loading.py --data PHOTOS` on {stamp}.

**Reading alone**, images/s:

| `--workers` | light | authors |
|---:|---:|---:|
{reading}

**Training** TNT with {workers} worker(s), the default: images/s (time spent waiting for photos).

| model | images in memory | light | authors |
|---|---:|---:|---:|
{training}
"""


if __name__ == "__main__":
    tyro.cli(main)

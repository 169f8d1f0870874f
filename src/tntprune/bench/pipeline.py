"""Photos from disk to answers: the loader alone, the model alone, and both together.

A model that is twice as fast gains nothing where the loader is what one waits for; these figures tell it apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tntprune.backbones.attach import device_of
from tntprune.backbones.base import takes_images
from tntprune.bench.candidates import Candidate
from tntprune.data.loading import Photos, collate
from tntprune.data.photo import Photo
from tntprune.data.transforms import input_mode, transform_for
from tntprune.errors import UserError
from tntprune.system.clock import wait

PREFETCH = 2  # batches that each process reads ahead; torch's own default


@dataclass(frozen=True)
class Throughput:
    """One model with a loader.

    Args:
        method: "unpruned" or a method's name.
        options: The method and its options.
        device: Where the model runs.
        batch: Images at a time.
        workers: Processes that read photos; 0: the model's own process does.
        loader_images_per_s: Reading and preparing photos, with nobody waiting for the model.
        model_images_per_s: The forward pass on images that are in memory, and moved to the device.
        end_to_end_images_per_s: Both, as they run together.
        bound_by: "loader" or "model": which of the two is the slower one.
    """

    method: str
    options: str
    device: str
    batch: int
    workers: int
    loader_images_per_s: float
    model_images_per_s: float
    end_to_end_images_per_s: float
    bound_by: str


@torch.inference_mode()
def throughput(
    models: Sequence[Candidate], photos: Sequence[Photo], *, batch: int, workers: int, batches: int = 8
) -> list[Throughput]:
    """Measure the loader, then each model without and with it.

    Args:
        models: In eval mode.
        photos: At least one; they are gone through again until there are enough.
        batch: Images at a time.
        workers: Processes that read photos.
        batches: Batches that are timed, of each process that reads. Before them come those that the processes read
            ahead, which cost no time once they are there.

    Raises:
        UserError: a photo cannot be read.
    """
    model = models[0].model
    device = device_of(model)
    ahead = 1 + PREFETCH * workers
    wanted = batch * (ahead + batches * max(1, workers))
    dataset = Photos((list(photos) * -(-wanted // len(photos)))[:wanted], transform_for(model), input_mode(model))

    def loaded() -> Iterator[torch.Tensor]:
        for one in DataLoader(dataset, batch_size=batch, num_workers=workers, collate_fn=collate):
            if one.bad:
                raise UserError(one.bad[0])
            yield one.images

    alone = _rate(loaded(), ahead, device, None)
    images = next(loaded())
    found = []
    for one in models:
        in_memory = _rate(iter([images] * (batches + 1)), 1, device, one.model)
        both = _rate(loaded(), ahead, device, one.model)
        bound = "loader" if alone < in_memory else "model"
        found.append(Throughput(one.method, one.options, str(device), batch, workers, alone, in_memory, both, bound))
    return found


def _rate(batches: Iterator[torch.Tensor], first: int, device: torch.device, model: Any) -> float:
    """Return images per second, after the first batches; without a model, of the loader alone."""
    run: Callable[[torch.Tensor], Any] = takes_images(model) if isinstance(model, nn.Module) else lambda images: images
    for images in islice(batches, first):
        run(images.to(device))
    wait(device)
    begin, count = time.perf_counter(), 0
    for images in batches:
        run(images.to(device, non_blocking=True))
        count += len(images)
    wait(device)
    return count / (time.perf_counter() - begin)


def throughput_table(found: Sequence[Throughput]) -> str:
    """Format the figures for a person."""
    head = f"images/s, batches of {found[0].batch}, {found[0].workers} processes that read"
    lines = [head, f"{'':34} {'loader':>8} {'model':>8} {'together':>8}  bound by"]
    for one in found:
        name = one.options or one.method
        lines += [name] if len(name) > 34 else []
        lines.append(
            f"{'' if len(name) > 34 else name:34} {one.loader_images_per_s:8.1f} {one.model_images_per_s:8.1f} "
            f"{one.end_to_end_images_per_s:8.1f}  the {one.bound_by}"
        )
    return "\n".join(lines)

"""What is measured of a group of settings: accuracy on every photo, and speed in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from tntprune.analysis.evaluate import Tally
from tntprune.backbones.attach import device_of
from tntprune.backbones.base import takes_images
from tntprune.data.loading import Batch
from tntprune.errors import UserError
from tntprune.system.clock import Watch, in_turns, peak_memory
from tntprune.system.precision import Precision, autocast


@dataclass
class Counted:
    """What was counted of one setting; on `agreeing` images its first guess is that of the unpruned model."""

    tally: Tally
    agreeing: int = 0


@torch.inference_mode()
def accuracy(
    base: nn.Module,
    models: Sequence[nn.Module],
    batches: Iterable[Batch],
    precision: Precision,
    on_bad_image: Literal["error", "skip"],
    seen: Callable[[int], Any] = lambda images: None,
) -> tuple[list[Counted], list[str]]:
    """Run each batch through the unpruned model once, and through each setting.

    Args:
        base: The unpruned model.
        models: The settings; the unpruned model itself may be one of them.
        batches: Photos.
        precision: Of the forward passes.
        on_bad_image: Whether one that cannot be read is an error.
        seen: Told how many photos each batch had.

    Returns:
        What was counted of each setting, and one line for each photo that could not be read.

    Raises:
        UserError: a photo cannot be read, and none is to be skipped; or none can be read.
    """
    device = device_of(base)
    unpruned = Tally(base)
    counted = [Counted(unpruned if model is base else Tally(model)) for model in models]
    bad: list[str] = []

    def count(tally: Tally) -> torch.Tensor:
        return tally.count(images, tally.backbone.output(tally.model, images), labels)

    for batch in batches:
        bad += batch.bad
        if batch.bad and on_bad_image == "error":
            raise UserError(f"{batch.bad[0]} (or leave such images out with --on-bad-image skip)")
        if len(batch.images):
            images = batch.images.to(device, non_blocking=True)
            labels = batch.labels.to(device, non_blocking=True)
            with autocast(device, precision):
                guesses = count(unpruned)
                for one in counted:
                    own = guesses if one.tally is unpruned else count(one.tally)
                    one.agreeing += int((own == guesses).sum())
        seen(len(batch.labels) + len(batch.bad))
    if unpruned.images == 0:
        raise UserError(f"no image could be read, {len(bad)} were skipped; expected at least one")
    return counted, bad


class Speed(NamedTuple):
    """How fast one setting is, as in `ResultRow`; None is what cannot be told."""

    images_per_s: float
    speedup: float
    peak_mib: float | None
    busy: float | None


@torch.inference_mode()
def speeds(
    base: nn.Module, models: Sequence[nn.Module], images: torch.Tensor, precision: Precision, rounds: int
) -> list[Speed]:
    """Time settings in turns with each other and with the unpruned model, all on one batch.

    Args:
        base: The unpruned model.
        models: The settings; the unpruned model itself may be one of them.
        images: (B, C, H, W), on the device.
        precision: Of the forward passes.
        rounds: How often each is timed.
    """

    def run(model: nn.Module) -> None:
        with autocast(images.device, precision):
            takes_images(model)(images)

    timed = [base, *(model for model in models if model is not base)]
    calls = [partial(run, model) for model in timed]
    peaks = [peak_memory(call, images.device) for call in calls]
    watch = Watch()
    with watch.on():
        times = in_turns(calls, rounds, images.device, progress=False)
    busy = watch.others()
    found = {
        id(model): Speed(
            images_per_s=1000 * len(images) / spent.median,
            speedup=median(unpruned / own for unpruned, own in zip(times[0].all, spent.all, strict=True)),
            peak_mib=None if peak is None else peak / 2**20,
            busy=busy,
        )
        for model, spent, peak in zip(timed, times, peaks, strict=True)
    }
    return [found[id(model)] for model in models]

"""Accuracy, agreement with the unpruned model, and speed of the model alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from tntprune.counting import macs, macs_by_image
from tntprune.data import Photo, Photos, input_mode, transform_for
from tntprune.errors import UserError
from tntprune.loading import in_order
from tntprune.reduce import base_of, device_of, is_reduced, reduction_of
from tntprune.streams import Stream
from tntprune.trace import record
from tntprune.world import ALONE, World


@dataclass(frozen=True)
class Figures:
    """What one model did.

    Args:
        top1: Percent of images whose label is the first guess.
        top5: Percent of images whose label is among the first five.
        macs: For one image; the mean over the images where it differs from one to the next.
        images_per_s: Of the forward pass alone, without reading images or moving them to the device; the median batch.
    """

    top1: float
    top5: float
    macs: int
    images_per_s: float


@dataclass(frozen=True)
class Evaluation(Figures):
    """What `evaluate` found.

    Args:
        images: Images counted.
        skipped: Images that could not be read.
        agreement: Percent of images on which the first guess is that of the unpruned model.
        tokens: Patch tokens that enter each block; the mean over the images where that differs.
        base: The unpruned model's figures on the same batches, taken in turns, if asked for.
        speedup: How many times as fast as the unpruned model; the median over the batches, each compared with itself.
    """

    images: int
    skipped: int
    agreement: float
    tokens: list[int] | list[float]
    base: Figures | None = None
    speedup: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; `base` and `speedup` only if they were asked for."""
        first = ["images", "skipped", "top1", "top5", "agreement", "macs", "images_per_s", "tokens"]
        data = asdict(self)
        return {key: data[key] for key in first + [k for k in ("base", "speedup") if data[k] is not None]}


class Tally:
    """Counts and seconds of one model over the batches; whole numbers, so that they add up exactly."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.images, self.first, self.five = model, 0, 0, 0
        self.variable = is_reduced(model) and reduction_of(model).config.variable
        self.cost = 0  # of all images, where they differ
        self.entering: list[int] = []  # patch tokens of all images that enter each block, where they differ
        self.pace: list[float] = []  # seconds an image, batch by batch

    def run(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Run one batch on the clock, count it, and return the first guesses."""
        if not self.pace:  # the first pass chooses kernels and fills caches
            self.model(images)
        wait(images.device)
        begin = time.perf_counter()
        logits = self.model(images)
        wait(images.device)
        self.pace.append((time.perf_counter() - begin) / len(images))
        return self.count(images, logits, labels)

    def count(self, images: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Count what the model said of one batch, and return the first guesses."""
        if self.variable:
            with record(self.model) as trace:
                self.model(images)
            self.cost += sum(macs_by_image(self.model, trace.counts))
            entering = torch.stack(trace.counts[:-1:2], 1).sum(0).tolist()
            self.entering = [a + b for a, b in zip(self.entering or [0] * len(entering), entering, strict=True)]
        guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = guesses == labels[:, None]
        self.images += len(images)
        self.first += int(hits[:, 0].sum())
        self.five += int(hits.any(1).sum())
        top: torch.Tensor = guesses[:, 0]
        return top

    def gather(self, world: World) -> None:
        """Take in what the other processes have counted."""
        found = world.gather((self.images, self.first, self.five, self.cost, self.entering, self.pace))
        images, first, five, cost, entering, pace = zip(*found, strict=True)
        self.images, self.first, self.five, self.cost = sum(images), sum(first), sum(five), sum(cost)
        self.entering = [sum(block) for block in zip(*filter(None, entering), strict=True)]
        self.pace = [one for part in pace for one in part]

    def figures(self) -> Figures:
        """What was counted."""
        return Figures(
            top1=100 * self.first / self.images,
            top5=100 * self.five / self.images,
            macs=round(self.cost / self.images) if self.variable else macs(self.model).macs,
            images_per_s=1 / median(self.pace),
        )

    def tokens(self) -> list[int] | list[float]:
        """Patch tokens that enter each block."""
        if not self.variable:
            return macs(self.model).tokens
        return [round(block / self.images, 1) for block in self.entering]


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@torch.inference_mode()
def measure(
    model: nn.Module,
    batches: Any,
    skipped: Callable[[], int] = lambda: 0,
    compare: bool = False,
    base: nn.Module | None = None,
    world: World = ALONE,
) -> Evaluation:
    """Evaluate a model, reduced or not, in its present mode.

    Args:
        model: In eval mode.
        batches: Of (images, labels); of several processes each has its own.
        skipped: Asked at the end how many images could not be read, by all processes.
        compare: Also give the unpruned model's figures; the two take turns in going first.
        base: The unpruned model, if it is not the same one without its reduction: before it was fine-tuned.
        world: The processes whose counts are added up.

    Raises:
        UserError: there was no image at all.
    """
    device = device_of(model)
    reduced = is_reduced(model)
    own = Tally(model)
    unpruned = Tally(base if base is not None else base_of(model)) if reduced else own
    same = 0
    for number, (images, labels) in enumerate(batches):
        images, labels = images.to(device), labels.to(device)
        if not reduced:
            own.run(images, labels)
            same += len(images)
            continue
        guesses = {tally: tally.run(images, labels) for tally in ((own, unpruned) if number % 2 else (unpruned, own))}
        same += int((guesses[own] == guesses[unpruned]).sum())
    for tally in dict.fromkeys((own, unpruned)):  # in the same order everywhere
        tally.gather(world)
    same = sum(world.gather(same))
    left_out = skipped()
    if own.images == 0:
        raise UserError(f"no image could be read, {left_out} were skipped; expected at least one")
    return Evaluation(
        **asdict(own.figures()),
        images=own.images,
        skipped=left_out,
        agreement=100 * same / own.images,
        tokens=own.tokens(),
        base=unpruned.figures() if compare else None,
        speedup=median(b / a for a, b in zip(own.pace, unpruned.pace)) if compare else None,
    )


def evaluate(
    model: nn.Module,
    photos: Sequence[Photo] | Stream,
    *,
    batch_size: int = 32,
    workers: int = 1,
    on_bad_image: Literal["error", "skip"] = "error",
    compare: bool = False,
    base: nn.Module | None = None,
    world: World = ALONE,
    progress: bool = True,
) -> tuple[Evaluation, list[str]]:
    """Evaluate a model on labelled photos.

    Several processes share the batches: they are the same ones as in a single process, and so are the figures.

    Args:
        model: In eval mode, reduced or not.
        photos: What `open_photos` found.
        batch_size: Images at a time.
        workers: Processes that read.
        on_bad_image: "error" stops at the first image that cannot be read; "skip" leaves it out and counts it.
        compare: See `measure`.
        base: See `measure`.
        world: The processes that evaluate together.
        progress: Show a bar.

    Returns:
        The figures, and one line for each image that was skipped.

    Raises:
        UserError: an image cannot be read, and none is to be skipped.
    """
    reader = Photos(photos, transform_for(model), input_mode(model))
    loader = in_order(reader, batch_size, workers, world.rank, world.size, pin=device_of(model).type == "cuda")
    bad: list[str] = []

    def batches() -> Any:
        with tqdm(total=len(photos), unit="image", desc="evaluating", disable=not progress or not world.main) as bar:
            for batch in loader:
                bad.extend(batch.bad)
                if batch.bad and on_bad_image == "error":
                    raise UserError(f"{batch.bad[0]} (or leave such images out with --on-bad-image skip)")
                if len(batch.images):
                    yield batch.images, batch.labels
                bar.update(min(len(photos) - bar.n, (len(batch.labels) + len(batch.bad)) * world.size))

    def all_bad() -> int:
        bad[:] = [line for lines in world.gather(bad) for line in lines]
        return len(bad)

    return measure(model, batches(), all_bad, compare, base, world), bad

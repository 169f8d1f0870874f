"""Accuracy, agreement with the unpruned model, cosine of embeddings, and speed of the model alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from tntprune.analysis.batches import photo_batches, pixel_batches
from tntprune.analysis.embed import check_pooled
from tntprune.analysis.macs import macs, macs_by_image
from tntprune.analysis.record import record
from tntprune.analysis.retrieval import Retrieval, search
from tntprune.backbones.attach import base_of, device_of, is_reduced, reduction_of
from tntprune.backbones.base import find_backbone
from tntprune.data.datasets import Listed, open_photos
from tntprune.data.photo import Chosen, Packed, Photo, limited
from tntprune.data.streams import Stream
from tntprune.errors import UsageError, UserError
from tntprune.methods.checks import check_whole
from tntprune.system.clock import wait
from tntprune.system.distributed import ALONE, ProcessGroup

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
MOST_SEARCHED = 50_000  # photos among which neighbours are sought; the time grows with their square
ORDER = (
    "images",
    "skipped",
    "top1",
    "top5",
    "agreement",
    "cosine",
    *Retrieval._fields,
    "macs",
    "images_per_s",
    "tokens",
    "base",
    "speedup",
)


@dataclass(frozen=True)
class Figures:
    """What one model did. Without labels top1 and top5 are None."""

    top1: float | None  # percent of images whose label is the first guess
    top5: float | None  # percent of images whose label is among the first five guesses
    macs: int  # multiply-accumulates per image; the mean over the images where they differ
    images_per_s: float  # of the forward pass alone, images being on the device already; the median batch


@dataclass(frozen=True)
class Evaluation(Figures):
    """What `evaluate` found."""

    images: int  # that were counted
    skipped: int  # images that could not be read
    agreement: float | None  # percent of first guesses that are the unpruned model's; None without classes
    cosine: float | None  # mean, -1 to 1, of the embeddings to the unpruned model's; None with classes
    tokens: list[int] | list[float]  # patch tokens that enter each block; the mean over the images where that differs
    recall1: float | None = None  # see `Retrieval` for these five; None with classes
    recall5: float | None = None
    recall10: float | None = None
    knn: float | None = None
    knn_unpruned: float | None = None
    base: Figures | None = None  # the unpruned model's on the same batches, taken in turns, if asked for
    speedup: float | None = None  # times as fast as the unpruned model; the median over pairs of the same batch
    bad: tuple[str, ...] = field(default=(), repr=False)  # one line per image that could not be read

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.to_dict().items())

    def to_dict(self) -> dict[str, Any]:
        """Return them as JSON values, without figures that are None."""
        data = asdict(self, dict_factory=lambda pairs: {name: value for name, value in pairs if value is not None})
        return {name: data[name] for name in ORDER if name in data}


class Tally:
    """Counts and seconds of one model over the batches; whole numbers, so that they add up exactly.

    Args:
        model: Reduced or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.images, self.labelled, self.first, self.five = model, 0, 0, 0, 0
        self.backbone = find_backbone(model)
        self.embeds = not self.backbone.classes(model)
        self.variable = is_reduced(model) and reduction_of(model).config.variable
        self.cost = 0  # of all images, where they differ
        self.entering: list[int] = []  # patch tokens of all images that enter each block, where they differ
        self.pace: list[float] = []  # seconds an image, batch by batch

    def run(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Run one batch on the clock, and count it; see `count`."""
        if not self.pace:  # the first pass chooses kernels and fills caches
            self.backbone.output(self.model, images)
        wait(images.device)
        begin = time.perf_counter()
        output = self.backbone.output(self.model, images)
        wait(images.device)
        self.pace.append((time.perf_counter() - begin) / len(images))
        return self.count(images, output, labels)

    def count(self, images: torch.Tensor, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Count what the model gave for one batch.

        Args:
            images: (B, C, H, W).
            output: Logits (B, classes), or of a model without classes embeddings (B, D).
            labels: (B,), class indices, or -1 where there is none.

        Returns:
            The first guesses (B,), or the embeddings (B, D) at length 1.

        Raises:
            UserError: an output is NaN or infinite, or the model gives no single embedding per image.
        """
        check_pooled(output)
        if self.variable:
            with record(self.model) as trace:
                self.backbone.output(self.model, images)
            self.cost += sum(macs_by_image(self.model, trace.counts))
            entering = torch.stack(trace.counts[:-1:2], 1).sum(0).tolist()
            self.entering = [a + b for a, b in zip(self.entering or [0] * len(entering), entering, strict=True)]
        guesses = output.topk(min(5, output.shape[1]), dim=1).indices
        hits = guesses == labels[:, None]
        bad = ~(output.amax(1) < torch.inf)  # the largest is NaN where any is
        counts = torch.stack([bad.sum(), (labels >= 0).sum(), hits[:, 0].sum(), hits.any(1).sum()])
        odd, labelled, first, five = counts.tolist()
        if odd:
            kind = "reduced" if is_reduced(self.model) else "unpruned"
            raise UserError(
                f"the {kind} model's outputs for {odd} of {len(images)} images are NaN or infinite; expected "
                "finite weights and images, or another precision"
            )
        self.images, self.labelled = self.images + len(images), self.labelled + labelled
        self.first, self.five = self.first + first, self.five + five
        return F.normalize(output.double(), dim=1) if self.embeds else guesses[:, 0]

    def gather(self, group: ProcessGroup) -> None:
        """Take in what the other processes have counted."""
        found = group.gather((self.images, self.labelled, self.first, self.five, self.cost, self.entering, self.pace))
        *counts, entering, pace = zip(*found, strict=True)
        self.images, self.labelled, self.first, self.five, self.cost = map(sum, counts)
        self.entering = [sum(block) for block in zip(*filter(None, entering), strict=True)]
        self.pace = [one for part in pace for one in part]

    def accuracy(self) -> tuple[float, float]:
        """Return the percent of the images whose label is the first guess, and among the first five."""
        return 100 * self.first / self.images, 100 * self.five / self.images

    def figures(self) -> Figures:
        """Return what was counted."""
        top1, top5 = self.accuracy() if self.labelled and not self.embeds else (None, None)
        cost = round(self.cost / self.images) if self.variable else macs(self.model).macs
        return Figures(top1, top5, cost, 1 / median(self.pace))

    def tokens(self) -> list[int] | list[float]:
        """Return the patch tokens that enter each block."""
        if not self.variable:
            return macs(self.model).tokens
        return [round(block / self.images, 1) for block in self.entering]


@torch.inference_mode()
def measure(
    model: nn.Module,
    batches: Batches,
    bad: Sequence[str] = (),
    compare: bool = False,
    base: nn.Module | None = None,
    group: ProcessGroup = ALONE,
) -> Evaluation:
    """Evaluate a model, reduced or not, in its present mode.

    Args:
        model: In eval mode.
        batches: Images (B, C, H, W) and labels (B,), -1 where there is none; each of several processes has its own.
        bad: One line per image that this process cannot read; they may come while the batches do.
        compare: Also give the unpruned model's figures; the two take turns in going first.
        base: The unpruned model, if it is not the same one without its reduction: before it was fine-tuned.
        group: The processes whose counts are added up.

    Raises:
        UserError: there was no image at all, or an output is not finite.
    """
    device, reduced, own = device_of(model), is_reduced(model), Tally(model)
    unpruned = Tally(base if base is not None else base_of(model)) if reduced else own
    near: list[float] = []  # of each batch: images with the same guess, or the sum of the cosines
    kept: list[tuple[torch.Tensor, ...]] = []  # of each batch without classes: both models' embeddings, and labels
    for number, (images, labels) in enumerate(batches):
        images, labels = images.to(device), labels.to(device)
        tallies = dict.fromkeys((own, unpruned) if number % 2 else (unpruned, own))
        found = {tally: tally.run(images, labels) for tally in tallies}
        a, b = found[own], found[unpruned]
        if own.embeds and own.images <= MOST_SEARCHED:
            kept.append(tuple(value.cpu() for value in (a.float(), b.float(), labels)))
        near.append(len(images) if not reduced else float((a * b).sum() if own.embeds else (a == b).sum()))
    for tally in dict.fromkeys((own, unpruned)):  # in the same order everywhere
        tally.gather(group)
    total = math.fsum(one for part in group.gather(near) for one in part)  # whatever the order
    lines = tuple(line for part in group.gather(list(bad)) for line in part)
    if own.images == 0:
        raise UserError(f"no image could be read, {len(lines)} were skipped; expected at least one")
    return Evaluation(
        **asdict(own.figures()),
        images=own.images,
        skipped=len(lines),
        agreement=None if own.embeds else 100 * total / own.images,
        cosine=total / own.images if own.embeds else None,
        tokens=own.tokens(),
        base=unpruned.figures() if compare else None,
        speedup=median(b / a for a, b in zip(own.pace, unpruned.pace)) if compare else None,
        bad=lines,
        **(_searched(kept, reduced, device, group) if own.images <= MOST_SEARCHED else {}),
    )


def _searched(
    kept: list[tuple[torch.Tensor, ...]], reduced: bool, device: torch.device, group: ProcessGroup
) -> dict[str, Any]:
    """Return the figures of a search among the embeddings that all processes have found; none with classes."""
    parts = group.gather(kept)
    batches = [batch for turn in zip_longest(*parts) for batch in turn if batch is not None]  # in one process's order
    if not batches:
        return {}
    own, unpruned, labels = (torch.cat(values) for values in zip(*batches, strict=True))
    own = own.to(device)
    return search(own, unpruned.to(device) if reduced else own, labels, group)._asdict()


def evaluate(
    model: nn.Module,
    data: str | Path | torch.Tensor | tuple[torch.Tensor, torch.Tensor] | Sequence[Photo] | Stream | Iterable[Any],
    labels: torch.Tensor | None = None,
    *,
    split: str | None = None,
    root: Path | None = None,
    samples: int | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    workers: int | None = None,
    on_bad_image: Literal["error", "skip"] = "error",
    compare: bool = False,
    base: nn.Module | None = None,
    group: ProcessGroup = ALONE,
    progress: bool = True,
) -> Evaluation:
    """Evaluate a model, reduced or not, on images with or without labels.

    With labels it gives top-1 and top-5. A reduced model with classes is compared by its first guesses with the
    unpruned model (`agreement`, in percent). One without classes is compared by its embeddings (`cosine`) and by the
    nearest neighbours that they find among the images (`recall1`, `recall5`, `recall10`, `knn`), of which there may be
    `MOST_SEARCHED` at most for that.

    Args:
        model: In eval mode, of timm or transformers.
        data: A folder of photos, with a subfolder per class if they have labels, or the name of a data set, as for
            `tntprune eval --data`; or images (n, C, H, W), normalised as the model wants them, alone or in a pair with
            their labels (n,); or a Dataset or DataLoader of images or of (images, labels).
        labels: (n,), with a tensor of images.
        split: Of a data set or a folder, as for `tntprune eval`.
        root: Where "torch/" data lies, and where "hfds/" data is kept.
        samples: How many photos a stream has, if it does not report its length.
        limit: Evaluate at most so many photos, drawn at random and always the same ones; of a folder or data set.
        batch_size: Images per batch; a DataLoader has its own.
        workers: Processes that read photos; None for half the processors.
        on_bad_image: "error" stops at the first photo that cannot be read; "skip" leaves it out and counts it.
        compare: Also give the unpruned model's figures; the two take turns in going first.
        base: The unpruned model, if it is not the same one without its reduction: before it was fine-tuned.
        group: The processes that evaluate together, on photos; they share the batches.
        progress: Show a bar.

    Returns:
        The figures. Those that do not apply are None.

    Raises:
        UserError: the data cannot be used, a photo cannot be read and none is to be skipped, an output is not finite,
            or the model is in training mode.
        UsageError: an option is out of range, or does not go with such data.
    """
    check_whole("batch_size", batch_size, 1)
    if limit is not None:
        check_whole("limit", limit, 1)
    if model.training:
        raise UserError("the model is in training mode; expected model.eval() before it is evaluated")
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data):
        if labels is not None:
            raise UsageError("labels were given twice; expected (images, labels), or images and labels")
        images: Any = data
        data, labels = images
    if labels is not None and not isinstance(data, torch.Tensor):
        raise UsageError("labels go with a tensor of images; a loader gives its own, and a folder's are its subfolders")
    if isinstance(data, str | Path):
        with group.main_first():
            data = open_photos(data, model, split=split, root=root, samples=samples, labelled=None)
    listed = isinstance(data, list) and all(isinstance(item, Photo) for item in data)
    if not (listed or isinstance(data, Stream | Listed | Packed | Chosen)):  # they are pixels, and no photos to read
        given = {"limit": limit, "split": split, "root": root, "samples": samples}
        if odd := next((name for name, value in given.items() if value is not None), None):
            raise UsageError(f"{odd}={given[odd]} with {type(data).__name__}; expected a folder or a data set")
        batches = tqdm(
            pixel_batches(model, data, labels, batch_size), unit="batch", desc="evaluating", disable=not progress
        )
        return measure(model, batches, compare=compare, base=base)
    photos: Any = data
    if limit is not None and isinstance(photos, Stream):
        raise UsageError(f"limit={limit} of a stream, whose photos have no positions; expected samples={limit}")
    bad: list[str] = []
    found = photo_batches(
        model, photos if limit is None else limited(photos, limit), batch_size, workers, progress,
        bad=bad if on_bad_image == "skip" else None, group=group,
        hint=" (or leave such images out with --on-bad-image skip)",
    )  # fmt: skip
    return measure(model, found, bad, compare, base, group)

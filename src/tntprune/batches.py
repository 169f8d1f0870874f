"""Where training gets its batches from: tensors, a folder of photos, or a loader of the user's."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader

from tntprune.data import Photos, collate
from tntprune.errors import UsageError, UserError
from tntprune.mixing import Mixer, check_even

T = TypeVar("T")

Pair = tuple[torch.Tensor, torch.Tensor | None]


class Share(NamedTuple):
    """What one process works through of each step's batch.

    Args:
        parts: Equal parts that a batch is cut into. What is in a part, and what is drawn for it, depends on its number
            alone, and not on the process that works it through.
        mine: The numbers of this process's.
    """

    parts: int = 1
    mine: tuple[int, ...] = (0,)

    def cut(self, items: list[T], part: int) -> list[T]:
        """A part of a batch; neighbours go to different parts."""
        return items[part :: self.parts]


WHOLE = Share()


class Source(Protocol):
    """Batches by step number, the same ones whenever they are asked for."""

    per_epoch: int

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        """The images (B, C, H, W) and labels of the steps from `first` up to `last`.

        Labels are class indices (B,), or the shares of the classes (B, classes) where images are mixed, or None.

        Of each step come the parts `share.mine`, one after another, each as a batch of its own.
        """


def check_share(count: int, batch: int, share: Share, mixer: Mixer | None = None) -> None:
    """Refuse a batch that cannot be cut into equal parts, or whose parts cannot be mixed.

    Raises:
        UserError: there are not enough images for a whole batch.
        UsageError: the parts would not be equal, or be odd where they are mixed.
    """
    if batch % share.parts:
        raise UsageError(f"batch_size={batch} in {share.parts} parts; expected a multiple of {share.parts}")
    if share.parts > 1 and count < batch:
        raise UserError(f"batch_size={batch} in {share.parts} parts, and only {count} images; expected a smaller batch")
    if mixer is not None:
        check_even(min(batch, count) // share.parts)


def chosen(count: int, batch: int, seed: int, step: int, repeats: int = 1) -> tuple[int, list[int], list[int]]:
    """The epoch of a step, the positions of its batch, and for each which copy of the image it is.

    Each epoch has a new order, in which an image comes `repeats` times in succession, as in timm's `RepeatAugSampler`;
    it ends after as many images as there are, without the last, smaller batch.
    """
    per_epoch = max(1, count // batch)
    epoch, turn = divmod(step, per_epoch)
    places = torch.arange(turn * batch, min((turn + 1) * batch, count))
    positions = order(count, seed, epoch)[places // repeats]
    return epoch, positions.tolist(), (places % repeats).tolist()


@lru_cache(maxsize=1)  # an epoch has many steps
def order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """The order (count,) in which an epoch goes through the images."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


class TensorSource:
    """Images that are in memory.

    Args:
        images: (n, C, H, W).
        labels: (n,) or None.
        batch: Images a step.
        seed: For the order.
        mixer: What mixes the images of a batch, if any.
    """

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor | None, batch: int, seed: int, mixer: Mixer | None = None
    ) -> None:
        if images.ndim != 4 or len(images) == 0:
            raise UserError(f"images of shape {tuple(images.shape)}; expected (n, channels, height, width) with n > 0")
        if labels is not None and labels.shape != images.shape[:1]:
            raise UserError(
                f"labels of shape {tuple(labels.shape)} for {len(images)} images; expected ({len(images)},)"
            )
        self.images, self.labels, self.batch, self.seed, self.mixer = images, labels, batch, seed, mixer
        self.per_epoch = max(1, len(images) // batch)

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        check_share(len(self.images), self.batch, share, self.mixer)
        for step in range(first, last):
            _, whole, _ = chosen(len(self.images), self.batch, self.seed, step)
            for part in share.mine:
                index = share.cut(whole, part)
                images, labels = self.images[index], None if self.labels is None else self.labels[index]
                yield (images, labels) if self.mixer is None else self.mixer(step, part, images, labels)


class PhotoSource:
    """Photos read by worker processes.

    Args:
        photos: What to read.
        batch: Images a step.
        seed: For the order.
        workers: Processes that read; 0 reads in this one.
        labelled: Whether the photos have labels.
        repeats: How many times an image comes in an epoch; see `Augmentation`.
        mixer: What mixes the images of a batch, if any.
        pin: Whether batches are put where a CUDA device fetches them from without waiting.
    """

    def __init__(
        self,
        photos: Photos,
        batch: int,
        seed: int,
        workers: int,
        labelled: bool,
        repeats: int = 1,
        mixer: Mixer | None = None,
        pin: bool = False,
    ) -> None:
        self.photos, self.batch, self.seed, self.workers, self.labelled = photos, batch, seed, workers, labelled
        self.repeats, self.mixer, self.pin = repeats, mixer, pin
        self.per_epoch = max(1, len(photos) // batch)

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        check_share(len(self.photos), self.batch, share, self.mixer)
        turns = ((step, part) for step in range(first, last) for part in share.mine)
        loader = DataLoader(
            self.photos,
            batch_sampler=_Keys(len(self.photos), self.batch, self.seed, first, last, share, self.repeats),
            num_workers=min(self.workers, (last - first) * len(share.mine)),
            collate_fn=collate,
            worker_init_fn=ignore_interrupts,
            pin_memory=self.pin,
        )
        for (step, part), batch in zip(turns, loader, strict=True):
            if batch.bad:
                raise UserError(batch.bad[0])
            labels = batch.labels if self.labelled else None
            yield (batch.images, labels) if self.mixer is None else self.mixer(step, part, batch.images, labels)


def ignore_interrupts(worker: int) -> None:
    """For the processes that read: Ctrl-C is for the training to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Keys:
    """A batch sampler: (epoch, position, copy), step by step, and part by part."""

    def __init__(self, count: int, batch: int, seed: int, first: int, last: int, share: Share, repeats: int) -> None:
        self.count, self.batch, self.seed, self.first, self.last = count, batch, seed, first, last
        self.share, self.repeats = share, repeats

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        for step in range(self.first, self.last):
            epoch, positions, copies = chosen(self.count, self.batch, self.seed, step, self.repeats)
            whole = [(epoch, position, copy) for position, copy in zip(positions, copies, strict=True)]
            for part in self.share.mine:
                yield self.share.cut(whole, part)

    def __len__(self) -> int:
        return (self.last - self.first) * len(self.share.mine)


class LoaderSource:
    """The user's own loader, gone through again and again: of images, of (images, labels), or of `pixel_values` and
    `labels` by name, as transformers has them.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        try:
            self.per_epoch = len(loader)  # type: ignore[arg-type]
        except TypeError:
            raise UserError(
                f"{type(loader).__name__} has no length; expected a DataLoader, a tensor or a folder"
            ) from None
        if self.per_epoch == 0:
            raise UserError("the loader is empty; expected at least one batch")

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        if share.parts > 1:
            raise UsageError(
                f"parts={share.parts} of the batches of a loader; expected a folder or a tensor, or smaller batches"
            )
        step = 0
        while step < last:
            before = step
            for item in self.loader:
                images, labels = (*item, None, None)[:2] if isinstance(item, list | tuple) else (item, None)
                if isinstance(item, Mapping):
                    images, labels = item.get("pixel_values", item), item.get("labels")
                if not isinstance(images, torch.Tensor):
                    raise UserError(
                        f"the loader gives a {type(images).__name__}; expected images, (images, labels), or "
                        "pixel_values and labels by name"
                    )
                if first <= step < last:
                    yield images, labels
                step += 1
                if step >= last:
                    return
            if step == before:
                raise UserError(f"the loader gave nothing after {step} batches; expected one that can be used again")

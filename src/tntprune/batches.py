"""Where training gets its batches from: tensors, a folder of photos, or a loader of the user's."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from tntprune.data import Photos, collate
from tntprune.errors import UsageError, UserError

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

    def cut(self, items: list[int], part: int) -> list[int]:
        """A part of a batch; neighbours go to different parts."""
        return items[part :: self.parts]


WHOLE = Share()


class Source(Protocol):
    """Batches by step number, the same ones whenever they are asked for."""

    per_epoch: int

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        """The images (B, C, H, W) and labels (B,) or None of the steps from `first` up to `last`.

        Of each step come the parts `share.mine`, one after another, each as a batch of its own.
        """


def check_share(count: int, batch: int, share: Share) -> None:
    """Refuse a batch that cannot be cut into equal parts.

    Raises:
        UserError: there are not enough images for a whole batch.
        UsageError: the parts would not be equal.
    """
    if batch % share.parts:
        raise UsageError(f"batch_size={batch} in {share.parts} parts; expected a multiple of {share.parts}")
    if share.parts > 1 and count < batch:
        raise UserError(f"batch_size={batch} in {share.parts} parts, and only {count} images; expected a smaller batch")


def chosen(count: int, batch: int, seed: int, step: int) -> tuple[int, list[int]]:
    """The epoch of a step and the positions of its batch; each epoch goes through all in a new order.

    The last, smaller batch of an epoch is left out.
    """
    per_epoch = max(1, count // batch)
    epoch, turn = divmod(step, per_epoch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return epoch, order[turn * batch : (turn + 1) * batch].tolist()


class TensorSource:
    """Images that are in memory.

    Args:
        images: (n, C, H, W).
        labels: (n,) or None.
        batch: Images a step.
        seed: For the order.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor | None, batch: int, seed: int) -> None:
        if images.ndim != 4 or len(images) == 0:
            raise UserError(f"images of shape {tuple(images.shape)}; expected (n, channels, height, width) with n > 0")
        if labels is not None and labels.shape != images.shape[:1]:
            raise UserError(
                f"labels of shape {tuple(labels.shape)} for {len(images)} images; expected ({len(images)},)"
            )
        self.images, self.labels, self.batch, self.seed = images, labels, batch, seed
        self.per_epoch = max(1, len(images) // batch)

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        check_share(len(self.images), self.batch, share)
        for step in range(first, last):
            _, whole = chosen(len(self.images), self.batch, self.seed, step)
            for part in share.mine:
                index = share.cut(whole, part)
                yield self.images[index], None if self.labels is None else self.labels[index]


class PhotoSource:
    """Photos read by worker processes.

    Args:
        photos: What to read.
        batch: Images a step.
        seed: For the order.
        workers: Processes that read; 0 reads in this one.
        labelled: Whether the photos have labels.
    """

    def __init__(self, photos: Photos, batch: int, seed: int, workers: int, labelled: bool) -> None:
        self.photos, self.batch, self.seed, self.workers, self.labelled = photos, batch, seed, workers, labelled
        self.per_epoch = max(1, len(photos) // batch)

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        check_share(len(self.photos), self.batch, share)
        loader = DataLoader(
            self.photos,
            batch_sampler=_Keys(len(self.photos), self.batch, self.seed, first, last, share),
            num_workers=self.workers,
            collate_fn=collate,
            worker_init_fn=ignore_interrupts,
        )
        for batch in loader:
            if batch.bad:
                raise UserError(batch.bad[0])
            yield batch.images, batch.labels if self.labelled else None


def ignore_interrupts(worker: int) -> None:
    """For the processes that read: Ctrl-C is for the training to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Keys:
    """A batch sampler: (epoch, position) pairs, step by step, and part by part."""

    def __init__(self, count: int, batch: int, seed: int, first: int, last: int, share: Share) -> None:
        self.count, self.batch, self.seed, self.first, self.last = count, batch, seed, first, last
        self.share = share

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self.first, self.last):
            epoch, whole = chosen(self.count, self.batch, self.seed, step)
            for part in self.share.mine:
                yield [(epoch, position) for position in self.share.cut(whole, part)]

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

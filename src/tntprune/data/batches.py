"""Where training gets its batches from: tensors, photos, or a loader of the user's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from tntprune.data.folders import Photos
from tntprune.data.loading import WHOLE as WHOLE
from tntprune.data.loading import Keys, StreamKeys, chosen, load
from tntprune.data.loading import Share as Share
from tntprune.data.mixing import Mixer, check_even
from tntprune.data.streams import Stream
from tntprune.errors import UsageError, UserError

Pair = tuple[torch.Tensor, torch.Tensor | None]


class Source(Protocol):
    """Batches by step number, the same ones whenever they are asked for."""

    per_epoch: int

    def check(self, share: Share) -> None:
        """Refuse what cannot be worked through in such parts, before anything is begun."""

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

    def digest(self) -> str:
        """SHA-256 of the images and labels."""
        found = hashlib.sha256()
        for value in [self.images] if self.labels is None else [self.images, self.labels]:
            for part in value.split(1024):
                found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return found.hexdigest()

    def check(self, share: Share) -> None:
        check_share(len(self.images), self.batch, share, self.mixer)

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        self.check(share)
        for step in range(first, last):
            _, whole, _ = chosen(len(self.images), self.batch, self.seed, step)
            for part in share.mine:
                index = share.cut(whole, part)
                images, labels = self.images[index], None if self.labels is None else self.labels[index]
                yield (images, labels) if self.mixer is None else self.mixer(step, part, images, labels)


class PhotoSource:
    """Photos read by worker processes, at hand or one after another from a stream.

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

    def check(self, share: Share) -> None:
        check_share(len(self.photos), self.batch, share, self.mixer)

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        self.check(share)
        steps = (self.batch, self.seed, first, last, share, self.repeats)
        found = self.photos.photos
        sampler = StreamKeys(found, *steps) if isinstance(found, Stream) else Keys(len(found), *steps)
        turns = ((step, part) for step in range(first, last) for part in share.mine)
        loader = load(self.photos, sampler, min(self.workers, (last - first) * len(share.mine)), self.pin)
        for (step, part), batch in zip(turns, loader, strict=True):
            if batch.bad:
                raise UserError(batch.bad[0])
            labels = batch.labels if self.labelled else None
            yield (batch.images, labels) if self.mixer is None else self.mixer(step, part, batch.images, labels)


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

    def check(self, share: Share) -> None:
        if share.parts > 1:
            raise UsageError(
                f"micro_batches={share.parts} of the batches of a loader; expected a folder or a tensor, or smaller "
                "batches"
            )

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        self.check(share)
        step = 0
        while step < last:
            before = step
            for item in self.loader:
                images, labels = pair_in(item)
                if first <= step < last:
                    yield images, labels
                step += 1
                if step >= last:
                    return
            if step == before:
                raise UserError(f"the loader gave nothing after {step} batches; expected one that can be used again")


def pair_in(item: Any) -> Pair:
    """The images and labels in what a loader gives: images, (images, labels), or `pixel_values` and `labels` by name.

    Raises:
        UserError: it is none of these.
    """
    images, labels = (*item, None, None)[:2] if isinstance(item, list | tuple) else (item, None)
    if isinstance(item, Mapping):
        images, labels = item.get("pixel_values", item), item.get("labels")
    if not isinstance(images, torch.Tensor):
        raise UserError(
            f"the loader gives a {type(images).__name__}; expected images, (images, labels), or pixel_values and "
            "labels by name"
        )
    return images, labels

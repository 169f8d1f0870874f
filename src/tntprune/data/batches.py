"""Where training gets its batches from: tensors, photos, or a loader of the user's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from copy import copy as shallow
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tntprune.backbones.prompts import Prompts
from tntprune.data.loading import Photos, Sent, load
from tntprune.data.mixing import Mixer, check_even
from tntprune.data.streams import Stream
from tntprune.errors import UsageError, UserError

Pair = tuple[Any, torch.Tensor | None]  # images or `Prompts`, and labels
T = TypeVar("T")


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
        """Cut out a part of a batch; neighbours go to different parts."""
        return items[part :: self.parts]

    def check(self, count: int, batch: int, mixer: Mixer | None = None) -> None:
        """Refuse a batch that cannot be cut into equal parts, or whose parts would be odd and are mixed."""
        cut = f"batch_size={batch} in {self.parts} parts"
        if batch % self.parts:
            raise UsageError(f"{cut}; expected a multiple of {self.parts}")
        if self.parts > 1 and count < batch:
            raise UserError(f"{cut}, and only {count} images; expected a smaller batch")
        if mixer is not None:
            check_even(min(batch, count) // self.parts)


WHOLE = Share()


class Source(Protocol):
    """Batches by step number, the same ones whenever they are asked for."""

    per_epoch: int

    def check(self, share: Share) -> None:
        """Refuse what cannot be worked through in such parts, before anything is begun."""

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        """Yield the images (B, C, H, W) and labels of the steps from `first` up to `last`.

        Labels are class indices (B,), or the shares of the classes (B, classes) where images are mixed, or None.

        Of each step come the parts `share.mine`, one after another, each as a batch of its own.
        """


def chosen(count: int, batch: int, seed: int, step: int, repeats: int = 1) -> tuple[int, list[int], list[int]]:
    """Return the epoch of a step, the positions of its batch, and for each which copy of the image it is.

    Each epoch has a new order, in which an image comes `repeats` times in succession, as in timm's `RepeatAugSampler`;
    it ends after as many images as there are, without the last, smaller batch.
    """
    epoch, turn = divmod(step, max(1, count // batch))
    places = torch.arange(turn * batch, min((turn + 1) * batch, count))
    return epoch, order(count, seed, epoch)[places // repeats].tolist(), (places % repeats).tolist()


@lru_cache(maxsize=1)  # an epoch has many steps
def order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Draw the order (count,) in which an epoch goes through the images."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


class TensorSource:
    """Images (n, C, H, W) in memory, with labels (n,) or None, in an order that follows from the seed."""

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

    def of(self, images: Any) -> TensorSource:
        """Return the same batches of something else that is there of every image and can be indexed like them."""
        found = shallow(self)
        found.images = images
        return found

    def digest(self) -> str:
        """Return SHA-256 of the images and labels."""
        found = hashlib.sha256()
        for value in [self.images] if self.labels is None else [self.images, self.labels]:
            for part in value.split(1024):
                found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return found.hexdigest()

    def check(self, share: Share) -> None:
        share.check(len(self.images), self.batch, self.mixer)

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
        share.check(len(self.photos), self.batch, self.mixer)

    def keys(self, first: int, last: int) -> Iterator[list[Any]]:
        """Yield what to read in each step: positions with their epoch and copy, or the photos of a stream themselves,
        of which those before the first step are passed over.
        """
        found = self.photos.photos
        for step in range(first, last):
            if not isinstance(found, Stream):
                epoch, positions, copies = chosen(len(found), self.batch, self.seed, step, self.repeats)
                yield [(epoch, *place) for place in zip(positions, copies, strict=True)]
                continue
            turn = step % self.per_epoch
            if turn == 0 or step == first:
                photos = islice(self.epoch(found, step // self.per_epoch), turn * self.batch, None)
            yield list(islice(photos, self.batch))

    def epoch(self, stream: Stream, epoch: int) -> Iterator[Sent]:
        for position, photo in enumerate(stream.photos((self.seed, epoch))):
            for copy in range(self.repeats):
                yield Sent(photo, epoch, position, copy)

    def batches(self, first: int, last: int, share: Share = WHOLE) -> Iterator[Pair]:
        self.check(share)
        turns = ((step, part) for step in range(first, last) for part in share.mine)
        keys = (share.cut(whole, part) for whole in self.keys(first, last) for part in share.mine)
        loader = load(self.photos, keys, min(self.workers, (last - first) * len(share.mine)), self.pin)
        for (step, part), batch in zip(turns, loader, strict=True):
            if batch.bad:
                raise UserError(batch.bad[0])
            labels = batch.labels if self.labelled else None
            yield (batch.images, labels) if self.mixer is None else self.mixer(step, part, batch.images, labels)


class LoaderSource:
    """The user's own loader, gone through again and again.

    Args:
        loader: Of batches; see `pair_in`.
        prompts: Whether they are prompts with images.
    """

    def __init__(self, loader: Iterable[Any], prompts: bool = False) -> None:
        self.loader, self.prompts = loader, prompts
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
                images, labels = pair_in(item, self.prompts)
                if first <= step < last:
                    yield images, labels
                step += 1
                if step >= last:
                    return
            if step == before:
                raise UserError(f"the loader gave nothing after {step} batches; expected one that can be used again")


def pair_in(item: Any, prompts: bool = False) -> Pair:
    """Take the images and labels out of what a loader gives: images, (images, labels), or `pixel_values` and `labels`
    by name, as transformers has them; or, where they are `prompts`, tensors by name. Anything else is a UserError.
    """
    if prompts:
        if not isinstance(item, Mapping) or not all(isinstance(value, torch.Tensor) for value in item.values()):
            raise UserError(
                f"the loader gives a {type(item).__name__}; expected tensors by name, as the model's processor makes "
                'them with return_tensors="pt"'
            )
        return Prompts({name: value for name, value in item.items() if name != "labels"}), None
    images, labels = (*item, None, None)[:2] if isinstance(item, list | tuple) else (item, None)
    if isinstance(item, Mapping):
        images, labels = item.get("pixel_values", item), item.get("labels")
    if not isinstance(images, torch.Tensor):
        raise UserError(
            f"the loader gives a {type(images).__name__}; expected images, (images, labels), or pixel_values and "
            "labels by name"
        )
    return images, labels

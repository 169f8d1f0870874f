"""Reading photos in this process or in others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from tntprune.data.images import BadImage
from tntprune.data.photo import Photo, packed
from tntprune.data.streams import Stream
from tntprune.data.transforms import fixed_randomness
from tntprune.errors import UserError
from tntprune.system.distributed import count_of

SHARED = Path("/dev/shm")  # Linux's shared memory, also of locks


class Batch(NamedTuple):
    """What a loader of `Photos` yields: images (B, C, H, W) that could be read, their labels (B,), class indices or -1,
    their positions (B,) in the list of photos, and a line for each image that could not be read.
    """

    images: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    bad: list[str]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave a process that reads through shared memory, or through the pipe where that has no room (Docker gives it
        64 MB): torch itself would fail out of sight, and the reader would wait for good.
        """
        try:
            images: Any = self.images.share_memory_()
        except RuntimeError:
            images = self.images.numpy()
        return _arrived, (images, self.labels.numpy(), self.positions.numpy(), self.bad)


def _arrived(images: Any, labels: Any, positions: Any, bad: list[str]) -> Batch:
    return Batch(torch.as_tensor(images), torch.from_numpy(labels), torch.from_numpy(positions), bad)


class Sent(NamedTuple):
    """A photo that is sent to where it is read, with what its augmentation follows from."""

    photo: Photo
    epoch: int
    position: int
    copy: int


class Photos(Dataset[Any]):
    """Photos as the model wants them. One that cannot be read comes back as its `BadImage`, out of another process too.

    Items are asked for by position, by (epoch, position), by (epoch, position, copy), or by a photo that is `Sent`; the
    transform's random choices follow from the seed and from these, not from workers or from where a job was resumed.
    """

    def __init__(
        self,
        photos: Sequence[Photo] | Stream,
        transform: Callable[[Any], torch.Tensor],
        mode: Literal["RGB", "L"] = "RGB",
        seed: int = 0,
    ) -> None:
        self.photos = packed(photos) if isinstance(photos, Sequence) else photos
        self.transform, self.mode, self.seed = transform, mode, seed

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, key: int | tuple[int, ...] | Sent) -> tuple[torch.Tensor, int, int] | BadImage:
        try:
            if isinstance(key, Sent):
                photo, epoch, position, copy = key
            else:
                assert isinstance(self.photos, Sequence)  # those of a stream are sent
                epoch, position, copy = (*key, 0)[:3] if isinstance(key, tuple) else (0, key, 0)
                photo = self.photos[position]
            image = photo.read(self.mode)
        except BadImage as bad:
            return bad
        with fixed_randomness(self.seed, epoch, position, *((copy,) if copy else ())):
            return self.transform(image), photo.label, position


def collate(items: list[tuple[torch.Tensor, int, int] | BadImage]) -> Batch:
    """Make a batch of items of `Photos`."""
    good = [item for item in items if not isinstance(item, BadImage)]
    images = torch.stack([item[0] for item in good]) if good else torch.empty(0)
    labels, positions = (torch.tensor([item[i] for item in good], dtype=torch.long) for i in (1, 2))
    return Batch(images, labels, positions, [str(item) for item in items if isinstance(item, BadImage)])


def default_workers() -> int:
    """Count the processes that read images: half the processors, at most 8, shared with the other processes that
    torchrun or accelerate launch started on this machine.
    """
    return max(1, min(8, (os.cpu_count() or 2) // 2 // count_of("LOCAL_WORLD_SIZE")))


class InOrder:
    """A batch sampler that goes once through all photos in their order.

    Several processes share the batches, which are the same ones as in a single process; this one has the number `rank`.
    """

    def __init__(self, photos: Photos, batch: int, rank: int, size: int) -> None:
        self.photos, self.batch, self.rank, self.size = photos, batch, rank, size

    def __iter__(self) -> Iterator[list[Any]]:
        found = self.photos.photos
        keys: Iterator[Any] = iter(range(len(found)))
        if isinstance(found, Stream):
            keys = (Sent(photo, 0, position, 0) for position, photo in enumerate(found.photos()))
        return islice(iter(lambda: list(islice(keys, self.batch)), []), self.rank, None, self.size)

    def __len__(self) -> int:
        return len(range(self.rank, -(-len(self.photos) // self.batch), self.size))


def in_order(
    photos: Photos, batch: int, workers: int, rank: int = 0, size: int = 1, pin: bool = False
) -> DataLoader[Batch]:
    """Make a loader that goes once through all photos in their order; see `InOrder` and `load`."""
    sampler = InOrder(photos, batch, rank, size)
    return load(photos, sampler, min(workers, len(sampler)), pin)


def load(photos: Photos, batches: Iterable[list[Any]], workers: int, pin: bool = False) -> DataLoader[Batch]:
    """Make a loader of `Batch`es from the keys of each, with `workers` processes that read; 0 reads in this one.

    With `pin` batches are put where a CUDA device fetches them from without waiting.

    Raises:
        UserError: there is no room for the locks of so many processes, where torch would print a traceback.
    """
    if workers and SHARED.is_dir():  # other systems keep them elsewhere
        place = os.statvfs(SHARED)
        if place.f_bavail * place.f_frsize < (4 + workers) * 16384:  # measured: 33 kB, and 12 for each process
            raise UserError(
                f"{SHARED}: no room for {workers} processes that read photos; expected --workers 0, or more shared "
                "memory (docker run --shm-size 64m)"
            )
    return DataLoader(
        photos, batch_sampler=batches, num_workers=workers, collate_fn=collate, worker_init_fn=leave_signals,
        pin_memory=pin, generator=torch.Generator(),  # its own, so that the seed it draws is taken from no one
    )  # fmt: skip


def leave_signals(worker: int) -> None:
    """Leave Ctrl-C in a process that reads to the training, and let SIGTERM end it as if it had done its work;
    otherwise torch raises an error in the midst of what the training does, such as saving.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))

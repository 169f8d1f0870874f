"""In which order photos are read, in which parts, and by which processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader

from tntprune.data.folders import Batch, Photos, Sent, collate
from tntprune.data.streams import Stream
from tntprune.errors import UserError

T = TypeVar("T")
SHARED = Path("/dev/shm")  # Linux's shared memory, also of locks


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


class Keys:
    """A batch sampler of photos at hand: (epoch, position, copy), step by step, and part by part."""

    def __init__(self, count: int, batch: int, seed: int, first: int, last: int, share: Share, repeats: int) -> None:
        self.count, self.batch, self.seed, self.first, self.last = count, batch, seed, first, last
        self.share, self.repeats = share, repeats

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        for step in range(self.first, self.last):
            epoch, positions, copies = chosen(self.count, self.batch, self.seed, step, self.repeats)
            whole = [(epoch, position, copy) for position, copy in zip(positions, copies, strict=True)]
            for part in self.share.mine:
                yield self.share.cut(whole, part)


class StreamKeys:
    """A batch sampler of a stream: the photos themselves, step by step, and part by part.

    Every process goes through the same stream, and takes out of it what is its own. To begin in the middle of an epoch,
    what comes before is passed over.
    """

    def __init__(
        self, stream: Stream, batch: int, seed: int, first: int, last: int, share: Share, repeats: int
    ) -> None:
        self.stream, self.batch, self.seed, self.first, self.last = stream, batch, seed, first, last
        self.share, self.repeats = share, repeats

    def __iter__(self) -> Iterator[list[Sent]]:
        per_epoch = max(1, len(self.stream) // self.batch)
        photos: Iterator[Sent] = iter(())
        for step in range(self.first, self.last):
            epoch, turn = divmod(step, per_epoch)
            if turn == 0 or step == self.first:
                photos = islice(self.epoch(epoch), turn * self.batch, None)
            whole = list(islice(photos, self.batch))
            for part in self.share.mine:
                yield self.share.cut(whole, part)

    def epoch(self, epoch: int) -> Iterator[Sent]:
        """All photos of an epoch, each as many times as it is repeated."""
        for position, photo in enumerate(self.stream.photos((self.seed, epoch))):
            for copy in range(self.repeats):
                yield Sent(photo, epoch, position, copy)


class InOrder:
    """A batch sampler that goes once through all photos in their order.

    Several processes share the batches, which are the same ones as in a single process.

    Args:
        photos: What to read.
        batch: Photos at a time.
        rank: The number of this process.
        size: How many there are.
    """

    def __init__(self, photos: Photos, batch: int, rank: int, size: int) -> None:
        self.photos, self.batch, self.rank, self.size = photos, batch, rank, size

    def __iter__(self) -> Iterator[list[Any]]:
        found = self.photos.photos
        keys: Iterator[Any] = (
            (Sent(photo, 0, position, 0) for position, photo in enumerate(found.photos()))
            if isinstance(found, Stream)
            else iter(range(len(found)))
        )
        number = 0
        while batch := list(islice(keys, self.batch)):
            if number % self.size == self.rank:
                yield batch
            number += 1

    def __len__(self) -> int:
        batches = -(-len(self.photos) // self.batch)
        return len(range(self.rank, batches, self.size))


def in_order(
    photos: Photos, batch: int, workers: int, rank: int = 0, size: int = 1, pin: bool = False
) -> DataLoader[Batch]:
    """A loader that goes once through all photos in their order; see `InOrder` and `load`."""
    sampler = InOrder(photos, batch, rank, size)
    return load(photos, sampler, min(workers, len(sampler)), pin)


def load(photos: Photos, sampler: Any, workers: int, pin: bool = False) -> DataLoader[Batch]:
    """A loader of `Batch`es.

    Args:
        photos: What to read.
        sampler: Of the keys of each batch.
        workers: Processes that read; 0 reads in this one.
        pin: Put batches where a CUDA device fetches them from without waiting.

    Raises:
        UserError: there is no room for the locks of so many processes.
    """
    if workers:
        _check_room(workers)
    return DataLoader(
        photos, batch_sampler=sampler, num_workers=workers, collate_fn=collate, worker_init_fn=leave_signals,
        pin_memory=pin, generator=torch.Generator(),  # its own, so that the seed it draws is taken from no one
    )  # fmt: skip


def _check_room(workers: int) -> None:
    """Refuse processes that read where their locks find no room, for torch prints a traceback then."""
    if not SHARED.is_dir():
        return  # a system that keeps them elsewhere
    place = os.statvfs(SHARED)
    if place.f_bavail * place.f_frsize < (4 + workers) * 16384:  # measured: 33 kB, and 12 for each process
        raise UserError(
            f"{SHARED}: no room for {workers} processes that read photos; expected --workers 0, or more shared memory "
            "(docker run --shm-size 64m)"
        )


def leave_signals(worker: int) -> None:
    """For the processes that read: Ctrl-C is for the training to handle, and so is SIGTERM, which ends them as if they
    had done their work; otherwise torch raises an error in the midst of what the training does, such as saving.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))

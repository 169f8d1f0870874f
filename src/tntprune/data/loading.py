"""Reading photos in this process or in others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tntprune.data.folders import Batch, Photos, Sent, collate
from tntprune.data.streams import Stream
from tntprune.errors import UserError

SHARED = Path("/dev/shm")  # Linux's shared memory, also of locks


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

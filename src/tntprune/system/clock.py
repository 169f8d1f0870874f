"""Timing in turns, on a machine that somebody may be using."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

BUSY = 0.1  # processors that others may keep busy before it is told
LARGEST = 32 << 20  # bytes: the largest block that glibc's malloc learns to keep when it is given back


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Times(NamedTuple):
    """Milliseconds of a call: the median, what one in ten is faster and slower than, and all of them."""

    median: float
    p10: float
    p90: float
    all: tuple[float, ...]


def in_turns(
    calls: Sequence[Callable[[], Any]], rounds: int, device: torch.device, warmup: int = 2, progress: bool = True
) -> list[Times]:
    """Time calls against each other: all of them once a round, each round begun with another one.

    Whatever slows the machine down for a while then slows all of them down. See `keep_memory` for CPU.

    Args:
        calls: What to time.
        rounds: How often each is timed, at least 3.
        device: Waited for after every call.
        warmup: Rounds before that.
        progress: Show a bar.
    """
    keep_memory(device)
    spent: list[list[float]] = [[] for _ in calls]
    for number in tqdm(range(-warmup, rounds), desc="timing", unit="round", disable=not progress):
        for turn in range(len(calls)):
            which = (turn + number) % len(calls)
            wait(device)
            begin = time.perf_counter()
            calls[which]()
            wait(device)
            if number >= 0:
                spent[which].append(1000 * (time.perf_counter() - begin))
    return [summary(one) for one in spent]


def keep_memory(device: torch.device) -> None:
    """On CPU, have large tensors use memory that was given back before, for as long as this process lasts.

    glibc returns blocks to the system that are as large as the largest it has seen come back, and every page of the
    next one costs a fault: more for the unpruned model than for reduced ones, and now more and now less. One block of
    the largest size that it learns from teaches it to keep the smaller ones. Nothing changes where
    MALLOC_MMAP_THRESHOLD_ is set, or with another allocator.
    """
    if device.type == "cpu":
        torch.empty(LARGEST - (64 << 10), dtype=torch.uint8)


def summary(milliseconds: Sequence[float]) -> Times:
    """Return the median and the tenths at both ends."""
    tenths = quantiles(milliseconds, n=10, method="inclusive")
    return Times(tenths[4], tenths[0], tenths[8], tuple(milliseconds))


def peak_memory(call: Callable[[], Any], device: torch.device) -> int | None:
    """Return the most bytes that a call had allocated at a time, beside what was there before; None if it is not known.

    On CUDA the allocator tells; on CPU torch's profiler follows every allocation and release through one call.
    """
    if device.type == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _silence(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((int(event.nbytes()) for event in events), initial=0))


@contextmanager
def _silence() -> Iterator[None]:
    """Close standard error for a while: torch's profiler tells of every start and stop, past Python."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class Watch:
    """How many processors other programs keep busy while it is on: when times are taken, and not when one compiles."""

    def __init__(self) -> None:
        self.wall = self.used = 0.0
        self.told = True

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch for as long as the context lasts."""
        begin = self._now()
        yield
        end = self._now()
        if begin is None or end is None:
            self.told = False
        else:
            wall, used = (b - a for a, b in zip(begin, end, strict=True))
            self.wall, self.used = self.wall + wall, self.used + used

    def others(self) -> float | None:
        """Return how many processors somebody else used meanwhile, on average; None where it cannot be told."""
        return max(0.0, self.used / self.wall) if self.told and self.wall else None

    @staticmethod
    def _now() -> tuple[float, float] | None:
        """Read the clock, and the seconds of processors that others have used."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        ticks = [int(field) for field in fields]
        used = sum(ticks[:8]) - ticks[3] - ticks[4]  # all but idle and waiting for disks
        return time.perf_counter(), used / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def busy_line(others: float | None) -> str | None:
    """Return a line that warns of a busy machine, or None."""
    if others is None or others <= BUSY:
        return None
    return f"the machine was busy: other programs used {others:.1f} processors; take these times with care"

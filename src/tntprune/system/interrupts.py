"""Defer SIGINT and SIGTERM until the current step ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Yield a list that gets the number of the first such signal; at a second one the earlier Ctrl-C handler acts."""
    seen: list[int] = []
    interrupt = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        if not seen:
            seen.append(number)
        else:
            if callable(interrupt):
                signal.signal(signal.SIGINT, interrupt)
                interrupt(number, frame)  # raises KeyboardInterrupt
            raise KeyboardInterrupt

    try:
        old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals cannot be caught
        yield seen
        return
    try:
        yield seen
    finally:
        for number, handler in old.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)

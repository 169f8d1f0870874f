"""Ctrl-C and SIGTERM as something to ask about between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """A list that gets an entry at the first Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    try:
        old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals cannot be caught
        yield seen
        return
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)

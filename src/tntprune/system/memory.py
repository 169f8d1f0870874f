"""Errors that a lack of memory raises, of Python, numpy, torch and the processes that read photos."""

from __future__ import annotations

from collections.abc import Sequence

WORDS = ("not enough memory", "can't allocate memory", "out of memory", "unable to allocate", "bad_alloc")
KILLED = ("exited unexpectedly", "killed by signal")


def lack_of_memory(error: BaseException, flags: Sequence[str] = ()) -> str | None:
    """Describe an error that a lack of memory raised, with the flags to give smaller; return None for any other."""
    text = str(error).lower()
    less = f"smaller {' or '.join(flags)}" if flags else "a smaller input"
    if isinstance(error, MemoryError) or any(word in text for word in WORDS):
        return f"out of memory; expected {less}, or a machine with more memory"
    if "dataloader worker" in text and any(word in text for word in KILLED):
        return f"a process that reads photos was killed, perhaps for want of memory; expected {less}"
    return None

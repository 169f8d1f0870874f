"""Lines for a person: printable, short, and on standard error."""

from __future__ import annotations

import sys

LONGEST = 1000  # characters of a line


def printable(text: str) -> str:
    r"""Turn control characters, escape codes and bytes that are no text into escapes such as \n and \x1b."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Make a message printable, without the middle of what is longer than a thousand characters."""
    safe = printable(text)
    return safe if len(safe) <= LONGEST else f"{safe[: LONGEST // 2]} ... {safe[-LONGEST // 2 :]}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, of at most 200 characters; its name if it says nothing."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:197]}..."


def warn(text: str) -> None:
    """Print one line on standard error."""
    print(one_line(text), file=sys.stderr)

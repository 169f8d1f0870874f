"""Standard output and standard error: what the commands print."""

from __future__ import annotations

import io
import json as json_format
import os
import sys
from contextlib import suppress
from typing import Any

from tntprune.errors import UserError
from tntprune.system.messages import printable


def tell(json: bool, data: dict[str, Any], text: str) -> None:
    """Print one JSON object, or the text for a person.

    Raises:
        UserError: standard output cannot be written.
    """
    lines = json_format.dumps(data, default=str) if json else "\n".join(map(printable, text.split("\n")))
    try:
        print(lines, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        forget_output()
        raise UserError(f"standard output cannot be written ({error.strerror})") from None


def prepare_streams() -> None:
    r"""Make standard output and standard error take any text.

    A stream that was closed before we began (`>&-`) leads nowhere: Python has None in its place. A character that the
    locale cannot encode is written as an escape, such as \xe9.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def forget_output() -> None:
    """Let standard output lead nowhere, so that what could not be written does not fail once more at the end."""
    with suppress(OSError, ValueError):  # it may be closed, or no file at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

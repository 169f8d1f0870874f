"""The entry of the command line: the console script, and `python -m tntprune`, which torchrun starts.

Only Ctrl-C is dealt with here, and before anything else is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import Any

INTERRUPTED = 130  # 128 and the number of SIGINT, as in shells


def run() -> None:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGINT, _end)  # nothing has begun that would have to be cleaned up
    from tntprune.cli import main

    signal.signal(signal.SIGINT, partial(_interrupt, os.getpid()))
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and told
    sys.exit(code)


def _interrupt(process: int, number: int, frame: Any) -> None:
    """Interrupt the command at the first Ctrl-C, so that it cleans up; a second one ends it at once.

    Args:
        process: The id of the command's process. Its children inherit this handler; they end with it.
        number: Of the signal.
        frame: Where it arrived.
    """
    if os.getpid() != process:
        return
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


def _end(number: int, frame: Any) -> None:
    """End the process at once, with one line."""
    line = '{"error": "interrupted"}' if "--json" in sys.argv else "tntprune: interrupted"
    try:
        os.write(2, f"{line}\n".encode())
    finally:
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    run()

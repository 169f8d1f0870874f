"""The entry of the command line: the console script, and `python -m tntprune`, which torchrun starts.

Only Ctrl-C is dealt with here, and before anything else is imported.
"""

from __future__ import annotations

import os
import signal
import sys

from tntprune.errors import INTERRUPTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

COUNTING = ("info", "macs")  # commands that run no model
HELP = {"--help", "-h"}


def run() -> None:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGINT, _end)  # nothing has begun that would have to be cleaned up
    compiles = any(word.startswith("hf:") for word in sys.argv)  # transformers loads the compiler as well
    if not sys.argv[1:] or HELP & {*sys.argv} or (sys.argv[1] in COUNTING and not compiles):
        from tntprune.cli.lean import start_lean

        start_lean()
    from tntprune.cli.main import main

    signal.signal(signal.SIGINT, _interrupt_only(os.getpid()))
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and told
    if code == INTERRUPTED:
        sys.stdout.flush()
        os._exit(code)  # while Python ends, a second Ctrl-C would kill the process, with another code
    sys.exit(code)


def _interrupt_only(process: int) -> Callable[[int, object], None]:
    """Make a handler of Ctrl-C: the first one interrupts the command, so that it cleans up; a second ends it at once.

    Args:
        process: The id of the command's process. Its children inherit the handler and pass over Ctrl-C: they end with
            the command.
    """

    def interrupt(number: int, frame: object) -> None:
        if os.getpid() == process:
            signal.signal(signal.SIGINT, _end)
            raise KeyboardInterrupt

    return interrupt


def _end(number: int, frame: object) -> None:
    """End the process at once, with one line."""
    line = '{"error": "interrupted"}' if "--json" in sys.argv else "tntprune: interrupted"
    try:
        os.write(2, f"{line}\n".encode())
    finally:
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    run()

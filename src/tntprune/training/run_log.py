"""The log of a training: one JSON object a line, and TensorBoard's files beside it if they are wanted."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tntprune.errors import UserError
from tntprune.system.storage import write

LOG, BOARD = "log.jsonl", "tensorboard"
Line = dict[str, Any]


def read_log(out: Path) -> list[Line]:
    """The lines of a training's log; half a line, from a machine that lost power, is left out."""
    path = out / LOG
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if _step(line)]


@contextmanager
def open_log(out: Path, first: int, tensorboard: bool = False) -> Iterator[tuple[Callable[[Line], None], float]]:
    """What writes a line to the log, and the seconds that are in it; steps after the last checkpoint go from it.

    Nothing is buffered: a full disk is told by the write, and closing has nothing left to write.

    Args:
        out: The folder of the training.
        first: Steps that are done.
        tensorboard: Also write the numbers of each line for TensorBoard.

    Raises:
        UserError: it cannot be written, or TensorBoard is not installed.
    """
    board = _board(out, first) if tensorboard else None  # before there is a log, by which a training is known
    path = out / LOG
    kept: list[str] = []
    try:
        if path.exists():
            lines = path.read_text(errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if _step(line) in range(1, first + 1)]
            write(path, "".join(kept).encode())
        file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); expected a folder that can be written"
        ) from None

    def add(line: Line) -> None:
        data = (json.dumps(line) + "\n").encode()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); continue with --resume") from None
        for name, value in line.items():
            if board is not None and name not in ("step", "epoch", "seconds"):
                board.add_scalar(name, value, line["step"])

    with file:
        try:
            yield add, float(json.loads(kept[-1]).get("seconds", 0)) if kept else 0.0
        finally:
            if board is not None:
                board.close()


def _board(out: Path, first: int) -> Any:
    """TensorBoard's writer, which hides what was written after the last checkpoint."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tensorboard needs tensorboard; install it with: pip install 'tntprune[train]'") from None
    return SummaryWriter(str(out / BOARD), purge_step=first + 1)


def _step(line: str) -> int:
    """The step of a line; 0 of one that is no object of numbers, such as half a line from a machine that lost power."""
    try:
        found = json.loads(line)
        numbers = all(isinstance(value, int | float) for value in found.values())
        return int(found["step"]) if numbers and {"epoch", "seconds"} <= found.keys() else 0
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return 0

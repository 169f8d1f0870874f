"""Claim an output file before minutes of work."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tntprune.errors import UserError
from tntprune.system.storage import make_folder

LOCKS: Any = importlib.import_module("fcntl") if os.name == "posix" else None  # None: no such locks on this system


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Keep the name of an output file for this process, and know beforehand that it can be written.

    A hidden file beside it is locked meanwhile. If the process is killed, that file stays, but nobody holds its lock.

    Raises:
        UserError: the folder cannot be written, or another process has claimed the name.
    """
    make_folder(out.parent)
    path = out.with_name(f".{out.name}.lock")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"{out}: cannot be written ({error.strerror}); expected a name in a folder that can be written"
        ) from None
    try:
        _lock(file, path, out)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)  # and the lock goes with it


def _lock(file: int, path: Path, out: Path) -> None:
    if LOCKS is None:
        return
    try:
        LOCKS.flock(file, LOCKS.LOCK_EX | LOCKS.LOCK_NB)
        taken = os.fstat(file).st_nlink == 0  # the other process has ended and removed the file in between
    except BlockingIOError:
        taken = True
    except OSError:  # a disk without locks
        return
    if taken:
        raise UserError(f"{out}: another search writes it; wait for that one, or give another name")

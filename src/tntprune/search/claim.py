"""Claim an output file before minutes of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tntprune.errors import UserError
from tntprune.system.storage import make_folder


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
        path.touch()  # filelock takes some folders in which nothing can be made for a lock that is taken
        lock = FileLock(path, timeout=0).acquire()
    except Timeout:
        raise UserError(f"{out}: another search writes it; wait for that one, or give another name") from None
    except OSError as error:
        raise UserError(
            f"{out}: cannot be written ({error.strerror}); expected a name in a folder that can be written"
        ) from None
    with lock:
        try:
            yield
        finally:
            with suppress(OSError):  # Windows does not remove an open file
                path.unlink()

"""A results file that only grows: one line a row, whole or not at all, whoever is killed and whoever else writes."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tntprune.errors import UserError
from tntprune.sweep.results import Row
from tntprune.system.storage import find_target, sync_folder

LOCKS: Any = importlib.import_module("fcntl") if os.name == "posix" else None  # None: no such locks on this system
START = b'{"key": "'  # of every line
CHUNK = 1 << 16
WRITE = os.O_RDWR | os.O_APPEND | os.O_CREAT


class Ledger:
    """Rows in a file, each on a line of its own.

    A line is written at once, under a lock, and is on the disk when `add` returns. What is left of a write that was
    cut short is passed over in reading, and cut off before the next line is written. Several processes may write to
    the same file at the same time; where the system has no such locks (Windows), only one may.

    Args:
        path: The file; it is made by the first `add`.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def rows(self) -> dict[str, Row]:
        """The rows by their settings' keys, in the order in which these first appear; of each key the last line counts.

        Raises:
            UserError: the file cannot be read, or a line in it is not a row.
        """
        if not self.path.exists():
            return {}
        with self._open(os.O_RDONLY) as file:
            lines = _read(file).splitlines(keepends=True)
        if lines and _torn(lines[-1]):
            lines.pop()
        found: dict[str, Row] = {}
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("no end of line")
                row = Row.from_json(line.decode())
            except ValueError as error:
                raise UserError(
                    f"{self.path}: line {number} is not a row of results ({error}); expected a file that tntprune "
                    "sweep wrote, or one without that line"
                ) from None
            found[row.setting.key] = row
        return found

    def prepare(self) -> None:
        """Make the file if it is not there, and cut off what is not a whole line: to be refused before the work begins.

        Raises:
            UserError: it cannot be written, or something in it is no row.
        """
        self.rows()  # nothing is cut off what is no file of ours
        with self._open(WRITE) as file:
            self._repair(file)

    def add(self, row: Row) -> None:
        """Put a row at the end; it is on the disk when this returns.

        Raises:
            UserError: the disk is full or the file cannot be written, and what was there is still there; or the file
                ends in something that is no row.
        """
        line = row.to_json().encode() + b"\n"
        new = not self.path.exists()
        with self._open(WRITE) as file:
            end = self._repair(file)
            try:
                if os.write(file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file)
                if new:
                    sync_folder(find_target(self.path).parent)
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(file, end)
                raise UserError(
                    f"{self.path}: cannot be written ({error.strerror}); nothing that was there is lost, "
                    "make room and run the same again"
                ) from None

    def _repair(self, file: int) -> int:
        """Cut off a line that was not written to its end, and return where the file ends now."""
        end = os.fstat(file).st_size
        tail, begin = b"", end
        while begin > 0 and b"\n" not in tail[:-1]:
            step = min(CHUNK, begin)
            begin -= step
            os.lseek(file, begin, os.SEEK_SET)
            tail = os.read(file, step) + tail
        last = tail[tail[:-1].rfind(b"\n") + 1 :]  # with its end of line, if it has one
        if not last or (last.endswith(b"\n") and not _torn(last)):
            return end
        if not _torn(last):
            raise UserError(
                f"{self.path}: ends in {last[:30]!r}; expected a file that tntprune sweep wrote, or another --out"
            )
        os.ftruncate(file, end - len(last))
        return end - len(last)

    @contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        """The file, with nobody else writing to it."""
        find_target(self.path)  # a pipe would be waited for
        try:
            file = os.open(self.path, flags | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be opened ({error.strerror}); expected a file in a folder that can be written"
            ) from None
        try:
            if LOCKS is not None:
                _lock(file, self.path, LOCKS.LOCK_SH if flags == os.O_RDONLY else LOCKS.LOCK_EX)
            yield file
        finally:
            os.close(file)  # and the lock goes with it


def _lock(file: int, path: Path, kind: int) -> None:
    try:
        LOCKS.flock(file, kind)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be locked ({error.strerror}); expected a file on a disk that knows locks"
        ) from None


def _read(file: int) -> bytes:
    parts = []
    while part := os.read(file, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _torn(line: bytes) -> bool:
    """Whether a last line is the beginning of a row, or what a power cut leaves of one: zeros in the place of some."""
    written = line.partition(b"\0")[0]
    begins = written[: len(START)] == START[: len(written)]
    return begins and (written != line or not line.endswith(b"\n"))

"""A results file that only grows: one line a row, whole or not at all, whoever is killed and whoever else writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from filelock import FileLock

from tntprune.errors import UserError
from tntprune.sweep.results import ResultRow
from tntprune.system.storage import find_target, sync_folder

START = b'{"key": "'  # of every line


class ResultsFile:
    """Rows in a file, each on a line of its own.

    A line is written at once, under a lock, and is on the disk when `add` returns. What is left of a write that was
    cut short is passed over in reading, and cut off before the next line is written. Several processes may write to
    the same file at the same time; the lock is a hidden file beside it.

    Args:
        path: The file; it is made by the first `add`.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def rows(self) -> dict[str, ResultRow]:
        """Return rows by their settings' keys, in the order in which these first appear; of each the last line counts.

        Raises:
            UserError: the file cannot be read, or a line in it is not a row.
        """
        if not self.path.exists():
            return {}
        with self._open("rb") as file:
            lines = file.read().splitlines(keepends=True)
        if lines and _torn(lines[-1]):
            lines.pop()
        found: dict[str, ResultRow] = {}
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("no end of line")
                row = ResultRow.from_json(line.decode())
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
        with self._open("ab+") as file:
            self._repair(file)

    def add(self, row: ResultRow) -> None:
        """Put a row at the end; it is on the disk when this returns.

        Raises:
            UserError: the disk is full or the file cannot be written, and what was there is still there; or the file
                ends in something that is no row.
        """
        line = row.to_json().encode() + b"\n"
        new = not self.path.exists()
        with self._open("ab+") as file:
            end = self._repair(file)
            try:
                if os.write(file.fileno(), line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
                if new:
                    sync_folder(find_target(self.path).parent)
            except OSError as error:
                with suppress(OSError):
                    file.truncate(end)
                raise UserError(
                    f"{self.path}: cannot be written ({error.strerror}); nothing that was there is lost, "
                    "make room and run the same again"
                ) from None

    def _repair(self, file: FileIO) -> int:
        """Cut off a line that was not written to its end, and return where the file ends now."""
        file.seek(0)
        data = file.read()
        last = data[data[:-1].rfind(b"\n") + 1 :]  # with its end of line, if it has one
        if _torn(last):
            return file.truncate(len(data) - len(last))
        if last and not last.endswith(b"\n"):
            raise UserError(
                f"{self.path}: ends in {last[:30]!r}; expected a file that tntprune sweep wrote, or another --out"
            )
        return len(data)

    @contextmanager
    def _open(self, mode: str) -> Iterator[FileIO]:
        """Open the file; to write, with nobody else writing. A reader needs no lock: it leaves a torn last line out."""
        target = find_target(self.path)  # a pipe would be waited for
        try:
            file = FileIO(target, mode)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be opened ({error.strerror}); expected a file in a folder that can be written"
            ) from None
        lock = FileLock(target.with_name(f".{target.name}.lock"))
        with file:
            try:
                if mode != "rb":
                    lock.acquire()
            except OSError as error:
                raise UserError(
                    f"{self.path}: cannot be locked ({error.strerror}); expected a file on a disk that knows locks"
                ) from None
            try:
                yield file
            finally:
                lock.release()


def _torn(line: bytes) -> bool:
    """Return whether a last line is the beginning of a row, or what a power cut leaves of one: zeros in its place."""
    written = line.partition(b"\0")[0]
    begins = written[: len(START)] == START[: len(written)]
    return bool(line) and begins and (written != line or not line.endswith(b"\n"))

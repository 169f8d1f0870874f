"""Writing files so that nothing is ever half there, and reading weights so that no code in them runs."""

from __future__ import annotations

import glob
import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from tntprune.errors import UserError
from tntprune.system.messages import first_line

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"})
READ = SUFFIXES | {".tar"}  # what is read of a folder of photos
LOCK = ".lock"  # of a folder that one job at a time writes into


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, or raise a UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); expected a folder that can be written") from None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let no other job write into a folder at the same time; a UserError says that one does."""
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{folder}: another process writes here; wait for it, or give another --out") from None
    except OSError as error:
        told = f"cannot be written ({error.strerror}); expected a folder that can be written"
        raise UserError(f"{folder}: {told}") from None
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)
        lock.release()


def find_target(path: Path) -> Path:
    """Follow the links of a file that is to be written.

    Raises:
        UserError: what is there is no regular file: a folder, a device, a pipe, a socket, or links without an end.
    """
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target  # a new file, or one whose folder is told when it is written
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); expected a file") from None
    except ValueError as error:  # a NUL character
        raise UserError(f"{str(path)!r}: cannot be written ({error}); expected a file name") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device, pipe or socket"
        raise UserError(f"{path}: cannot be written ({kind}); expected the name of a file")
    return target


def check_output(path: Path, inputs: Iterable[Path | str | None] = ()) -> None:
    """Refuse a file that must not or cannot be written, before the work that ends with it.

    Raises:
        UserError: it is one of the inputs of that work or a photo in a folder among them, no regular file, or in a
            folder that cannot be written.
    """
    target = find_target(path)
    for given in inputs:
        if given is None:
            continue
        source = Path(os.path.realpath(given))
        photo = source in target.parents and target.suffix.lower() in READ and target.exists()
        if photo or source == target or (source.exists() and target.exists() and source.samefile(target)):
            raise UserError(f"{path}: is read too ({given}); expected another name, as no input is overwritten")
    above = next(folder for folder in target.parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{path}: cannot be written into {above}; expected a file in a folder that can be written")


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; see `write_by`."""
    write_by(path, lambda file: file.write(data))


def write_by(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write a file whole or not at all; where the path is a link, the file that it leads to.

    Args:
        path: The file.
        fill: Writes into it, as it is opened under a temporary name.

    Raises:
        UserError: the disk is full, the folder cannot be written, or what is there is no regular file; an older file of
            that name is left as it was.
    """
    target = find_target(path)
    try:
        _replace(target, fill)
        sync_folder(target.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); nothing that was there is lost") from None


def put(made: Path, path: Path) -> None:
    """Move a finished file to its place, atomically, also where a link leads to another disk.

    Raises:
        UserError: what is there is no regular file.
        OSError: it cannot be written.
    """
    target = find_target(path)
    if made.stat().st_dev == target.parent.stat().st_dev:
        os.replace(made, target)
        return
    with open(made, "rb") as source:
        _replace(target, lambda file: shutil.copyfileobj(source, file))


def _replace(target: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Put a new file, filled and synced under a temporary name, in another one's place, with its permissions."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process of the same number
        with open(temporary, "xb") as file:
            if os.name == "posix" and target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with suppress(OSError):  # nothing is left of it, or it could not even be opened
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync new names in a folder to the disk; not on Windows, where renaming is durable."""
    if os.name != "posix":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def forget_leftovers(path: Path) -> None:
    """Remove temporary files and folders beside a file of ours whose processes, which they name, run no more."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        number = left.name.removesuffix(".tmp").rpartition(".")[2]
        if number.isdecimal() and not _runs(int(number)):
            shutil.rmtree(left, ignore_errors=True)  # a folder
            with suppress(OSError):
                left.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    if os.name == "posix":
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            pass
    return True


def packed(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Make a safetensors file with its metadata in a fixed order: the same, byte for byte, whenever its content is."""
    data: bytes = save(tensors, metadata=metadata)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if metadata is not None:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def read_metadata(path: Path) -> dict[str, str]:
    """Read the text entries of a safetensors file; a UserError names one that is missing or broken."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a .safetensors file, or of a .pth, .pt or .bin that holds nothing but tensors.

    Of another program's checkpoint what lies under `model` or `state_dict` is taken.

    Raises:
        UserError: the file is missing, truncated, of another kind, holds code, or has values that are not finite.
    """
    if not path.is_file():
        raise UserError(
            f"{path}: {'not a file' if path.exists() else 'no such file'}; expected weights (.safetensors, .pth)"
        )
    try:
        safe = path.suffix.lower() == ".safetensors"
        loaded = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path}: holds more than tensors, or is broken, and was not loaded because it could run code; "
            "expected a .safetensors file"
        ) from None
    except Exception as error:  # torch.load fails in a dozen ways on broken files
        raise _unreadable(path, error) from None
    for name in ("model", "state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(name), dict):
            loaded = loaded[name]
    if not (isinstance(loaded, dict) and loaded and all(isinstance(v, torch.Tensor) for v in loaded.values())):
        raise UserError(f"{path}: no weights in it; expected tensors by name")
    check_finite(path, loaded)
    return dict(loaded)


def check_finite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Refuse tensors of a file with values that are not finite; a UserError names the first."""
    for name, value in tensors.items():
        try:
            if value.is_quantized:
                raise RuntimeError("quantized tensors")
            finite = not (value.is_floating_point() or value.is_complex()) or bool(value.isfinite().all())
        except RuntimeError as error:  # sparse, meta or 8-bit floats
            raise _unreadable(path, error) from None
        if not finite:
            raise UserError(f"{path}: {name} holds NaN or infinity; expected finite weights")


def check_fits(path: Path, tensors: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Refuse tensors whose values become others when they are copied into those that are wanted.

    Args:
        path: The file that they come from.
        tensors: Finite ones by name; names that are not wanted are passed over.
        wanted: What they are copied into, by name; on the meta device too.

    Raises:
        UserError: whole numbers, truth values or complex ones for floats, or values beyond the range of these.
    """
    for name, value in tensors.items():
        into = wanted.get(name)
        if into is None:
            continue
        if _kind(value) != _kind(into):
            raise UserError(f"{path}: {name} holds {_kind(value)} ({value.dtype}); expected {into.dtype}")
        if into.is_floating_point() and torch.finfo(value.dtype).max > torch.finfo(into.dtype).max:
            check_finite(path, {f"{name} as {into.dtype}": value.to(into.dtype)})


def _kind(value: torch.Tensor) -> str:
    if value.is_floating_point():
        return "floats"
    return "complex numbers" if value.is_complex() else "truth values" if value.dtype is torch.bool else "whole numbers"


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path}: cannot be read, broken or of another kind ({first_line(error)}); expected a .safetensors file"
    )

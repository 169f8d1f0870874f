"""Writing files so that nothing is ever half there, and reading weights so that no code in them runs."""

from __future__ import annotations

import glob
import json
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from tntprune.errors import UserError


def make_folder(folder: Path) -> None:
    """Make a folder and those above it.

    Raises:
        UserError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); expected a folder that can be written") from None


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: to a temporary name beside it, synced, and renamed.

    Raises:
        UserError: the disk is full or the folder cannot be written; an older file of that name is left as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if os.name != "posix":
            return  # elsewhere a folder cannot be opened, and renaming is durable
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); nothing that was there is lost") from None
    finally:
        with suppress(OSError):  # nothing is left of it, or it could not even be opened
            temporary.unlink(missing_ok=True)


def forget_leftovers(path: Path) -> None:
    """Remove temporary files and folders that killed processes left beside a file of ours.

    Their names hold the process's number; those of processes that still run stay.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        number = left.name.removesuffix(".tmp").rpartition(".")[2]
        if number.isdecimal() and not _runs(int(number)):
            shutil.rmtree(left, ignore_errors=True)  # a folder
            with suppress(OSError):
                left.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    """Return whether a process of that number exists; True where the system cannot tell."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def packed(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file that is the same, byte for byte, whenever its content is.

    The library itself writes the metadata in another order each time.
    """
    data: bytes = save(tensors, metadata=metadata)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if metadata is not None:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def read_metadata(path: Path) -> dict[str, str]:
    """The text entries of a safetensors file.

    Raises:
        UserError: it is missing or broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors file, or of a .pth, .pt or .bin that holds nothing but tensors.

    A checkpoint of a training is unwrapped: what lies under `model` or `state_dict` is taken.

    Raises:
        UserError: the file is missing, truncated, of another kind, holds code, or has values that are not finite.
    """
    if not path.is_file():
        raise UserError(
            f"{path}: {'not a file' if path.exists() else 'no such file'}; expected weights (.safetensors, .pth)"
        )
    try:
        loaded = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
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
    tensors = isinstance(loaded, dict) and loaded and all(isinstance(v, torch.Tensor) for v in loaded.values())
    if not tensors:
        raise UserError(f"{path}: no weights in it; expected tensors by name")
    check_finite(path, loaded)
    return dict(loaded)


def check_finite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Refuse tensors with values that are not finite.

    Raises:
        UserError: naming the file that they come from, and the first such tensor.
    """
    for name, value in tensors.items():
        try:
            finite = not value.is_floating_point() or bool(value.isfinite().all())
        except RuntimeError as error:  # sparse, meta or 8-bit floats
            raise _unreadable(path, error) from None
        if not finite:
            raise UserError(f"{path}: {name} holds NaN or infinity; expected finite weights")


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UserError(
        f"{path}: cannot be read, broken or of another kind ({reason[:120]}); expected a .safetensors file"
    )

"""What every file format is to the rest, and the quiet in which its exporter works."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from tntprune.errors import UsageError, UserError

DType = Literal["fp32", "fp16", "bf16", "int8"]
FORMATS = ("onnx", "openvino", "pt2")  # the files of this folder, and the names of the formats
INPUT, LOGITS, EMBEDDING, KEPT = "images", "logits", "embedding", "kept"  # names of a file's input and outputs

Runner = Callable[
    [torch.Tensor], list[torch.Tensor]
]  # images to logits (or the embedding) and, if the file has them, kept places


@dataclass(frozen=True)
class Job:
    """What is to be written.

    Args:
        program: The captured model, see `graph.capture`.
        file: Where to.
        dtype: What it is to compute in.
        batch: Images at a time, or None for any number.
        outputs: Names of the outputs.
        calibration: (n, C, H, W), what the ranges of int8 are measured on; None for every other dtype.
    """

    program: torch.export.ExportedProgram
    file: Path
    dtype: DType
    batch: int | None
    outputs: tuple[str, ...]
    calibration: torch.Tensor | None = None


class Format(ABC):
    """One file format and the runtime that reads it."""

    name: ClassVar[str]
    suffix: ClassVar[str]
    extra: ClassVar[str] = ""  # the extra of this package that brings the runtime
    needs: ClassVar[tuple[str, ...]] = ()  # what is imported
    dtypes: ClassVar[tuple[DType, ...]]
    refused: ClassVar[dict[str, str]] = {}  # why the other dtypes make no sense here, and what would do

    def model_dtype(self, dtype: DType) -> torch.dtype:
        """What the model is converted to before it is captured."""
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)

    @abstractmethod
    def write(self, job: Job) -> None:
        """Write the file, and what belongs to it beside it."""

    @abstractmethod
    def open(self, file: Path, dtype: DType, threads: int | None = None) -> Runner:
        """Load a file into its runtime, on the CPU.

        Args:
            file: The file.
            dtype: What it is to compute in, where the file itself does not say so.
            threads: How many the runtime may use; None for as many as torch does.
        """

    def about(self, dtype: DType) -> dict[str, Any]:
        """What somebody who runs the file has to know, beyond what is the same for every format."""
        return {}

    def check(self, dtype: str) -> None:
        """Refuse what cannot be written here.

        Raises:
            UsageError: the dtype makes no sense for this format.
            UserError: the packages that it takes are not installed.
        """
        if dtype not in self.dtypes:
            reason = self.refused.get(dtype, f"unknown dtype; expected {', '.join(self.dtypes)}")
            raise UsageError(f"{self.name} with {dtype}: {reason}")
        for package in self.needs:
            try:
                with quiet():
                    import_module(package)
            except ImportError as error:
                raise UserError(
                    f"{self.name} needs {package}, which cannot be imported ({first_line(error)}); "
                    f"pip install 'tntprune[{self.extra}]'"
                ) from None

    def versions(self) -> dict[str, str]:
        """Of everything that had a hand in it."""
        return {name: version(name) for name in ("torch", "timm", *self.needs)}


def find_format(name: str) -> Format:
    """A format by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; expected {', '.join(FORMATS)}")
    found: Format = import_module(f"tntprune.exporters.{name}").FORMAT
    return found


def first_line(error: BaseException) -> str:
    """What an exception says, in so many words."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Exporters talk on standard output, through logging, in warnings; here they do not. Errors are raised as ever."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), _silent_stderr():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Standard error of this process and of the C++ inside it, into nothing; and what C++ prints with it."""
    sys.stderr.flush()
    sys.stdout.flush()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    try:
        with open(os.devnull, "wb") as nothing:
            for fd in saved:
                os.dup2(nothing.fileno(), fd)
        yield
    finally:
        for fd, copy in saved.items():
            os.dup2(copy, fd)
            os.close(copy)

"""Writing a model as a file for another runtime, with what one has to know to run it beside it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import tntprune
from tntprune.analysis.macs import macs
from tntprune.backbones.attach import is_reduced, reduction_of
from tntprune.backbones.base import find_backbone, tower_of
from tntprune.backbones.reduced import Reduced
from tntprune.errors import UsageError, UserError
from tntprune.exporters.formats import INPUT, KEPT, Captured, DType, Format, Runner, find_format, quiet
from tntprune.exporters.graph import capture, exportable
from tntprune.exporters.samples import as_tensor, class_list, preprocessing
from tntprune.methods import to_dict
from tntprune.methods.base import Method
from tntprune.methods.checks import check_whole
from tntprune.system.messages import first_line
from tntprune.system.storage import check_output, find_target, forget_leftovers, make_folder, put, write


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path  # the file to give to the runtime
    files: tuple[Path, ...]  # all of them, the first one `path`, the last one the JSON beside it
    about: dict[str, Any]  # what the JSON says


def export(
    model: nn.Module,
    path: str | Path,
    to: Literal["onnx", "openvino", "pt2"] = "onnx",
    dtype: DType = "fp32",
    *,
    dynamic_batch: bool = False,
    indices: bool = False,
    batch_size: int = 1,
    calibration: str | Path | torch.Tensor | Iterable[Any] | None = None,
    calibration_size: int = 128,
    note: dict[str, Any] | None = None,
) -> Exported:
    """Write a model as a file for another runtime: input `images`, outputs `logits` and, if asked for, `kept`.

    A model without classes has the output `embedding` instead of `logits`. Beside the file goes FILE.json:
    preprocessing, class names, reduction, multiply-accumulates, versions. Everything is written whole or not at all.

    Args:
        model: A supported model in eval mode and in fp32, reduced or not; it stays as it is.
        path: The file: .onnx, .xml (for OpenVINO; a .bin goes beside it) or .pt2.
        to: The format.
        dtype: What it computes in. Images and logits are fp32 in any case, and scores are ranked in fp32.
        dynamic_batch: Any number of images at a time, instead of `batch_size`.
        indices: A second output, (B, n): the places in the original grid, row by row, of the tokens left at the end;
            -1 for a token that has none.
        batch_size: Images at a time.
        calibration: For int8: a folder of photos, images (n, C, H, W) as the model takes them, or batches of such.
        calibration_size: How many of them are used.
        note: More to keep in the JSON.

    Returns:
        What was written.

    Raises:
        UserError: the model cannot be exported, a package is missing, or the files cannot be written.
        UsageError: the format, the dtype or the combination does not exist, or `indices` are asked of a model whose
            last block computes no patch tokens.
    """
    form, path = find_format(to), Path(path)
    if path.suffix != form.suffix:
        raise UsageError(f"{path}: expected a file that ends in {form.suffix}, for format {to}")
    check_utf8(path)
    form.check(dtype)
    check_whole("batch_size", batch_size, 1)
    check_whole("calibration_size", calibration_size, 1)
    if dynamic_batch and batch_size != 1:
        raise UsageError(f"batch_size={batch_size} and dynamic_batch were both given; expected one of them")
    if dtype == "int8" and calibration is None:
        raise UsageError("int8 needs photos to measure ranges on; expected calibration (--data DIR)")
    for file in files(path, to):
        check_output(file)
    exportable(model)
    if indices and find_backbone(model).is_narrow(model):
        raise UsageError(
            "indices with last_block='prefix', which leaves no patch tokens at the end; expected one of the two"
        )
    if is_reduced(model):
        reduction_of(model).warn_uncalibrated()
    wanted = calibration if dtype == "int8" else None
    images = None if wanted is None else as_tensor(model, wanted, calibration_size, batch_size)
    graph = capture(model, form.casts[dtype], indices, None if dynamic_batch else batch_size)
    about = _about(model, form, dtype, graph, 0 if images is None else len(images))
    about |= {"file": path.name, **(note or {})}
    make_folder(path.parent)
    forget_leftovers(path)
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    make_folder(folder)
    try:
        if told := _lacking(path, graph, dtype):
            raise UserError(f"{path}: cannot be written ({told})")
        try:
            with quiet():
                form.write(graph, folder / path.name, dtype, images)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or first_line(error)})") from None
        except Exception as error:  # the exporters raise a dozen kinds, and not all name a full disk
            if told := _lacking(path, graph, dtype):
                raise UserError(f"{path}: cannot be written ({told})") from None
            raise UserError(f"{path}: {to} cannot hold this model ({first_line(_cause(error))})") from None
        write(folder / described(path).name, (json.dumps(about, indent=2, default=str) + "\n").encode())
        return Exported(path, _settle(folder, path), about)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def files(path: Path, to: str) -> list[Path]:
    """Return the files that an export writes."""
    return [path, *([path.with_suffix(".bin")] if to == "openvino" else []), described(path)]


def described(path: Path) -> Path:
    """Return where that lies what is to be known of a file."""
    return path.with_name(f"{path.name}.json")


def check_utf8(path: Path) -> None:
    """Refuse a name that the runtimes cannot open.

    Raises:
        UserError: the path is not UTF-8.
    """
    try:
        os.fsencode(path.absolute()).decode("utf-8")
    except UnicodeDecodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise UserError(f"{shown}: not UTF-8, and the runtimes cannot open such names; expected another name") from None


def _cause(error: BaseException) -> BaseException:
    """Return what an error came of in the first place."""
    return error if error.__cause__ is None else _cause(error.__cause__)


def _lacking(path: Path, graph: Captured, dtype: DType) -> str | None:
    """Say how much room the disk lacks for a file; None if it has enough for the weights."""
    whole = sum(value.nbytes for value in graph.program.state_dict.values())
    need = whole // {"fp32": 1, "int8": 4}.get(dtype, 2)  # at least: some formats convert before, some while they write
    free = shutil.disk_usage(path.parent).free
    return None if free >= need else f"no space left: {need / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free"


def reopen(path: str | Path, threads: int | None = None) -> tuple[Runner, dict[str, Any]]:
    """Load what `export` has written into its runtime, on the CPU.

    Args:
        path: The file; its JSON has to lie beside it.
        threads: How many the runtime may use; None for as many as torch does.

    Returns:
        A function from images, (B, C, H, W) in fp32, to logits and, if the file has them, kept places; and the JSON.

    Raises:
        UserError: it is missing or broken, or the runtime is not installed.
    """
    path = Path(path)
    try:
        about = json.loads(described(path).read_text())
        form, dtype = find_format(about["format"]), about["dtype"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{described(path)}: cannot be read ({first_line(error)}); expected what tntprune export wrote there"
        ) from None
    form.check(dtype)
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected what tntprune export wrote")
    try:
        with quiet():
            return form.open(path, dtype, threads or torch.get_num_threads()), about
    except Exception as error:  # whatever the runtimes raise on broken files
        raise UserError(f"{path}: {about['format']} cannot load it ({first_line(error)})") from None


def _about(model: nn.Module, form: Format, dtype: DType, graph: Captured, used: int) -> dict[str, Any]:
    tower = tower_of(model)
    first: int | str = graph.batch or "batch"  # of every shape
    results = next(node for node in graph.program.graph.nodes if node.op == "output").args[0]
    shapes = [[first, *map(int, node.meta["val"].shape[1:])] for node in results]
    kinds = {name: "int64" if name == KEPT else "float32" for name in graph.outputs}
    return {
        "tntprune": tntprune.__version__,
        "format": form.name,
        "dtype": dtype,
        **({"compile_with": {"INFERENCE_PRECISION_HINT": form.hints[dtype]}} if form.hints else {}),
        "inputs": [{"name": INPUT, "shape": [first, *find_backbone(model).input_size(model)], "dtype": "float32"}],
        "outputs": [{"name": n, "shape": s, "dtype": kinds[n]} for n, s in zip(graph.outputs, shapes, strict=True)],
        "batch": graph.batch or "dynamic",
        "preprocessing": preprocessing(model),
        "classes": class_list(model),
        "reduction": _in_force(tower.reduction) if isinstance(tower, Reduced) else None,
        "macs": macs(model).macs,
        "calibration_images": used,
        "versions": {name: version(name) for name in ("torch", "timm", *form.needs)},
    }


def _in_force(reduction: Method) -> dict[str, Any]:
    """Return a reduction's options, and the patch tokens that are left where some go, by block."""
    steps = reduction.steps(reduction.layout.patches)
    left = {} if reduction.config.variable else {"left": {f"{step.place}": step.leaving for step in steps}}
    last = {} if reduction.last_block == "all" else {"last_block": reduction.last_block}
    return {name: value for name, value in to_dict(reduction.config).items() if value is not None} | left | last


def _settle(folder: Path, path: Path) -> tuple[Path, ...]:
    """Move everything out of a temporary folder to where it belongs. The file that the runtime is given is the last one
    to come and, if there was an older one, the first one to go, so that it never stands beside what is not its own.
    """
    beside = sorted(file.name for file in folder.iterdir() if file.name != path.name)
    beside.sort(key=lambda name: name == described(path).name)  # the JSON last
    try:
        for file in folder.iterdir():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        find_target(path).unlink(missing_ok=True)
        for name in [*beside, path.name]:
            put(folder / name, path.parent / name)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return (path, *(path.parent / name for name in beside))

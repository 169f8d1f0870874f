"""The file formats and the runtimes that read them, and the quiet in which their exporters work."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch

from tntprune.errors import UsageError, UserError
from tntprune.exporters.quantise import quantise
from tntprune.system.messages import first_line

DType = Literal["fp32", "fp16", "bf16", "int8"]
INPUT, LOGITS, EMBEDDING, KEPT = "images", "logits", "embedding", "kept"  # names of a file's input and outputs
LARGE = 1_800_000_000  # bytes of weights; protobuf ends at 2 GiB, and beyond it they go into a file of their own

# images to logits (or the embedding) and, if the file has them, kept places
Runner = Callable[[torch.Tensor], list[torch.Tensor]]


class Captured(NamedTuple):
    """A model as a graph."""

    program: torch.export.ExportedProgram
    outputs: tuple[str, ...]  # their names
    batch: int | None  # images at a time, or None for any number


class Format(NamedTuple):
    """One file format and the runtime that reads it."""

    name: str  # also of the extra of this package that brings the runtime
    write: Callable[[Captured, Path, DType, torch.Tensor | None], None]  # with what int8 is calibrated on, (n, C, H, W)
    open: Callable[[Path, DType, int], Runner]  # with so many threads, on the CPU
    suffix: str
    casts: dict[str, torch.dtype]  # what it can compute in, and what the model is converted to before
    needs: tuple[str, ...]  # what is imported
    refused: dict[str, str]  # why other dtypes make no sense here, and what would do
    hints: dict[str, str]  # INFERENCE_PRECISION_HINT by dtype, where the runtime has to be told

    def check(self, dtype: str) -> None:
        """Refuse what cannot be written here.

        Raises:
            UsageError: the dtype makes no sense for this format.
            UserError: the packages that it takes are not installed.
        """
        if dtype not in self.casts:
            reason = self.refused.get(dtype, f"unknown dtype; expected {', '.join(self.casts)}")
            raise UsageError(f"{self.name} with {dtype}: {reason}")
        for package in self.needs:
            try:
                with quiet():
                    import_module(package)
            except ImportError as error:
                raise UserError(
                    f"{self.name} needs {package}, which cannot be imported ({first_line(error)}); "
                    f"pip install 'tntprune[{self.name}]'"
                ) from None


def find_format(name: str) -> Format:
    """Return a format by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; expected {', '.join(FORMATS)}")
    return FORMATS[name]


def _write_onnx(graph: Captured, file: Path, dtype: DType, calibration: torch.Tensor | None) -> None:
    size = sum(value.nbytes for value in graph.program.state_dict.values())
    if calibration is not None:
        if size > LARGE:
            raise UserError(
                f"{size / 1e9:.1f} GB of weights, int8 takes {LARGE / 1e9:.1f}; expected openvino with int8"
            )
        with TemporaryDirectory(dir=file.parent) as folder:
            whole = Path(folder, file.name)
            _write_onnx(graph, whole, "fp32", None)
            quantise(whole, file, calibration.split(graph.batch or 1))
        return
    own: dict[Any, Any] = {
        torch.ops.aten.sort.stable: _sort,
        torch.ops.aten.sort.default: lambda x, dim=-1, descending=False: _sort(x, dim=dim, descending=descending),
        torch.ops.aten.sigmoid.default: _sigmoid,
    }
    program = torch.onnx.export(
        graph.program, dynamo=True, input_names=[INPUT], output_names=list(graph.outputs), verbose=False,
        custom_translation_table=own,
    )  # fmt: skip
    assert program is not None
    made = program.model.graph
    inner = [*made.initializers.values(), *(value for node in made for value in node.outputs)]
    for value in inner:
        if value.name in graph.outputs and not value.is_graph_output():  # a table of positions is an "embedding" too
            value.name = f"{value.name}_inside"
    program.save(str(file), external_data=size > LARGE)


def _sort(values: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Sort with ONNX's TopK, where the lower index goes first among equals. K is a constant, as some runtimes want it;
    torch's own translation computes it, and there is none of a stable sort.
    """
    from onnxscript import opset18

    op: Any = opset18
    count = op.Constant(value_ints=[int(values.shape[dim])])
    return op.TopK(values, count, axis=dim, largest=int(descending), sorted=1)  # type: ignore[no-any-return]


def _sigmoid(values: Any) -> Any:
    """Spell it out: onnxruntime's own takes everything below -18 for -18, and A-ViT ranks by what lies there."""
    from onnxscript import opset18

    op: Any = opset18
    one = op.CastLike(op.Constant(value_float=1.0), values)
    return op.Reciprocal(op.Add(one, op.Exp(op.Neg(values))))


def _open_onnx(file: Path, dtype: DType, threads: int) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    if dtype == "int8":  # where there is no VNNI, sums of products overflow: multiply unsigned there, which is slower
        options.add_session_config_entry("session.x64quantprecision", "1")
    session: Any = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: [torch.from_numpy(out) for out in session.run(None, {INPUT: images.numpy()})]


def _write_openvino(graph: Captured, file: Path, dtype: DType, calibration: torch.Tensor | None) -> None:
    """Write a .xml with a .bin beside it.

    In bf16 scores are rounded too, unlike in the other formats. It was tried to keep them in fp32 (the runtime has a
    mark for that): of ViT-Tiny with half of its tokens the same ones were kept, for the tokens themselves are rounded
    before.
    """
    import openvino
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    decoder = TorchFXPythonDecoder.from_exported_program(graph.program)
    model = openvino.convert_model(decoder)
    channels, height, width = next(n.meta["val"].shape[1:] for n in graph.program.graph.nodes if n.name == INPUT)
    model.reshape([graph.batch or -1, channels, height, width])
    model.inputs[0].get_tensor().set_names({INPUT})
    for output, name in zip(model.outputs, graph.outputs, strict=True):
        output.get_tensor().set_names({name})
    if calibration is not None:
        model = _quantised(model, decoder.pt_module, calibration.split(graph.batch or 1))
    openvino.save_model(model, str(file), compress_to_fp16=dtype in ("fp16", "bf16"))


def _quantised(model: Any, traced: Any, batches: tuple[torch.Tensor, ...]) -> Any:
    """Quantise the matrix products; those that decide which tokens stay remain as they are."""
    import nncf

    scoring = set()  # names of torch's operations inside the reduction, with which OpenVINO's begin
    for node in traced.graph.nodes:
        stack = (node.meta.get("nn_module_stack") or {}).values()
        if any("reduction" in str(path).split(".") for path, _ in stack):
            scoring.add(node.name)
    types = ("MatMul", "Convolution", "Multiply", "Add")
    names = [op.get_friendly_name() for op in model.get_ops() if op.get_type_name() in types]
    return nncf.quantize(
        model, nncf.Dataset([part.numpy() for part in batches]), model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches), preset=nncf.QuantizationPreset.MIXED, fast_bias_correction=True,
        ignored_scope=nncf.IgnoredScope(names=[n for n in names if n.split("/")[0] in scoring], validate=False),
    )  # fmt: skip


def _open_openvino(file: Path, dtype: DType, threads: int) -> Runner:
    import openvino

    properties = {
        "INFERENCE_PRECISION_HINT": HINTS[dtype], "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads,
    }  # fmt: skip
    compiled: Any = openvino.Core().compile_model(str(file), "CPU", properties)
    request = compiled.create_infer_request()
    return lambda images: [torch.from_numpy(out.copy()) for out in request.infer({0: images.numpy()}).values()]


def _write_pt2(graph: Captured, file: Path, dtype: DType, calibration: torch.Tensor | None) -> None:
    package = io.BytesIO()  # torch's own writer ends the process when the disk is full
    torch.export.save(graph.program, package)
    file.write_bytes(package.getbuffer())


def _open_pt2(file: Path, dtype: DType, threads: int) -> Runner:
    program = torch.export.load(file).module()
    return torch.inference_mode()(lambda images: list(program(images)))


CASTS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HINTS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "bf16"}  # int8: what is not int8 there
FORMATS = {
    "onnx": Format(
        "onnx", _write_onnx, _open_onnx, ".onnx",
        {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.float32},
        ("onnx", "onnxscript", "onnxruntime"), {
            "bf16": "onnxruntime has no bf16 matrix product on the CPU; expected fp16, or openvino with bf16",
        }, {},
    ),
    "openvino": Format(
        "openvino", _write_openvino, _open_openvino, ".xml", dict.fromkeys(HINTS, torch.float32),  # it converts itself
        ("openvino", "nncf"), {}, HINTS,
    ),
    "pt2": Format(
        "pt2", _write_pt2, _open_pt2, ".pt2", CASTS, (),
        {"int8": "torch.export packages hold floating-point weights; expected onnx or openvino"}, {},
    ),
}  # fmt: skip


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep exporters from talking on standard output and error (past Python, too), through logging and in warnings.

    Errors are raised as ever.
    """
    before = logging.root.manager.disable
    sys.stderr.flush()
    sys.stdout.flush()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), open(os.devnull, "wb") as nothing:
            warnings.simplefilter("ignore")
            for fd in saved:
                os.dup2(nothing.fileno(), fd)
            yield
    finally:
        for fd, copy in saved.items():
            os.dup2(copy, fd)
            os.close(copy)
        logging.disable(before)

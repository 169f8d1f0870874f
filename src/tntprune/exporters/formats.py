"""The file formats and the runtimes that read them, and the quiet in which their exporters work."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from tntprune.errors import UsageError, UserError

DType = Literal["fp32", "fp16", "bf16", "int8"]
INPUT, LOGITS, EMBEDDING, KEPT = "images", "logits", "embedding", "kept"  # names of a file's input and outputs
LARGE = 1_800_000_000  # bytes of weights; protobuf ends at 2 GiB, and beyond it they go into a file of their own

# images to logits (or the embedding) and, if the file has them, kept places
Runner = Callable[[torch.Tensor], list[torch.Tensor]]


class Captured(NamedTuple):
    """A model as a graph.

    Args:
        program: Made by torch.export.
        outputs: Their names.
        batch: Images at a time, or None for any number.
    """

    program: torch.export.ExportedProgram
    outputs: tuple[str, ...]
    batch: int | None


class Format(ABC):
    """One file format and the runtime that reads it."""

    name: ClassVar[str]  # also of the extra of this package that brings the runtime
    suffix: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()  # what is imported
    casts: ClassVar[Mapping[str, torch.dtype]]  # what it can compute in, and what the model is converted to before
    refused: ClassVar[dict[str, str]] = {}  # why the other dtypes make no sense here, and what would do

    @abstractmethod
    def write(self, graph: Captured, file: Path, dtype: DType, calibration: torch.Tensor | None) -> None:
        """Write the file, and what belongs to it beside it.

        Args:
            graph: The model.
            file: Where to.
            dtype: What it is to compute in.
            calibration: (n, C, H, W), what the ranges of int8 are measured on; None for every other dtype.
        """

    @abstractmethod
    def open(self, file: Path, dtype: DType, threads: int) -> Runner:
        """Load a file into its runtime, on the CPU.

        Args:
            file: The file.
            dtype: What it is to compute in, where the file itself does not say so.
            threads: How many the runtime may use.
        """

    def about(self, dtype: DType) -> dict[str, Any]:
        """Return what somebody who runs the file has to know, beyond what is the same for every format."""
        return {}

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


class Onnx(Format):
    """ONNX, run by onnxruntime. fp16 is computed in where the provider can; scores are ranked in fp32 everywhere."""

    name, suffix, needs = "onnx", ".onnx", ("onnx", "onnxscript", "onnxruntime")
    casts: ClassVar = {"fp32": torch.float32, "fp16": torch.float16}
    refused: ClassVar = {
        "bf16": "onnxruntime has no bf16 matrix product on the CPU; expected fp16, or openvino with bf16",
        "int8": "onnxruntime is not what we quantise for; expected openvino with int8",
    }

    def write(self, graph: Captured, file: Path, dtype: DType, calibration: torch.Tensor | None) -> None:
        size = sum(value.nbytes for value in graph.program.state_dict.values())
        own: dict[Any, Any] = {
            torch.ops.aten.sort.stable: _sort,
            torch.ops.aten.sort.default: lambda x, dim=-1, descending=False: _sort(x, dim=dim, descending=descending),
            torch.ops.aten.sigmoid.default: _sigmoid,
        }
        torch.onnx.export(
            graph.program, f=str(file), dynamo=True, input_names=[INPUT], output_names=list(graph.outputs),
            external_data=size > LARGE, verbose=False, custom_translation_table=own,
        )  # fmt: skip

    def open(self, file: Path, dtype: DType, threads: int) -> Runner:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        session: Any = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return lambda images: [torch.from_numpy(out) for out in session.run(None, {INPUT: images.numpy()})]


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


class OpenVino(Format):
    """A .xml with a .bin beside it, with int8 by NNCF. What it computes in is told to the runtime when it is loaded.

    In bf16 scores are rounded too, unlike in the other formats. It was tried to keep them in fp32 (the runtime has a
    mark for that): of ViT-Tiny with half of its tokens the same ones were kept, for the tokens themselves are rounded
    before.
    """

    name, suffix, needs = "openvino", ".xml", ("openvino", "nncf")
    casts: ClassVar = dict.fromkeys(("fp32", "fp16", "bf16", "int8"), torch.float32)  # the runtime converts
    hints: ClassVar = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "bf16"}  # what is not int8 there

    def write(self, graph: Captured, file: Path, dtype: DType, calibration: torch.Tensor | None) -> None:
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

    def open(self, file: Path, dtype: DType, threads: int) -> Runner:
        import openvino

        properties = {
            "INFERENCE_PRECISION_HINT": self.hints[dtype], "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
        }  # fmt: skip
        compiled: Any = openvino.Core().compile_model(str(file), "CPU", properties)
        request = compiled.create_infer_request()
        return lambda images: [torch.from_numpy(out.copy()) for out in request.infer({0: images.numpy()}).values()]

    def about(self, dtype: DType) -> dict[str, Any]:
        return {"compile_with": {"INFERENCE_PRECISION_HINT": self.hints[dtype]}}


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


class Pt2(Format):
    """torch.export packages, run by torch, which can also compile them ahead of time (AOTInductor). Scores are ranked
    in fp32 whatever it computes in.
    """

    name, suffix = "pt2", ".pt2"
    casts: ClassVar = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    refused: ClassVar = {"int8": "torch.export packages hold floating-point weights; expected openvino with int8"}

    def write(self, graph: Captured, file: Path, dtype: DType, calibration: torch.Tensor | None) -> None:
        package = io.BytesIO()  # torch's own writer ends the process when the disk is full
        torch.export.save(graph.program, package)
        file.write_bytes(package.getbuffer())

    def open(self, file: Path, dtype: DType, threads: int) -> Runner:
        program = torch.export.load(file).module()
        return torch.inference_mode()(lambda images: list(program(images)))


FORMATS: dict[str, Format] = {form.name: form for form in (Onnx(), OpenVino(), Pt2())}


def find_format(name: str) -> Format:
    """Return a format by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; expected {', '.join(FORMATS)}")
    return FORMATS[name]


def first_line(error: BaseException) -> str:
    """Return what an exception says, in so many words."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


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

"""ONNX, run by onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from tntprune.exporters.base import INPUT, DType, Format, Job, Runner, quiet

LARGE = 1_800_000_000  # bytes of weights; protobuf ends at 2 GiB, and beyond it they go into a file of their own


class Onnx(Format):
    """fp16 computes in half precision where the provider can, and ranks scores in fp32 everywhere."""

    name = "onnx"
    suffix = ".onnx"
    extra = "onnx"
    needs = ("onnx", "onnxscript", "onnxruntime")
    dtypes: ClassVar[tuple[DType, ...]] = ("fp32", "fp16")
    refused: ClassVar = {
        "bf16": "onnxruntime has no bf16 matrix product on the CPU; expected fp16, or openvino with bf16",
        "int8": "onnxruntime is not what we quantise for; expected openvino with int8",
    }

    def write(self, job: Job) -> None:
        size = sum(value.nbytes for value in job.program.state_dict.values())
        with quiet():
            torch.onnx.export(
                job.program, f=str(job.file), dynamo=True, input_names=[INPUT], output_names=list(job.outputs),
                external_data=size > LARGE, verbose=False,
                custom_translation_table={
                    torch.ops.aten.sort.stable: _sort,
                    torch.ops.aten.sort.default: lambda values, dim=-1, descending=False: _sort(
                        values, dim=dim, descending=descending
                    ),
                    torch.ops.aten.sigmoid.default: _sigmoid,
                },
            )  # fmt: skip

    def open(self, file: Path, dtype: DType, threads: int | None = None) -> Runner:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 4
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
    """Spelled out: onnxruntime's own takes everything below -18 for -18, and A-ViT ranks by what lies there."""
    from onnxscript import opset18

    op: Any = opset18
    one = op.CastLike(op.Constant(value_float=1.0), values)
    return op.Reciprocal(op.Add(one, op.Exp(op.Neg(values))))


FORMAT = Onnx()

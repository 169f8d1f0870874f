"""OpenVINO, with int8 by NNCF.

In bf16 scores are rounded too, unlike in the other formats. It was tried to keep them in fp32 (the runtime has a mark
for that): of ViT-Tiny with half of its tokens the same ones were kept, for the tokens themselves are rounded before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from tntprune.exporters.base import INPUT, DType, Format, Job, Runner, quiet

HINTS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "bf16"}  # what is not int8 there


class OpenVino(Format):
    """A .xml with a .bin beside it. What it computes in is told to the runtime when it is loaded."""

    name = "openvino"
    suffix = ".xml"
    extra = "openvino"
    needs = ("openvino", "nncf")
    dtypes: ClassVar[tuple[DType, ...]] = ("fp32", "fp16", "bf16", "int8")

    def model_dtype(self, dtype: DType) -> torch.dtype:
        return torch.float32  # the runtime converts, when it knows the hardware

    def write(self, job: Job) -> None:
        with quiet():
            model, scoring = convert(job)
            if job.calibration is not None:
                model = quantised(model, scoring, job.calibration, job.batch)
            import openvino

            openvino.save_model(model, str(job.file), compress_to_fp16=job.dtype in ("fp16", "bf16"))

    def open(self, file: Path, dtype: DType, threads: int | None = None) -> Runner:
        import openvino

        properties = {
            "INFERENCE_PRECISION_HINT": HINTS[dtype], "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
        }  # fmt: skip
        with quiet():
            compiled: Any = openvino.Core().compile_model(str(file), "CPU", properties)
        request = compiled.create_infer_request()
        return lambda images: [torch.from_numpy(out.copy()) for out in request.infer({0: images.numpy()}).values()]

    def about(self, dtype: DType) -> dict[str, Any]:
        return {"compile_with": {"INFERENCE_PRECISION_HINT": HINTS[dtype]}}


def convert(job: Job) -> tuple[Any, set[str]]:
    """The captured program as an OpenVINO model, and the names of the operations that belong to the reduction."""
    import openvino
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    decoder = TorchFXPythonDecoder.from_exported_program(job.program)
    own = set()  # names of torch's operations, with which OpenVINO's begin
    for node in decoder.pt_module.graph.nodes:
        stack = (node.meta.get("nn_module_stack") or {}).values()
        if any("reduction" in str(path).split(".") for path, _ in stack):
            own.add(node.name)
    model = openvino.convert_model(decoder)
    channels, height, width = next(n.meta["val"].shape[1:] for n in job.program.graph.nodes if n.name == INPUT)
    model.reshape([-1 if job.batch is None else job.batch, channels, height, width])
    model.inputs[0].get_tensor().set_names({INPUT})
    for output, name in zip(model.outputs, job.outputs, strict=True):
        output.get_tensor().set_names({name})
    names = (node.get_friendly_name() for node in model.get_ops())
    return model, {name for name in names if name.split("/")[0] in own}


def quantised(model: Any, scoring: set[str], images: torch.Tensor, batch: int | None) -> Any:
    """int8 matrix products; those that decide which tokens stay remain as they are."""
    import nncf

    size = 1 if batch is None else batch
    samples = [part.numpy() for part in images.split(size)]  # each full, see `as_tensor`
    types = ("MatMul", "Convolution", "Multiply", "Add")
    ignored = [n.get_friendly_name() for n in model.get_ops() if n.get_type_name() in types]
    ignored = [name for name in ignored if name in scoring]
    return nncf.quantize(
        model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples),
        preset=nncf.QuantizationPreset.MIXED, fast_bias_correction=True,
        ignored_scope=nncf.IgnoredScope(names=ignored, validate=False),
    )  # fmt: skip


FORMAT = OpenVino()

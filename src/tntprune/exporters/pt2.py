"""torch.export packages, run by torch; they can also be compiled ahead of time by AOTInductor."""

from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar

import torch

from tntprune.exporters.base import DType, Format, Job, Runner, quiet


class Pt2(Format):
    """The program as it was captured; scores are ranked in fp32 whatever it computes in."""

    name = "pt2"
    suffix = ".pt2"
    dtypes: ClassVar[tuple[DType, ...]] = ("fp32", "fp16", "bf16")
    refused: ClassVar = {"int8": "torch.export packages hold floating-point weights; expected openvino with int8"}

    def write(self, job: Job) -> None:
        packed = io.BytesIO()  # torch's own writer ends the process when the disk is full
        with quiet():
            torch.export.save(job.program, packed)
        job.file.write_bytes(packed.getbuffer())

    def open(self, file: Path, dtype: DType, threads: int | None = None) -> Runner:
        with quiet():
            program = torch.export.load(file).module()

        @torch.inference_mode()
        def run(images: torch.Tensor) -> list[torch.Tensor]:
            return list(program(images))

        return run


FORMAT = Pt2()

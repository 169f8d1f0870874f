"""Benchmarks that can be believed: everything in one run, in turns, checked, and beside what it has to beat."""

from typing import Literal

Backend = Literal["eager", "compile", "cudagraphs"]
DType = Literal["fp32", "bf16", "fp16"]

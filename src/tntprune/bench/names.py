"""What a setting is made of, by name. Imports nothing, so that the command line can know them quickly."""

from typing import Literal

Backend = Literal["eager", "compile", "cudagraphs"]
DType = Literal["fp32", "bf16", "fp16"]

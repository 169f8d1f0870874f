"""Is a file of lower precision faster than one in fp32 on this processor? Both are timed in turns."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn

from tntprune.backbones.base import find_backbone
from tntprune.exporters.check import batches_of
from tntprune.exporters.export import export, reopen
from tntprune.system.clock import in_turns

ROUNDS = 20


class Pace(NamedTuple):
    """Times of a file and of the same model in fp32.

    Args:
        dtype: Of the file.
        ms: Milliseconds per batch, the median.
        fp32_ms: Milliseconds per batch of the file in fp32, the median.
        ratio: Times as fast as fp32, the median over the rounds.
    """

    dtype: str
    ms: float
    fp32_ms: float
    ratio: float

    @property
    def slower(self) -> bool:
        """Whether fp32 is the better choice on this processor."""
        return self.ratio < 1

    def __str__(self) -> str:
        told = (
            f"{self.dtype} takes {self.ms:.1f} ms per batch on this processor and fp32 {self.fp32_ms:.1f}, timed in "
            f"turns: {self.ratio:.2f} times as fast"
        )
        return f"{told}. {self.dtype} is slower than fp32 here: use --dtype fp32" if self.slower else told


def against_fp32(model: nn.Module, path: Path, about: dict[str, Any]) -> Pace:
    """Time a file in turns with the same model in the same format in fp32.

    Args:
        model: The model that was exported, in eval mode.
        path: The file that `export` wrote.
        about: What its JSON says.

    Raises:
        UserError: a file cannot be written, loaded or run.
    """
    batch = 1 if about["batch"] == "dynamic" else about["batch"]
    shape = find_backbone(model).input_size(model)
    noise = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
    (images,) = batches_of(noise, batch)
    with TemporaryDirectory() as folder:
        whole = Path(folder) / f"fp32{path.suffix}"
        export(model, whole, about["format"], "fp32", batch_size=batch, indices=len(about["outputs"]) > 1)
        calls = [partial(reopen(file)[0], images) for file in (path, whole)]
        own, fp32 = in_turns(calls, ROUNDS, images.device, progress=False)
    ratio = median(slow / fast for fast, slow in zip(own.all, fp32.all, strict=True))
    return Pace(about["dtype"], own.median, fp32.median, ratio)

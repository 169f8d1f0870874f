"""Time against the number of tokens: what any method can gain on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tntprune.backbones.attach import device_of
from tntprune.backbones.base import find_backbone, takes_images
from tntprune.bench import Backend, DType
from tntprune.bench.backends import DTYPES, check_same, check_settings, first_run, prepared
from tntprune.bench.benchmark import cast, inputs
from tntprune.bench.candidates import candidates
from tntprune.methods import Random
from tntprune.system.clock import in_turns


@dataclass(frozen=True)
class CurvePoint:
    """One number of tokens.

    Args:
        tokens: Patch tokens in every block.
        batch: Images at a time.
        dtype: Of weights and images.
        backend: eager, compile or cudagraphs.
        device: Where.
        median_ms: Of one forward pass.
        p10_ms: One pass in ten is faster.
        p90_ms: One pass in ten is slower.
        mac_share: Multiply-accumulates as a share of the unpruned model's.
        time_share: Time as a share of that with all tokens.
    """

    tokens: int
    batch: int
    dtype: str
    backend: str
    device: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    mac_share: float
    time_share: float


@torch.inference_mode()
def latency_curve(
    model: nn.Module,
    *,
    counts: Sequence[int] | None = None,
    batch_sizes: Sequence[int] = (1, 8),
    dtypes: Sequence[DType] = ("fp32",),
    backends: Sequence[Backend] = ("eager",),
    rounds: int = 20,
    progress: bool = True,
) -> list[CurvePoint]:
    """Time the model with fewer and fewer tokens in all its blocks, cut off before the first without any choosing.

    Args:
        model: In eval mode; a reduction that is on it is left out.
        counts: Patch tokens, to which all of them are added; by default every sixteenth of them less.
        batch_sizes: See `bench`.
        dtypes: See `bench`.
        backends: See `bench`.
        rounds: See `bench`.
        progress: Show bars.

    Raises:
        UsageError: as `bench`, or more tokens than the model has.
        UserError: the model does not compile, or gives something else when it is compiled.
    """
    device = device_of(model)
    check_settings(batch_sizes, dtypes, backends, rounds, device)
    patches = find_backbone(model).layout(model).patches
    chosen = sorted({*(counts or [max(1, round(patches * part / 16)) for part in range(1, 16)]), patches})
    points: list[CurvePoint] = []
    for dtype in dtypes:
        made = candidates(cast(model, dtype), [Random(at=0, tokens=count) for count in chosen])
        # the last one, with all tokens, has nothing to be cut off, and takes the same way through the same code
        sliced = [one for one in made if one.method == "bound"] + made[-1:]
        for batch in batch_sizes:
            images = inputs(model, None, batch).to(device, DTYPES[dtype])
            for backend in backends:
                calls: list[Any] = []
                for one in sliced:
                    run = prepared(one.model, backend)
                    check_same(first_run(run, images, backend), takes_images(one.model)(images), dtype)
                    calls.append(partial(run, images))
                times = in_turns(calls, rounds, device, progress=progress)
                whole = times[-1].median
                points += [
                    CurvePoint(
                        one.tokens[0], batch, dtype, backend, str(device), *spent[:3], mac_share=1 / one.mac_ratio,
                        time_share=spent.median / whole,
                    )
                    for one, spent in zip(sliced, times, strict=True)
                ]  # fmt: skip
                torch.compiler.reset()
    return points


def curve_table(points: Sequence[CurvePoint]) -> str:
    """Format the points for a person."""
    lines = [f"{'tokens':>6} {'batch':>5} {'dtype':>5} {'backend':10} {'ms':>8} {'MACs':>7} {'time':>7}"]
    for point in points:
        lines.append(
            f"{point.tokens:6} {point.batch:5} {point.dtype:>5} {point.backend:10} {point.median_ms:8.2f} "
            f"{100 * point.mac_share:5.1f} % {100 * point.time_share:5.1f} %"
        )
    return "\n".join(lines)

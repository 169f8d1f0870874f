"""The benchmark itself: check every setting, time all of them in turns, compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from tntprune.backbones.attach import device_of
from tntprune.backbones.base import find_backbone, takes_images
from tntprune.bench import Backend, DType
from tntprune.bench.backends import DTYPES, check_same, check_settings, first_run, prepared
from tntprune.bench.candidates import Candidate, candidates
from tntprune.bench.rows import BenchRow, Failure, paired, table, with_speedups
from tntprune.errors import UsageError, UserError
from tntprune.methods import Config
from tntprune.system.clock import Watch, busy_line, in_turns, peak_memory
from tntprune.system.environment import stamp


@dataclass(frozen=True)
class Benchmark:
    """What `bench` found.

    Args:
        stamp: Hardware, versions and date.
        rounds: How often each setting was timed.
        others: Processors that other programs used while times were taken; None where it cannot be told.
        results: One row for each setting.
        failed: Settings that were not timed, and why.
        notes: What a reader has to know.
    """

    stamp: str
    rounds: int
    others: float | None
    results: list[BenchRow]
    failed: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        failed = [
            f"not timed: {one.options or one.method}, batch {one.batch}, {one.dtype}, {one.backend}: {one.reason}"
            for one in self.failed
        ]
        lines = [table(self.results), "", *failed, *self.notes, f"{self.rounds} rounds in turns; {self.stamp}"]
        return "\n".join(lines).strip("\n")


def merged(found: Sequence[Benchmark]) -> Benchmark:
    """Join benchmarks of one model on several devices."""
    return Benchmark(
        stamp=" | ".join(dict.fromkeys(one.stamp for one in found)),
        rounds=found[0].rounds,
        others=max((one.others for one in found if one.others is not None), default=None),
        results=[row for one in found for row in one.results],
        failed=[failure for one in found for failure in one.failed],
        notes=list(dict.fromkeys(note for one in found for note in one.notes)),
    )


class _Setting(NamedTuple):
    """What is timed: the number of its candidate, a call, and the row without times."""

    number: int
    call: Callable[[], Any]
    row: BenchRow


def bench(
    model: nn.Module,
    configs: Sequence[Config],
    *,
    reduced: Sequence[nn.Module] = (),
    batch_sizes: Sequence[int] = (1, 8),
    dtypes: Sequence[DType] = ("fp32",),
    backends: Sequence[Backend] = ("eager",),
    rounds: int = 20,
    images: torch.Tensor | None = None,
    last_block: str | None = None,
    progress: bool = True,
) -> Benchmark:
    """Time reductions of a model, each in every setting, beside the unpruned model, the bound and random drop.

    Args:
        model: In eval mode, on the device to measure. A reduction that is on it is left out.
        configs: What to time. What a method has learned does not change its time, unless the number of tokens differs
            from image to image.
        reduced: Models of the same shape that are reduced already, such as trained ones.
        batch_sizes: Images at a time.
        dtypes: Of weights and images.
        backends: How to run: eagerly, compiled, compiled with CUDA graphs (on a GPU).
        rounds: How often each setting is timed, at least 3.
        images: (n, C, H, W), repeated or cut to each batch size; random ones of the model's own size by default.
        last_block: Of the configs and their bounds, see `tntprune.reduce_`.
        progress: Show bars.

    Raises:
        UsageError: a setting that there is not, or none, or a backend that the device does not have.
        UserError: a config does not fit, or nothing could be timed.
    """
    device = device_of(model)
    check_settings(batch_sizes, dtypes, backends, rounds, device)
    if images is not None and not len(images):
        raise UsageError("images: none given; expected at least one")
    watch, rows, failed = Watch(), list[BenchRow](), list[Failure]()
    for dtype in dtypes:
        made = candidates(cast(model, dtype), configs, [cast(one, dtype) for one in reduced], last_block)
        for batch in batch_sizes:
            given = inputs(model, images, batch).to(device, DTYPES[dtype])
            settings = _checked(made, given, backends, dtype, failed, progress)
            with torch.inference_mode(), watch.on():
                times = in_turns([one.call for one in settings], rounds, device, progress=progress)
            fresh = {}
            for (number, _, row), spent in zip(settings, times, strict=True):
                fresh[number, row.backend] = replace(
                    row, median_ms=spent.median, p10_ms=spent.p10, p90_ms=spent.p90,
                    images_per_s=1000 * batch / spent.median, rounds_ms=spent.all,
                )  # fmt: skip
            for (number, backend), row in fresh.items():
                own = made[number].bound
                bound = None if own is None else fresh.get((own, backend))
                rows.append(row if bound is None else replace(row, bound_ratio=paired(bound, row)))
            settings.clear()
            torch.compiler.reset()  # what was compiled for this batch size is of no more use
    others = watch.others()
    rows, notes = with_speedups(rows)
    if (line := busy_line(others)) is not None:
        notes.append(line)
    if any(row.variable for row in rows):
        notes.append("> the number of tokens differs from image to image, and the time with it")
    if not rows:
        raise UserError(f"nothing could be timed: {failed[0].reason}")
    return Benchmark(stamp(device), rounds, others, rows, failed, notes)


def cast(model: nn.Module, dtype: str) -> nn.Module:
    """Return a copy of a model with weights of another precision, in eval mode."""
    return copy.deepcopy(model).eval().requires_grad_(False).to(DTYPES[dtype])


def inputs(model: Any, images: torch.Tensor | None, batch: int) -> torch.Tensor:
    """Return a batch, (batch, C, H, W), of given images or of random ones of the model's own size."""
    if images is None:
        shape = find_backbone(model).input_size(model)
        images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
    return images.repeat(-(-batch // len(images)), 1, 1, 1)[:batch].contiguous()


@torch.inference_mode()
def _checked(
    made: Sequence[Candidate], images: torch.Tensor, backends: Sequence[Backend], dtype: str,
    failed: list[Failure], progress: bool,
) -> list[_Setting]:  # fmt: skip
    """Return every setting, compiled where it has to be, and found to give what the eager model gives."""
    settings = []
    device = images.device
    bar = tqdm(total=len(made) * len(backends), desc=f"checking {dtype}, batch {len(images)}", disable=not progress)
    with bar:
        for number, one in enumerate(made):
            expected = takes_images(one.model)(images)
            for backend in backends:
                run = prepared(one.model, backend)
                call, where = partial(run, images), (len(images), dtype, backend, str(device))
                try:
                    difference = check_same(first_run(run, images, backend), expected, dtype)
                except (UserError, torch.OutOfMemoryError) as error:
                    failed.append(Failure(one.method, one.options, *where, str(error).split("\n")[0]))
                else:
                    # a CUDA graph has its memory before it is called, and would seem to need none
                    peak = None if backend == "cudagraphs" else peak_memory(call, device)
                    row = BenchRow(
                        one.method, one.options, one.keep, *where, 0.0, 0.0, 0.0, 0.0, one.mac_ratio,
                        peak_mib=None if peak is None else peak / 2**20, difference=difference, variable=one.variable,
                    )  # fmt: skip
                    settings.append(_Setting(number, call, row))
                bar.update()
    return settings

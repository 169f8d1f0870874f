"""The benchmark itself: check every setting, time all of them in turns, compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from tntprune.backbones.attach import device_of
from tntprune.backbones.base import find_backbone
from tntprune.bench.backends import (
    DTYPES,
    check_same,
    check_settings,
    first_run,
    prepared,
)
from tntprune.bench.candidates import Candidate, candidates
from tntprune.bench.names import Backend, DType
from tntprune.bench.rows import Failure, Row, paired, table, with_speedups
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
    results: list[Row]
    failed: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [table(self.results), ""]
        parts += [f"not timed: {f.options or f.method}, batch {f.batch}, {f.dtype}, {f.backend}: {f.reason}"
                  for f in self.failed]  # fmt: skip
        parts += self.notes
        parts.append(f"{self.rounds} rounds in turns; {self.stamp}")
        return "\n".join(parts).strip("\n")


def merged(found: Sequence[Benchmark]) -> Benchmark:
    """Benchmarks of one model on several devices as one."""
    others = [one.others for one in found if one.others is not None]
    return Benchmark(
        stamp=" | ".join(dict.fromkeys(one.stamp for one in found)),
        rounds=found[0].rounds,
        others=max(others, default=None),
        results=[row for one in found for row in one.results],
        failed=[failure for one in found for failure in one.failed],
        notes=list(dict.fromkeys(note for one in found for note in one.notes)),
    )


@dataclass(frozen=True)
class _Setting:
    candidate: Candidate
    number: int
    backend: Backend
    dtype: str
    batch: int
    call: Callable[[], Any]
    difference: float
    peak: int | None


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
    progress: bool = True,
) -> Benchmark:
    """Time reductions of a model, each in every setting, beside the unpruned model, the oracle and random drop.

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
        progress: Show bars.

    Raises:
        UsageError: a setting that there is not, or none, or a backend that the device does not have.
        UserError: a config does not fit, or nothing could be timed.
    """
    device = device_of(model)
    check_settings(batch_sizes, dtypes, backends, rounds, device)
    if images is not None and not len(images):
        raise UsageError("images: none given; expected at least one")
    watch = Watch()
    rows: list[Row] = []
    failed: list[Failure] = []
    for dtype in dtypes:
        made = candidates(cast(model, dtype), configs, [cast(one, dtype) for one in reduced])
        for batch in batch_sizes:
            given = inputs(model, images, batch).to(device, DTYPES[dtype])
            settings = _checked(made, given, backends, dtype, failed, progress)
            with torch.inference_mode(), watch.on():
                times = in_turns([one.call for one in settings], rounds, device, progress=progress)
            fresh = [_row(one, spent, device) for one, spent in zip(settings, times, strict=True)]
            rows += _with_oracles(fresh, settings)
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
    """A copy of a model with weights of another precision, in eval mode."""
    return copy.deepcopy(model).eval().requires_grad_(False).to(DTYPES[dtype])


def inputs(model: Any, images: torch.Tensor | None, batch: int) -> torch.Tensor:
    """A batch, (batch, C, H, W), of given images or of random ones of the model's own size."""
    if images is None:
        shape = find_backbone(model).input_size(model)
        images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
    return images.repeat(-(-batch // len(images)), 1, 1, 1)[:batch].contiguous()  # (batch, C, H, W)


@torch.inference_mode()
def _checked(
    made: Sequence[Candidate], images: torch.Tensor, backends: Sequence[Backend], dtype: str,
    failed: list[Failure], progress: bool,
) -> list[_Setting]:  # fmt: skip
    """Every setting, compiled where it has to be, and found to give what the eager model gives."""
    settings = []
    device = images.device
    bar = tqdm(total=len(made) * len(backends), desc=f"checking {dtype}, batch {len(images)}", disable=not progress)
    with bar:
        for number, candidate in enumerate(made):
            expected = candidate.model(images)
            for backend in backends:
                run = prepared(candidate.model, backend)
                call = partial(run, images)
                try:
                    found = check_same(first_run(run, images, backend), expected, dtype)
                except (UserError, torch.OutOfMemoryError) as error:
                    where = (len(images), dtype, backend, str(device))
                    failed.append(Failure(candidate.method, candidate.options, *where, str(error).split("\n")[0]))
                else:
                    # a CUDA graph has its memory before it is called, and would seem to need none
                    peak = None if backend == "cudagraphs" else peak_memory(call, device)
                    settings.append(_Setting(candidate, number, backend, dtype, len(images), call, found, peak))
                bar.update()
    return settings


def _row(setting: _Setting, times: Any, device: torch.device) -> Row:
    candidate = setting.candidate
    return Row(
        candidate.method, candidate.options, candidate.keep, setting.batch, setting.dtype, setting.backend, str(device),
        *(times.median, times.p10, times.p90), 1000 * setting.batch / times.median, candidate.mac_ratio,
        peak_mib=None if setting.peak is None else setting.peak / 2**20,
        difference=setting.difference, variable=candidate.variable, rounds_ms=times.all,
    )  # fmt: skip


def _with_oracles(rows: list[Row], settings: list[_Setting]) -> list[Row]:
    known = {(one.number, one.backend): row for one, row in zip(settings, rows, strict=True)}
    found = []
    for one, row in zip(settings, rows, strict=True):
        oracle = None if one.candidate.oracle is None else known.get((one.candidate.oracle, one.backend))
        found.append(row if oracle is None else replace(row, oracle_ratio=paired(oracle, row)))
    return found

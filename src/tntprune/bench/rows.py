"""What a benchmark found, and what may be compared with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import Any

from tntprune.bench.candidates import BESIDE
from tntprune.errors import UserError


@dataclass(frozen=True)
class BenchRow:
    """One setting.

    Args:
        method: "unpruned", "bound", "random" or a method's name.
        options: The method and its options, as one line; of the method whose counts they share for bound and random.
        keep: The share that stays at each location; None where the method has no such option.
        batch: Images at a time.
        dtype: Of weights and images.
        backend: eager, compile or cudagraphs.
        device: Where.
        median_ms: Of one forward pass.
        p10_ms: One pass in ten is faster.
        p90_ms: One pass in ten is slower.
        images_per_s: From the median.
        mac_ratio: The unpruned model's multiply-accumulates over this one's.
        speedup: How many times as fast as the fastest unpruned model of the same batch, dtype and device; the median
            over the rounds, each compared with itself. None where there is nothing to compare with.
        against: The backend of that unpruned model.
        bound_ratio: How near the bound's speed in the same backend, likewise; 1 is the limit.
        peak_mib: Memory that a pass needs beside weights and images, or None where it cannot be measured.
        difference: From the eager model's output: the root mean square of it, as a share of the output's own.
        variable: Whether the number of tokens differs from image to image: then the time depends on the images,
            `mac_ratio` is the least it can be, and the bound cuts off fewer tokens than the method may.
        rounds_ms: Of every pass, round by round.
    """

    method: str
    options: str
    keep: float | tuple[float, ...] | None
    batch: int
    dtype: str
    backend: str
    device: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    images_per_s: float
    mac_ratio: float
    speedup: float | None = None
    against: str | None = None
    bound_ratio: float | None = None
    peak_mib: float | None = None
    difference: float = 0.0
    variable: bool = False
    rounds_ms: tuple[float, ...] = ()

    @classmethod
    def read(cls, row: dict[str, Any]) -> BenchRow:
        """Return a row from JSON, also from the time when the bound was called the oracle."""
        row = {name.replace("oracle", "bound"): value for name, value in row.items()}
        method = "bound" if row["method"] == "oracle" else row["method"]
        keep = tuple(row["keep"]) if isinstance(row["keep"], list) else row["keep"]
        return cls(**{**row, "method": method, "keep": keep, "rounds_ms": tuple(row["rounds_ms"])})


@dataclass(frozen=True)
class Failure:
    """A setting that was not timed, and why."""

    method: str
    options: str
    batch: int
    dtype: str
    backend: str
    device: str
    reason: str


def speedup(row: BenchRow, base: BenchRow) -> float:
    """Return how many times as fast as an unpruned model a row is.

    Raises:
        UserError: they differ in dtype, device or batch size, so that the ratio would say nothing of the pruning.
    """
    if base.method != "unpruned":
        raise UserError(f"a speed-up against {base.method}; expected the unpruned model")
    for name in ("dtype", "device", "batch"):
        if getattr(row, name) != getattr(base, name):
            raise UserError(
                f"a speed-up between {name} {getattr(base, name)} and {getattr(row, name)} would not be the "
                f"pruning's; expected an unpruned model with {name} {getattr(row, name)}"
            )
    return paired(base, row)


def paired(other: BenchRow, row: BenchRow) -> float:
    """Return how many times as long the other one took, in the median round.

    What slows the machine down for a while slows both down, so that this scatters less than a ratio of two medians.
    """
    return median(theirs / ours for theirs, ours in zip(other.rounds_ms, row.rounds_ms, strict=True))


def with_speedups(rows: Sequence[BenchRow]) -> tuple[list[BenchRow], list[str]]:
    """Return each row with its speed-up against the fastest unpruned setting of its batch, dtype and device.

    A row gets none where the unpruned model was not timed in the row's own backend: a compiled reduction is not
    compared with a model that was only run eagerly.

    Returns:
        The rows, and a line for each set of rows that got no speed-up.
    """
    found, refused = [], {}
    for row in rows:
        setting = (row.batch, row.dtype, row.device)
        same = [one for one in rows if one.method == "unpruned" and (one.batch, one.dtype, one.device) == setting]
        if any(base.backend == row.backend for base in same):
            base = min(same, key=lambda one: one.median_ms)
            row = replace(row, speedup=speedup(row, base), against=base.backend)
        else:
            where = f"{row.dtype}, batch {row.batch}, {row.backend}"
            refused[where] = f"no speed-up for {where}: the unpruned model was not timed there"
        found.append(row)
    return found, list(refused.values())


HEAD = (
    f"{'':34} {'backend':10} {'ms':>8} {'p10':>8} {'p90':>8} {'images/s':>9} {'MACs':>7} {'speed-up':>8} "
    f"{'of bound':>8} {'peak MiB':>8}"
)


def table(rows: Sequence[BenchRow]) -> str:
    """Format the rows for a person, one table for each batch size, dtype and device."""
    lines = []
    for (batch, dtype, device), group in groupby(rows, key=lambda row: (row.batch, row.dtype, row.device)):
        lines += ["", f"batch {batch}, {dtype}, {device}", HEAD]
        for row in group:
            name = f"  {row.method}" if row.method in BESIDE else row.options or row.method
            lines += [name] if len(name) > 34 else []
            ratio = "" if row.method == "unpruned" else f"{'<' if row.variable else ''}1/{row.mac_ratio:.2f}"
            faster = "-" if row.speedup is None else f"{row.speedup:.2f}x"
            bound = "" if row.bound_ratio is None else f"{100 * row.bound_ratio:.1f} %"
            memory = "" if row.peak_mib is None else f"{row.peak_mib:.0f}"
            lines.append(
                f"{'' if len(name) > 34 else name:34} {row.backend:10} {row.median_ms:8.2f} {row.p10_ms:8.2f} "
                f"{row.p90_ms:8.2f} {row.images_per_s:9.1f} {ratio:>7} {faster:>8} {bound:>8} {memory:>8}".rstrip()
            )
    return "\n".join(lines[1:])

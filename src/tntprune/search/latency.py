"""A curve of time against tokens, and what it says of a schedule: pure numbers, nothing is run."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tntprune.backbones.attach import base_of, device_of
from tntprune.backbones.base import find_backbone
from tntprune.errors import UsageError, UserError
from tntprune.methods import Config, options
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import Step, counts
from tntprune.serialization.fingerprint import identity
from tntprune.system.environment import surroundings
from tntprune.system.storage import write

VERSION = 2  # raised when a field changes its meaning
MARGIN = 0.03  # by which a number of tokens has to be slower than a larger one to be told
FREE = {  # options that change how many tokens go and where, which ones, or how a method learns, and no step's time
    "at", "keep", "tokens", "r", "decreasing", "similar", "order", "noise_blocks", "noise_at", "capacity",
    "noise_scale", "stream_norm", "beta", "objective", "prune_prob", "score_weight", "size_weight", "anneal",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """Seconds at measured numbers of patch tokens, ascending, with straight lines between; it may rise and fall."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, count: int) -> float:
        """Return the seconds with so many patch tokens; beyond the ends what is measured there."""
        right = bisect_right(self.counts, count)
        if right == 0 or right == len(self.counts):
            return self.seconds[max(0, right - 1)]
        below, above = self.counts[right - 1], self.counts[right]
        share = (count - below) / (above - below)
        return (1 - share) * self.seconds[right - 1] + share * self.seconds[right]


@dataclass(frozen=True)
class LatencyCurve:
    """Time against the number of tokens, of one method on one model, batch size and precision on one machine.

    Args:
        about: What was measured and on what, by name.
        method: The method and its options, as far as its time depends on them.
        date: When.
        patches: Patch tokens of the unpruned model.
        depth: Its blocks.
        unpruned: Seconds for one batch of the unpruned model.
        blocks: One block: "whole"; or its halves "mlp" and "attention", the latter also with " map" where the method
            works on the whole map. With " biased" those in which the sizes of merged tokens count.
        looks: What the method looks at of a block's attention where it acts: "", "heads" or "map".
        proportional: Whether the sizes of merged tokens count in attention.
        steps: Seconds for each unit of `work`.
    """

    about: dict[str, Any]
    method: dict[str, Any]
    date: str
    patches: int
    depth: int
    unpruned: float
    blocks: dict[str, Line]
    looks: str
    proportional: bool
    steps: tuple[float, ...]

    def predict(self, config: Config) -> float:
        """Return the seconds for one batch of the model with a reduction on it, in about 0.1 ms.

        Args:
            config: Of the method that was measured, with any places and counts, and any `similar`.

        Raises:
            UsageError: the config does not fit the model, or is of another method or has other options.
        """
        self._check_method(config)
        steps = schedule([config], self.patches, self.depth)
        own = sum(each * units for each, units in zip(self.steps, work(steps, self.patches), strict=True))
        return self.without_steps(steps) + own

    def without_steps(self, steps: Sequence[Step]) -> float:
        """Return the seconds of the embedding, the head and the blocks, with what is left after each step."""
        whole, left = self.blocks["whole"], counts(steps, self.patches, self.depth)
        acts = {step.place.block for step in steps}
        total = self.unpruned - self.depth * whole.at(self.patches)
        for block, (entering, halfway) in enumerate(zip(left.attention, left.mlp, strict=True), 1):
            biased, looks = self.proportional and entering < self.patches, self.looks if block in acts else ""
            name = "whole" + " biased" * biased
            if looks or halfway < entering or name not in self.blocks:  # the block is run in halves
                name = attention(looks, biased)
                total += self.blocks["mlp"].at(halfway)
            total += self.blocks[name].at(entering)
        return total

    def slower(self) -> dict[int, int]:
        """Return patch tokens with which a block takes longer than with more, to the fastest larger number."""
        line, found = self.blocks["whole"], {}
        fastest = max(line.counts), line.seconds[-1]
        for count, seconds in reversed(list(zip(line.counts, line.seconds, strict=True))):
            if fastest[1] < (1 - MARGIN) * seconds:
                found[count] = fastest[0]
            if seconds < fastest[1]:
                fastest = count, seconds
        return dict(sorted(found.items()))

    def check(self, model: nn.Module, config: Config, *, batch_size: int = 1, dtype: str = "fp32") -> None:
        """Refuse to be used for anything else than what was measured.

        Raises:
            UserError: another model, batch size, precision, device, number of threads, machine or versions, in one
                line.
            UsageError: another method, or other options.
        """
        for name, value in about(model, batch_size, dtype).items():
            if self.about.get(name) != value:
                what = f"{name.replace('_', ' ')} {self.about.get(name)}"
                raise UserError(f"the latency curve is for {what}, and {value} is asked for; measure it again")
        self._check_method(config)

    def _check_method(self, config: Config) -> None:
        known = {name: entry.default for name, entry in options(type(config)).items()} | self.method
        for name, value in timed_options(config).items():  # options younger than the curve had their defaults then
            if known.get(name) != value:
                raise UsageError(
                    f"the latency curve was measured for {self.method['method']} with {name}={known.get(name)}, "
                    f"not {value}; measure it again"
                )

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        write(path, json.dumps({"version": VERSION, **asdict(self)}, indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> LatencyCurve:
        """Read what `save` wrote; `check` tells whether it can be used.

        Raises:
            UserError: it cannot be read, is no curve, or is of another version.
        """
        try:
            data = json.loads(path.read_text())
            version = data.pop("version", None) if isinstance(data, dict) else None
            if version != VERSION:
                raise UserError(
                    f"{path}: no latency curve that this tntprune reads (version {version}); measure it again"
                )
            lines = {name: Line(tuple(one["counts"]), tuple(one["seconds"])) for name, one in data["blocks"].items()}
            return cls(**{**data, "blocks": lines, "steps": tuple(data["steps"])})
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); expected a latency curve") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}: a broken latency curve ({type(error).__name__}: {error}); measure again"
            ) from None
        except UserError:
            raise
        except ValueError:  # no JSON, or no text
            raise UserError(f"{path}: no JSON; expected a latency curve") from None


def about(model: nn.Module, batch_size: int, dtype: str) -> dict[str, Any]:
    """Name what a curve is of: times do not carry over to anything else."""
    layout, device = find_backbone(model).layout(model), device_of(model)
    where = surroundings(device)
    return {
        "model": identity(model)["architecture"] or type(base_of(model)).__name__,
        "shape": f"{layout.grid[0]} x {layout.grid[1]} patches, {layout.depth} blocks of {layout.embed_dim}, "
        f"{layout.heads} heads, {layout.prefix} prefix tokens",
        "batch_size": batch_size, "dtype": dtype, "device": str(device), "threads": torch.get_num_threads(),
        "hardware": where["hardware"], "versions": where["versions"],
    }  # fmt: skip


def timed_options(config: Config) -> dict[str, Any]:
    """Return the method and the options that its time depends on, as JSON holds them."""
    own = {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name not in FREE}
    own |= {"how": config.what} if hasattr(config, "what") else {}  # said or not, it is the same
    return {
        "method": config.method,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in own.items()},
    }


def attention(looks: str, biased: bool) -> str:
    """Name a block's first half, by what is looked at in it and whether sizes count."""
    return "attention" + " map" * (looks == "map") + " biased" * biased


def work(steps: Sequence[Step], patches: int) -> tuple[float, ...]:
    """Return what the time of a reduction's own steps is a sum of.

    Returns:
        1; the number of steps; the tokens that enter them and the pairs of these, as shares of all; halvings beyond
        the first, which take several rounds of merging; the steps that drop similar tokens, and the pairs there.
    """
    enter = [step.entering / patches for step in steps]
    similar = [step.ranked / patches for step in steps if step.leaving < step.ranked]
    halvings = [math.ceil(math.log2(step.entering / max(1, step.leaving)) - 1e-9) for step in steps]
    return (
        1.0, float(len(steps)), sum(enter), sum(one**2 for one in enter),
        float(sum(max(0, one - 1) for one in halvings)), float(len(similar)), sum(one**2 for one in similar),
    )  # fmt: skip

"""A curve of time against tokens, and what it says of a config: pure numbers, nothing is run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tntprune.backbones.attach import base_of, device_of
from tntprune.backbones.base import find_backbone
from tntprune.errors import UsageError, UserError
from tntprune.methods import Config
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import Place, Step
from tntprune.search.costs import Line, Part, StepCost, kind, step_name, timed_options
from tntprune.serialization.fingerprint import identity
from tntprune.system.environment import surroundings
from tntprune.system.storage import write

VERSION = 1  # raised when a field changes its meaning
MARGIN = 0.03  # by which a number of tokens has to be slower than a larger one to be told


def about(model: nn.Module, batch_size: int, dtype: str) -> dict[str, Any]:
    """What a curve is of, by name: times do not carry over to anything else."""
    layout, device = find_backbone(model).layout(model), device_of(model)
    where = surroundings(device)
    return {
        "model": identity(model)["architecture"] or type(base_of(model)).__name__,
        "shape": f"{layout.grid[0]} x {layout.grid[1]} patches, {layout.depth} blocks of {layout.embed_dim}, "
        f"{layout.heads} heads, {layout.prefix} prefix tokens",
        "batch_size": batch_size, "dtype": dtype, "device": str(device), "threads": torch.get_num_threads(),
        "hardware": where["hardware"], "versions": where["versions"],
    }  # fmt: skip


@dataclass(frozen=True)
class LatencyCurve:
    """Time against the number of tokens, of one model, batch size and precision on one machine.

    Args:
        about: What was measured and on what, by name.
        date: When.
        patches: Patch tokens of the unpruned model.
        depth: Its blocks.
        unpruned: Seconds for one batch of the unpruned model.
        around: The embedding and the head, by the tokens that are left at the end.
        blocks: One block: "whole"; or its halves "mlp" and "attention", the latter also with " map" where a method
            works on the whole map and with " biased" where the sizes of merged tokens count.
        parts: The methods whose steps were measured.
        steps: Their steps, by method, group of blocks and `kind`.
        walk: What a reduced model takes longer than the unpruned one before any step is taken.
        step_factor: How much longer steps take between blocks than on their own.
    """

    about: dict[str, Any]
    date: str
    patches: int
    depth: int
    unpruned: float
    around: Line
    blocks: dict[str, Line]
    parts: tuple[Part, ...]
    steps: dict[str, StepCost]
    walk: float = 0.0
    step_factor: float = 1.0

    def predict(self, config: Config) -> float:
        """Seconds for one batch of the model with a reduction on it. Nothing is run; about 0.1 ms for each call.

        The parts are scaled so that without a step they add up to the unpruned model's own time.

        Args:
            config: Of the method whose steps were measured, with any places and counts, and any `similar`.

        Raises:
            UsageError: the config does not fit the model, or is of a method that was not measured.
        """
        blocks, steps = self.split(config)
        return self.scale * (blocks + self.step_factor * steps) + self.walk

    @property
    def scale(self) -> float:
        """The unpruned model's own time over the sum of its parts."""
        return self.unpruned / (self.around.at(self.patches) + self.depth * self.blocks["whole"].at(self.patches))

    def split(self, config: Config) -> tuple[float, float]:
        """Seconds of the blocks with what is around them, and of the steps, both before they are scaled."""
        configs: Sequence[Config] = getattr(config, "parts", [config])
        parts = [self._part(one) for one in configs]
        plan = {step.place: step for step in schedule(configs, self.patches, self.depth)}
        own, count, biased = 0.0, self.patches, False
        total = 0.0

        def act(place: Place) -> None:
            nonlocal own, count, biased
            if (step := plan.get(place)) is not None:
                cost = self._step(parts[step.part], step)
                own, count = own + cost.at(step), step.leaving
                biased = biased or (cost.sized and any(part.proportional for part in parts))

        act(Place(0))
        for block in range(1, self.depth + 1):
            inside, after = Place(block, inside=True), Place(block)
            seen = [parts[plan[place].part].sees for place in (inside, after) if place in plan]
            if not any(seen) and not biased and inside not in plan:
                total += self.blocks["whole"].at(count)
            else:
                name = attention("map" in seen, biased)
                if name not in self.blocks:
                    raise UsageError(f"the latency curve has no {name}; expected one measured for {configs[0].method}")
                total += self.blocks[name].at(count)
                act(inside)
                total += self.blocks["mlp"].at(count)
            act(after)
        return total + self.around.at(count), own

    def _part(self, config: Config) -> Part:
        options = timed_options(config)
        same = [part for part in self.parts if part.method == config.method]
        for part in same:
            if part.options == options:
                return part
        if not same:
            known = " and ".join(part.method for part in self.parts)
            raise UsageError(f"the latency curve was measured for {known}, not {config.method}; measure it again")
        name = next(name for name in {**same[0].options, **options} if same[0].options.get(name) != options.get(name))
        raise UsageError(
            f"the latency curve was measured for {config.method} with {name}={same[0].options.get(name)}, "
            f"not {options.get(name)}; measure it again"
        )

    def _step(self, part: Part, step: Step) -> StepCost:
        name = step_name(part, step)
        if name not in self.steps:
            raise UsageError(f"the latency curve has no {kind(step)} step of {part.method}; measure it again")
        return self.steps[name]

    def slower(self) -> dict[int, int]:
        """Patch tokens with which a block takes longer than with more, to the fastest larger number."""
        line = self.blocks["whole"]
        found: dict[int, int] = {}
        best = len(line.counts) - 1
        for number in range(len(line.counts) - 2, -1, -1):
            if line.seconds[best] < (1 - MARGIN) * line.seconds[number]:
                found[line.counts[number]] = line.counts[best]
            if line.seconds[number] < line.seconds[best]:
                best = number
        return dict(sorted(found.items()))

    def check(self, model: nn.Module, config: Config, *, batch_size: int = 1, dtype: str = "fp32") -> None:
        """Refuse to be used for anything else than what was measured.

        Raises:
            UserError: another model, batch size, precision, device, number of threads, machine or versions, in one
                line.
            UsageError: another method.
        """
        wanted = about(model, batch_size, dtype)
        for name, value in wanted.items():
            if self.about.get(name) != value:
                what = f"{name.replace('_', ' ')} {self.about.get(name)}"
                raise UserError(f"the latency curve is for {what}, and {value} is asked for; measure it again")
        for one in getattr(config, "parts", [config]):
            self._part(one)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"version": VERSION, **json.loads(json.dumps(asdict(self)))}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LatencyCurve:
        """From what `to_dict` made.

        Raises:
            UserError: it is none, or of another version.
        """
        data = dict(data) if isinstance(data, dict) else {}
        version = data.pop("version", None)
        if version != VERSION:
            raise UserError(f"no latency curve that this tntprune reads (version {version}); measure it again")
        try:
            data["around"] = _line(data["around"])
            data["blocks"] = {name: _line(line) for name, line in data["blocks"].items()}
            data["parts"] = tuple(
                Part(**{**part, "groups": {int(a): int(b) for a, b in part["groups"].items()}})
                for part in data["parts"]
            )
            data["steps"] = {
                name: StepCost(tuple(cost["weights"]), cost["least"], cost["sized"])
                for name, cost in data["steps"].items()
            }
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"a broken latency curve ({type(error).__name__}: {error}); measure it again") from None

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        write(path, json.dumps(self.to_dict(), indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> LatencyCurve:
        """Read what `save` wrote; `check` tells whether it can be used.

        Raises:
            UserError: it cannot be read.
        """
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); expected a latency curve") from None
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except ValueError:  # no JSON, or no text
            raise UserError(f"{path}: no JSON; expected a latency curve") from None


def attention(map: bool, biased: bool) -> str:
    """The name of a block's first half."""
    return "attention" + " map" * map + " biased" * biased


def _line(data: dict[str, Any]) -> Line:
    return Line(tuple(data["counts"]), tuple(data["seconds"]))

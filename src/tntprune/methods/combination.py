"""Several reductions of one model, each at places of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tntprune.errors import UsageError
from tntprune.methods.base import Layout, Method, Plan
from tntprune.methods.checks import check
from tntprune.methods.config import Config, option
from tntprune.methods.registry import implementation
from tntprune.methods.schedule import Place, Step, schedule
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens


@dataclass(frozen=True)
class Combination(Config):
    """Reductions that share a model, each at places of its own: pruning and then merging, for example.

    Args:
        parts: Their configs. Rates are shares of what arrives at each of their places.

    Raises:
        UsageError: there are fewer than two.
    """

    everywhere = True
    method = "combination"

    at: None = option(None, "")
    parts: Sequence[Config] = option((), "the reductions")

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        check(len(self.parts) > 1, f"{len(self.parts)} reductions to combine; expected two or more")
        annealed = [part.method for part in self.parts if getattr(part, "anneal", None) is not None]
        check(not annealed, "anneal: evit is trained alone and then combined; expected anneal=None here")

    @property
    def by_share(self) -> bool:
        return False

    @property
    def variable(self) -> bool:
        return any(part.variable for part in self.parts)

    def singles(self, depth: int) -> list[Any]:
        return [single for part in self.parts for single in part.singles(depth)]

    def changed(self, **changes: Any) -> Any:
        check(
            not changes,
            f"{', '.join(changes)}: a combination of {' and '.join(part.method for part in self.parts)} is taken as it "
            "was saved; expected no changes, or its parts given anew",
        )
        return self


class Combined(Method):
    """Hands the tokens to whichever reduction acts at a place. While one of them learns, the others stand aside."""

    config: Combination

    def __init__(self, config: Combination, layout: Layout) -> None:
        super().__init__(config, layout)
        modules = [implementation(type(part))(part, layout) for part in config.parts]
        self.parts: list[Method] = nn.ModuleList(modules)  # type: ignore[assignment]
        learners = [number for number, part in enumerate(modules) if part.trains]
        if len(learners) > 1:
            names = " and ".join(config.parts[number].method for number in learners)
            raise UsageError(f"{names} both learn; expected one of them, with reductions that need no training")
        self.learner = learners[0] if learners else None
        self.trains = self.learner is not None
        self.proportional = any(part.proportional for part in modules)
        if self.learner is not None:
            own = modules[self.learner]
            self.ce, self.kl, self.needs_teacher = own.ce, own.kl, own.needs_teacher
            self.learners = own.learners

        self.calibrated = all(part.calibrated for part in modules)

    def set_calibrated(self, value: bool = True) -> None:
        for part in self.parts:
            part.set_calibrated(value)
        self.calibrated = all(part.calibrated for part in self.parts)

    def warn_uncalibrated(self) -> None:
        for part in self.parts:
            part.warn_uncalibrated()

    def _schedule(self, patches: int) -> Plan:
        return {step.place: step for step in schedule(self.config.parts, patches, self.layout.depth)}

    def plan(self, patches: int) -> Plan:
        if not self.training or self.learner is None:
            return self.steps(patches)
        own = self.parts[self.learner]
        own.trained = self.trained
        return {place: step._replace(part=self.learner) for place, step in own.plan(patches).items()}

    def resize(self, grid: tuple[int, int]) -> None:
        super().resize(grid)
        for part in self.parts:
            part.resize(grid)

    def part(self, number: int, plan: Plan) -> Plan:
        """The steps of one of the reductions."""
        return {place: step for place, step in plan.items() if step.part == number}

    def sees(self, block: int, plan: Plan) -> Literal["", "heads", "map"]:
        wanted = [part.sees(block, self.part(number, plan)) for number, part in enumerate(self.parts)]
        return "map" if "map" in wanted else "heads" if "heads" in wanted else ""

    def rests(self, plan: Plan, block: int) -> bool:
        return all(part.rests(self.part(number, plan), block) for number, part in enumerate(self.parts))

    def begins(self, plan: Plan) -> int:
        return min(part.begins(self.part(number, plan)) for number, part in enumerate(self.parts))

    def bias(self, tokens: Tokens, block: int) -> torch.Tensor | None:
        if self.training and self.learner is not None:
            return self.parts[self.learner].bias(tokens, block)
        own = next((part for part in self.parts if part.proportional and part.trains), None)  # it has learned how
        return super().bias(tokens, block) if own is None else own.bias(tokens, block)

    def attend(self, heads: Heads, tokens: Tokens) -> torch.Tensor:
        own = self.parts[self.learner] if self.training and self.learner is not None else None
        return heads.output() if own is None else own.attend(heads, tokens)

    def forward(self, tokens: Tokens, place: Place, plan: Plan, heads: Heads | None = None) -> Tokens:
        for number, part in enumerate(self.parts):
            tokens = part(tokens, place, self.part(number, plan), heads)
        return tokens

    @property
    def penalises(self) -> bool:
        return self.learner is not None and self.parts[self.learner].penalises

    def penalty(self, tokens: Tokens, teacher: Tokens | None) -> torch.Tensor | None:
        return None if self.learner is None else self.parts[self.learner].penalty(tokens, teacher)

    def macs(self, step: Step) -> int:
        return self.parts[step.part].macs(step)

"""Several reductions of one model, each at places of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tntprune.errors import UsageError
from tntprune.methods.base import Layout, Method
from tntprune.methods.checks import check
from tntprune.methods.config import Config, option
from tntprune.methods.registry import implementation
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import BlockPlan, Plan, Step
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
    title = "combination"
    untimed = "is that of several methods"

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


SIGHTS = ("", "heads", "map")  # of a block's attention, the least first


class Combined(Method):
    """Hands the tokens to whichever reduction acts at a place. While one of them learns, the others stand aside."""

    config: Combination

    def __init__(self, config: Combination, layout: Layout) -> None:
        super().__init__(config, layout)
        modules = [implementation(type(part))(part, layout) for part in config.parts]
        self.parts: list[Method] = nn.ModuleList(modules)  # type: ignore[assignment]
        for part in modules:
            part.trains = part.trains and not part.learns_alone
        learners = [number for number, part in enumerate(modules) if part.trains]
        if len(learners) > 1:
            names = " and ".join(config.parts[number].method for number in learners)
            raise UsageError(f"{names} both learn; expected one of them, with reductions that need no training")
        self.learner = learners[0] if learners else None
        self.trains = self.learner is not None
        self.proportional = any(part.proportional for part in modules)
        self.needs_grid = any(part.needs_grid for part in modules)
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

    def scheduled(self, patches: int) -> tuple[Step, ...]:
        return schedule(self.config.parts, patches, self.layout.depth)

    def plan(self, patches: int) -> Plan:
        if not self.training or self.learner is None:
            return super().plan(patches)
        own = self.parts[self.learner]
        own.trained = self.trained
        return tuple(_of_part(block, self.learner) for block in own.plan(patches))

    @property
    def untouched(self) -> int:
        return 0 if self.learner is None else self.parts[self.learner].untouched

    def planned(self, steps: Sequence[Step]) -> Plan:
        plans = [part.planned([s for s in steps if s.part == number]) for number, part in enumerate(self.parts)]
        return tuple(
            block._replace(
                sees=max((one.sees for one in own), key=SIGHTS.index),
                watchers=tuple(number for number, one in enumerate(own) if one.watchers),
            )
            for block, *own in zip(super().planned(steps), *plans, strict=True)
        )

    def sees(self, step: Step) -> Literal["", "heads", "map"]:
        return self.parts[step.part].sees(step)

    @property
    def spares_prefix(self) -> bool:
        return all(part.spares_prefix for part in self.parts)

    def member(self, number: int) -> Method:
        return self.parts[number]

    def resize(self, grid: tuple[int, int]) -> None:
        for part in self.parts:
            part.resize(grid)
        super().resize(grid)

    def bias(self, tokens: Tokens, block: int) -> torch.Tensor | None:
        if self.training and self.learner is not None:
            return self.parts[self.learner].bias(tokens, block)
        own = next((part for part in self.parts if part.proportional and type(part).bias is not Method.bias), None)
        return super().bias(tokens, block) if own is None else own.bias(tokens, block)

    def attend(self, heads: Heads, tokens: Tokens) -> torch.Tensor:
        own = self.parts[self.learner] if self.training and self.learner is not None else None
        return heads.output() if own is None else own.attend(heads, tokens)

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        return self.parts[step.part](tokens, step, heads)  # type: ignore[no-any-return]

    @property
    def penalises(self) -> bool:
        return self.learner is not None and self.parts[self.learner].penalises

    def penalty(self, tokens: Tokens, teacher: Tokens | None) -> torch.Tensor | None:
        return None if self.learner is None else self.parts[self.learner].penalty(tokens, teacher)

    def macs(self, step: Step) -> int:
        return self.parts[step.part].macs(step)


def _of_part(block: BlockPlan, number: int) -> BlockPlan:
    """Return what one of the reductions does at a block as what the combination does there."""
    inside, after = (step and step._replace(part=number) for step in (block.inside, block.after))
    return block._replace(inside=inside, after=after, watchers=(number,) if block.watchers else ())

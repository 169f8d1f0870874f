"""What every method is to the rest: a module that maps tokens to tokens after each block."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from tntprune.config import Config
from tntprune.schedule import Step, schedule
from tntprune.tokens import Tokens

Plan = dict[int, Step]


class Layout(NamedTuple):
    """What a method may know of the backbone.

    Args:
        family: The adapter's name.
        embed_dim: D.
        depth: Blocks.
        prefix: Prefix tokens: CLS, distillation, registers.
        grid: Rows and columns of patches at the model's own image size.
        cls: Whether the first prefix token is a CLS token.
    """

    family: str
    embed_dim: int
    depth: int
    prefix: int
    grid: tuple[int, int]
    cls: bool

    @property
    def patches(self) -> int:
        """N, the patch tokens of the unpruned model."""
        return self.grid[0] * self.grid[1]


class Method(nn.Module):
    """One reduction of one model. Subclasses read on one screen and keep no state between calls.

    Args:
        config: What to do.
        layout: The backbone it is done to.
    """

    trains = False  # whether it has parameters to learn
    objective: str | None = None  # of one that has: "ce" needs labels, "kl" the unpruned model

    def __init__(self, config: Config, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        self._own = self._schedule(layout.patches)

    def steps(self, patches: int) -> Plan:
        """Where tokens go from an image of so many patches, by block; made beforehand for the model's own size."""
        return self._own if patches == self.layout.patches else self._schedule(patches)

    def plan(self, patches: int) -> Plan:
        """Where this pass acts, asked once at its start: where tokens go, unless a method trains otherwise."""
        return self.steps(patches)

    def _schedule(self, patches: int) -> Plan:
        return {step.block: step for step in schedule(self.config, patches, self.layout.depth)}

    def forward(self, tokens: Tokens, block: int, plan: Plan) -> Tokens:
        """Act on the tokens that leave `block` (0: the embedding). Nothing happens where the plan has no step."""
        step = plan.get(block)
        return tokens if step is None else self.reduce(tokens, step)

    def reduce(self, tokens: Tokens, step: Step) -> Tokens:
        """Go from `step.entering` to `step.leaving` patch tokens."""
        raise NotImplementedError

    def macs(self, step: Step) -> int:
        """Multiply-accumulates that one step costs for one image."""
        return 0

    @classmethod
    def obstacle(cls, layout: Layout) -> str | None:
        """Why the method cannot be applied to such a backbone, and which would do; None if it can."""
        return None


M = TypeVar("M", bound=type[Method])
_IMPLEMENTATIONS: dict[type[Config], type[Method]] = {}


def implements(config: type[Config]) -> Callable[[M], M]:
    """Register the module that carries out a config. The file is named after the method."""

    def enter(module: M) -> M:
        _IMPLEMENTATIONS[config] = module
        return module

    return enter


def implementation(config: type[Config]) -> type[Method]:
    """The module class of a method, imported when first asked for."""
    import_module(f"tntprune.methods.{config.method}")
    return _IMPLEMENTATIONS[config]


def top(score: torch.Tensor, count: int) -> torch.Tensor:
    """Positions (B, count) of the largest scores of (B, n), the best first; compared in fp32."""
    return score.float().topk(count, dim=1).indices

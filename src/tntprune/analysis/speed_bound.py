"""What a reduction is measured beside: the same numbers of tokens, chosen without a thought or at random."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from tntprune.backbones.attach import reduction_of, twin_of
from tntprune.backbones.base import tower_of
from tntprune.methods import Random
from tntprune.methods.base import Method
from tntprune.methods.random import RandomDrop
from tntprune.methods.steps import Step
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens

Model = TypeVar("Model", bound=nn.Module)


class Beside(Method):
    """As many tokens at the same places as another method leaves, where its number is the same in every image."""

    def __init__(self, other: Method) -> None:
        self.scheduled = other.scheduled  # type: ignore[method-assign]  # before it is asked for
        super().__init__(other.config, other.layout)
        self.calibrated = True  # it has nothing to learn
        self.last_block = other.last_block

    def bias(self, tokens: Tokens, block: int) -> torch.Tensor | None:
        return None

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        """Leave as many tokens; Evo-ViT brings tokens back at its last place, which is left out."""
        return tokens if step.leaving >= tokens.count else self.cut(tokens, step)

    def cut(self, tokens: Tokens, step: Step) -> Tokens:
        """Leave `step.leaving` patch tokens."""
        raise NotImplementedError


class Slicing(Beside):
    """The bound of the speed: the first tokens, cut off without scoring or gathering. No method can be faster."""

    def cut(self, tokens: Tokens, step: Step) -> Tokens:
        last, carrier = tokens.prefix + step.leaving, tokens.carrier
        return replace(
            tokens,
            x=tokens.x[:, :last].contiguous(),  # (B, prefix + leaving, D)
            index=tokens.index[:, : step.leaving],
            carrier=None if carrier is None else torch.where(carrier < step.leaving, carrier, -1),
        )


class Scattered(Beside):
    """Random drop, as the method of that name does it."""

    def __init__(self, other: Method) -> None:
        super().__init__(other)
        self.drop = RandomDrop(Random(at=0), other.layout)  # a place that every model has

    def cut(self, tokens: Tokens, step: Step) -> Tokens:
        return self.drop(tokens, step)  # type: ignore[no-any-return]


def beside(model: Model, kind: type[Beside]) -> Model:
    """Return a second model that shares every weight with a reduced one and leaves as many tokens at the same places.

    Args:
        model: A reduced model.
        kind: `Slicing` for the bound, `Scattered` for random drop.

    Raises:
        UserError: the model is not reduced.
    """
    method = kind(reduction_of(model)).train(model.training)
    twin = twin_of(model)
    tower_of(twin).reduction = method
    return twin

"""Blocks that stay modules: what a reduction sees and does inside a block, and the classes that let it.

A reduced model's blocks and attentions have their classes swapped for static subclasses. These take one argument more,
`inside`; without it they do what the plain classes do. So forward hooks, offloading, sharding, adapters and tracers see
every block and every attention called as the unpruned model calls them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tntprune.backbones.trace import Trace
from tntprune.methods.base import Method
from tntprune.methods.steps import BlockPlan
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens


def is_hooked(module: nn.Module) -> bool:
    """Return whether hooks hang on a module that look at what goes in or comes out."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class Inside:
    """One call of one block: what the block is told, and what it leaves behind. Made anew for each call.

    This one runs the block as the unpruned model does, and keeps its attention for whoever looks at it.

    Args:
        bias: Added to the logits of each key, (B, 1, 1, prefix + n), or None.
        queries: How many of the first tokens ask and leave the block; None for all.
        apart: Whether queries are projected for these tokens alone. The logits then differ by rounding.

    Attributes:
        heads: The block's attention, once it has run.
    """

    def __init__(self, bias: torch.Tensor | None = None, queries: int | None = None, apart: bool = False) -> None:
        self.bias = bias
        self.queries = queries
        self.apart = apart
        self.heads: Heads | None = None

    def asking(self, x: torch.Tensor) -> torch.Tensor:
        """Select the tokens that leave the block, (B, n, D) to (B, queries, D)."""
        return x if self.queries is None else x[:, : self.queries]

    def attend(self, heads: Heads) -> torch.Tensor:
        """Return what the block's heads give, (B, heads, n, head_dim)."""
        self.heads = heads
        return (heads if self.queries is None else heads.first(self.queries)).output()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        """Act on the tokens between attention and MLP, (B, n, D) to (B, m, D)."""
        return x


class Acting(Inside):
    """A block in which a reduction acts, or at which it looks.

    Args:
        tokens: The tokens that enter the block.
        reduction: The reduction.
        number: The block's number, from 1.
        plan: What the reduction does at this block.
        bias: See `Inside`.
        trace: Where the tokens are counted that enter the MLP, or None.
    """

    def __init__(
        self, tokens: Tokens, reduction: Method, number: int, plan: BlockPlan, bias: torch.Tensor | None,
        trace: Trace | None = None,
    ) -> None:  # fmt: skip
        super().__init__(bias)
        self.tokens, self.reduction, self.number, self.plan, self.trace = tokens, reduction, number, plan, trace

    def attend(self, heads: Heads) -> torch.Tensor:
        if self.plan.sees == "map":
            heads = replace(heads, attention=heads.map())
        self.heads = heads
        return self.reduction.attend(heads, self.tokens)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        tokens = replace(self.tokens, x=x, block=self.number)
        if self.plan.inside is not None:
            tokens = self.reduction(tokens, self.plan.inside, self.heads)
        if self.trace is not None:
            self.trace.count(tokens)
        if self.plan.after is None and not self.plan.watchers:
            self.heads = None  # nobody looks at them any more, and the MLP needs the memory
        self.tokens = tokens
        return tokens.x


class OpenBlock:
    """A block with an attention and an MLP, between which a reduction can act. Comes before a family's own class."""

    def attention_half(self, x: torch.Tensor, inside: Inside, **context: Any) -> torch.Tensor:
        """Run the norm, the attention and the residual, (B, n, D) to (B, n, D).

        Args:
            x: The tokens.
            inside: See `Inside`.
            **context: What the block's attention needs to know of the tokens' places.
        """
        raise NotImplementedError

    def mlp_half(self, x: torch.Tensor) -> torch.Tensor:
        """Run the norm, the MLP and the residual, (B, n, D) to (B, n, D)."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, *args: Any, inside: Inside | None = None, **context: Any) -> torch.Tensor:
        """Run the block: as the plain class does, or with a reduction inside it."""
        if inside is None:
            return super().forward(x, *args, **context)  # type: ignore[misc, no-any-return]
        return self.mlp_half(inside.between(self.attention_half(x, inside, **context)))

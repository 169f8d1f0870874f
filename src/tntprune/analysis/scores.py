"""The scores by which a method ranks tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tntprune.backbones.attach import reduction_of
from tntprune.methods.base import ScoringMethod
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens


@contextmanager
def record_scores(model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Record the scores of a reduced model's tokens, for as long as the context lasts.

    Use the model in one thread only meanwhile.

    Args:
        model: A reduced model.

    Yields:
        For each block at which tokens are scored (0: before the first), the scores (B, N) of the last forward pass in
        fp32, by place in the original grid; NaN where no token is left. Empty for methods without scores.

    Raises:
        UserError: the model is not reduced.
    """
    found: dict[int, torch.Tensor] = {}
    method: Any = reduction_of(model)
    parts = [part for part in getattr(method, "parts", [method]) if isinstance(part, ScoringMethod)]

    def noted(part: ScoringMethod) -> Any:
        plain = part.score

        def score(tokens: Tokens, heads: Heads | None = None) -> torch.Tensor:
            scores = plain(tokens, heads)
            grid = scores.new_full((len(scores), tokens.grid_size + 1), torch.nan, dtype=torch.float32)
            index = torch.where(tokens.index < 0, tokens.grid_size, tokens.index)  # those without a place
            found[tokens.block] = grid.scatter(1, index, scores.detach().float())[:, :-1]
            return scores

        return score

    for part in parts:
        part.score = noted(part)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for part in parts:
            del part.score

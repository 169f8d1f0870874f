"""Top-K: the patches to which the CLS token attends most stay.

Source: the TNT paper's baseline of that name (its appendix names EViT, of which it is the ranking without the fused
token), and Haurum et al., ICCV Workshops 2023.
"""

from __future__ import annotations

from typing import Literal

import torch

from tntprune.attention import Heads
from tntprune.config import TopK
from tntprune.methods.base import Layout, Method, implements, top
from tntprune.schedule import Step
from tntprune.tokens import Tokens, take


def readers(rows: Literal["cls", "mean"], layout: Layout) -> int:
    """How many prefix tokens' attention ranks the patches: the CLS token's, or also the distillation token's."""
    return 2 if rows == "mean" and layout.distilled else 1


def received(heads: Heads, readers: int, prefix: int) -> torch.Tensor:
    """What the first tokens attend to each patch token, averaged over heads and over them; (B, n) in fp32."""
    return heads.rows(readers).mean((1, 2))[:, prefix:]


@implements(TopK)
class TopKPruning(Method):
    """Ranks by one or two rows of attention; fused attention stays in use, and no attention map is built."""

    looks = "heads"
    needs_cls = True
    config: TopK

    def reduce(self, tokens: Tokens, step: Step, heads: Heads | None) -> Tokens:
        assert heads is not None
        score = received(heads, readers(self.config.rows, self.layout), tokens.prefix)  # (B, n)
        return take(tokens, top(score, step.leaving))

    def macs(self, step: Step) -> int:
        return readers(self.config.rows, self.layout) * (step.entering + self.layout.prefix) * self.layout.attn_dim

"""Top-K: the patches to which the CLS token attends most stay.

Source: the TNT paper's baseline of that name (its appendix names EViT, of which it is the ranking without the fused
token), and Haurum et al., ICCV Workshops 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tntprune.methods.base import Layout, ScoringMethod
from tntprune.methods.checks import check, check_flags, check_words
from tntprune.methods.config import Config, option
from tntprune.methods.steps import Step
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens


@dataclass(frozen=True)
class Attended(Config):
    """Options that Top-K and EViT share: prefix tokens' attention ranks the patches.

    Args:
        inside: Act between the block's attention and its MLP; else after the block.
        rows: Whose attention ranks: the "cls" token's, or the "mean" of the CLS and the distillation token's.
    """

    inside: bool = option(True, "act between attention and MLP instead of after the block")
    rows: Literal["cls", "mean"] = option(
        "cls", "rank by the CLS token's attention, or its mean with the distillation's"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "inside")
        check_words(self, "rows")
        check(self.locations[0] > 0, "at=0: no block has been seen whose attention could rank; expected 1 or larger")

    @property
    def reads(self) -> bool:
        return True

    @property
    def is_inside(self) -> bool:
        return self.inside


@dataclass(frozen=True)
class TopK(Attended):
    """Top-K: the patches to which the CLS token attends most stay (the TNT paper's baseline, without fusion).

    Shares are truncated, and taken of the patches that arrive.

    Args:
        inside: Drop between the block's attention and its MLP, as the TNT paper ran it; else after the block.
        rows: Whose attention ranks: the "cls" token's, or the "mean" of the CLS and the distillation token's.
    """

    method = "topk"
    title = "Top-K"


def readers(rows: Literal["cls", "mean"], layout: Layout) -> int:
    """Return how many prefix tokens' attention ranks the patches: the CLS token's, or also the distillation token's."""
    return 2 if rows == "mean" and layout.distilled else 1


def received(heads: Heads, readers: int, prefix: int) -> torch.Tensor:
    """Return what the first tokens attend to each patch token, averaged over heads and over them; (B, n) in fp32."""
    return heads.rows(readers).mean((1, 2))[:, prefix:]


class TopKPruning(ScoringMethod):
    """Ranks by one or two rows of attention; fused attention stays in use, and no attention map is built."""

    looks = "heads"
    needs_cls = True
    config: TopK

    def score(self, tokens: Tokens, heads: Heads | None) -> torch.Tensor:
        assert heads is not None
        return received(heads, readers(self.config.rows, self.layout), tokens.prefix)

    def macs(self, step: Step) -> int:
        return readers(self.config.rows, self.layout) * (step.entering + self.layout.prefix) * self.layout.attn_dim

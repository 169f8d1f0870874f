"""Adaptive Token Sampling: tokens are drawn by their share of the CLS token's attention, so an easy image keeps fewer.

Source: Fayyaz et al., "Adaptive Token Sampling for Efficient Vision Transformers", ECCV 2022, section 3: scoring and
inverse transform sampling at fixed points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tntprune.methods.base import Method
from tntprune.methods.config import Config, option
from tntprune.methods.steps import Step, Turn
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import NOWHERE, Tokens, ranking, take


@dataclass(frozen=True)
class ATS(Config):
    """Adaptive Token Sampling (Fayyaz et al., ECCV 2022): tokens are drawn by their share of the CLS token's attention.

    A token that is drawn more than once stays once, so the number of tokens differs from image to image; `keep` and
    `tokens` say how often is drawn, which is the most that can stay. Needs no training.

    Args:
        at: Blocks inside which tokens are sampled; None is every block from the fourth on.
        keep: Draws at each location as a share of the patch tokens that can arrive; 1 leaves the location out.
        tokens: Draws at each location. Neither: as many draws as patches in the image, as published.
    """

    method = "ats"
    title = "ATS"

    everywhere = True
    earliest = 4

    at: int | Sequence[int] | None = option(None, "block or blocks inside which tokens are sampled (4 to the last)")
    keep: float | Sequence[float] | None = option(None, "draws as a share of the patch tokens")
    tokens: int | Sequence[int] | None = option(None, "draws at each location")

    @property
    def reads(self) -> bool:
        return True

    @property
    def variable(self) -> bool:
        return True

    @property
    def is_inside(self) -> bool:
        return True

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        """`ranked` is the number of draws, `leaving` the most tokens that can stay."""
        if self.tokens is not None:
            draws = int(self.amount(turn.number))
        elif self.keep is None:
            draws = patches
        else:
            draws = self.stay(turn, count)
            if draws == count:
                return None
        return Step(turn.place, count, draws, min(draws, count))


def significance(heads: Heads, prefix: int) -> torch.Tensor:
    """Return the CLS token's attention over all heads, times the length of the value it weighs; (B, n) in fp32."""
    attention = heads.rows(1).sum((1, 2))  # (B, prefix + n)
    length = heads.value.float().square().sum((1, 3)).sqrt()  # (B, prefix + n), all heads as one vector
    return (attention * length)[:, prefix:]


def drawn(score: torch.Tensor, there: torch.Tensor, draws: int) -> torch.Tensor:
    """Inverse transform sampling without chance: which tokens are drawn at least once.

    The k-th draw is at (2k - 1) / (2 draws) and takes the token whose cumulative score is nearest, which is to say: it
    goes past each midpoint of two neighbours that lies below it.

    Args:
        score: (B, n), none below 0.
        there: (B, n), whether a token is one; padding is never drawn.
        draws: How often is drawn.

    Returns:
        (B, n), whether a token is drawn.
    """
    score = score.masked_fill(~there, 0.0)
    share = score / score.sum(1, keepdim=True).clamp(min=torch.finfo(score.dtype).tiny)
    ascending = ranking(share.masked_fill(~there, -1.0))  # (B, n), padding first
    cumulative = share.gather(1, ascending).cumsum(1)
    middle = (cumulative[:, 1:] + cumulative[:, :-1]) / 2  # (B, n - 1)
    middle = middle.masked_fill(~there.gather(1, ascending)[:, :-1], -1.0)  # every draw goes past padding
    point = (2 * torch.arange(draws, device=score.device) + 1) / (2 * draws)  # (draws,)
    point = point + 1e-6  # half-way goes up, however the sums are rounded: equal scores are all drawn
    position = torch.searchsorted(middle.contiguous(), point.expand(score.shape[0], -1).contiguous())  # (B, draws)
    return torch.zeros_like(there).scatter(1, ascending.gather(1, position), True)


def pad(tokens: Tokens, there: torch.Tensor) -> Tokens:
    """Turn the patch tokens that are not `there`, (B, n), into padding; the others keep the size they have."""
    size, source = there.float(), tokens.carrier
    if tokens.size is not None:
        size = size * tokens.size
    if source is not None:
        source = torch.where((source >= 0) & there.gather(1, source.clamp(min=0)), source, -1)
    return replace(tokens, index=torch.where(there, tokens.index, NOWHERE), size=size, carrier=source)


class AdaptiveTokenSampling(Method):
    """The sequence is as long as the image that keeps most; the others are padded, and the padding takes no part."""

    looks = "heads"
    needs_cls = True
    config: ATS

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        assert heads is not None
        there = torch.ones_like(tokens.index, dtype=torch.bool) if tokens.size is None else tokens.size > 0
        chosen = drawn(significance(heads, tokens.prefix).detach(), there, step.ranked)  # (B, n)
        shortest, longest = 0, step.leaving
        if not torch.compiler.is_compiling() and len(chosen):  # one graph for all images has to have one length
            shortest, longest = torch.stack(chosen.sum(1).aminmax()).tolist()
        stay = ranking(chosen.float(), descending=True)[:, :longest]  # in order, padding last
        tokens = take(tokens, stay)  # (B, prefix + longest, D)
        return tokens if shortest == longest else pad(tokens, chosen.gather(1, stay))

    def macs(self, step: Step) -> int:
        return 2 * (step.entering + self.layout.prefix) * self.layout.attn_dim  # the row and the lengths

"""Zero-TPrune: tokens vote for each other along the attention graph, and of similar tokens the less important go.

Source: Wang et al., "Zero-TPrune", CVPR 2024: importance (I-stage), similarity (S-stage) and their order (I'-S-I).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tntprune.attention import Heads
from tntprune.config import ZeroTPrune
from tntprune.methods.base import Method, implements, top
from tntprune.methods.similar import nearest
from tntprune.schedule import Step
from tntprune.tokens import Tokens, pick, ranking, take


def votes(attention: torch.Tensor, rounds: int, boost: bool) -> torch.Tensor:
    """Weighted PageRank: in each round a token hands its votes on to the tokens that it attends to.

    Args:
        attention: (B, heads, n, n), rows that sum to 1.
        rounds: How often.
        boost: The first token starts with sqrt(n) times as many votes as any other.

    Returns:
        (B, heads, n), votes with a mean of 1 over all tokens.
    """
    n = attention.shape[-1]
    score = attention.new_ones(*attention.shape[:2], 1, n)  # (B, heads, 1, n)
    if boost:
        score = F.pad(score[..., 1:], (1, 0), value=n**0.5)
    with torch.autocast(attention.device.type, enabled=False):
        for _ in range(rounds):
            score = score @ attention  # A^T s, what each token receives
    return score.squeeze(2) / score.mean(-1)


def over_heads(score: torch.Tensor, limits: Sequence[float] | None) -> torch.Tensor:
    """Root mean square over the heads that take part, (B, heads, n) to (B, n).

    Args:
        score: The patch tokens' votes.
        limits: Heads take part in whose votes, scaled to a mean of 1, the variance lies within these; all do if none
            does, or without limits.
    """
    part = torch.ones_like(score[..., :1])  # (B, heads, 1)
    if limits is not None:
        variance = (score / score.mean(-1, keepdim=True)).var(-1, correction=0, keepdim=True)
        inside = (variance >= limits[0]) & (variance <= limits[1])
        part = (inside | ~inside.any(1, keepdim=True)).to(score.dtype)
    return ((score.square() * part).sum(1) / part.sum(1)).sqrt()


def without_similar(feature: torch.Tensor, ranked: torch.Tensor, remove: int) -> torch.Tensor:
    """Take out tokens of the less important half that are most similar to one of the more important half.

    Args:
        feature: (B, n, C), what is compared.
        ranked: (B, m), positions of the tokens in question, the most important first.
        remove: How many go, at most m // 2.

    Returns:
        (B, m - remove), positions.
    """
    less = ranked.shape[1] // 2
    better, worse = ranked[:, :-less], ranked[:, -less:]
    closest, _ = nearest(pick(feature, worse), pick(feature, better))  # (B, |worse|), cosines
    stay = ranking(closest)[:, : less - remove]  # the least similar come first
    return torch.cat([better, worse.gather(1, stay)], 1)


@implements(ZeroTPrune)
class ZeroTokenPruning(Method):
    """Prefix tokens vote and are voted for as any other token, but never ranked."""

    looks = "map"
    config: ZeroTPrune

    def reduce(self, tokens: Tokens, step: Step, heads: Heads | None) -> Tokens:
        assert heads is not None
        attention = heads.map().detach().float()  # (B, heads, prefix + n, prefix + n)
        feature = tokens.patches  # (B, n, D)
        if self.config.feature == "key":
            feature = heads.key.transpose(1, 2).flatten(2)[:, tokens.prefix :]  # (B, n, C), of all heads
        rounds, similar = self.config.rounds(step.place.block, self.layout.depth), step.ranked - step.leaving
        if self.config.stages == "is":
            keep = top(self.importance(attention, rounds), step.ranked)  # (B, ranked)
            return take(tokens, without_similar(feature, keep, similar) if similar else keep)
        left = torch.arange(tokens.count, device=attention.device).expand(tokens.x.shape[0], -1)  # (B, n)
        if similar:
            left = without_similar(feature, top(self.importance(attention, 1), step.entering), similar)  # (B, m)
        if left.shape[1] > step.leaving:
            attention = subgraph(attention, left, tokens.prefix) if similar else attention
            left = left.gather(1, top(self.importance(attention, rounds), step.leaving))
        return take(tokens, left)

    def importance(self, attention: torch.Tensor, rounds: int) -> torch.Tensor:
        """Of each patch token, (B, heads, prefix + n, prefix + n) to (B, n)."""
        score = votes(attention, rounds, self.config.start == "cls" and self.layout.cls)
        limits: Sequence[float] | None = self.config.variance
        return over_heads(score[..., self.layout.prefix :], limits)

    def macs(self, step: Step) -> int:
        prefix, similar = self.layout.prefix, step.ranked - step.leaving
        width = self.layout.attn_dim if self.config.feature == "key" else self.layout.embed_dim
        rounds = self.config.rounds(step.place.block, self.layout.depth)
        if self.config.stages == "is":
            compared, votes = step.ranked, rounds * (step.entering + prefix) ** 2
        else:
            compared, left = step.entering, step.entering - similar
            votes = (similar > 0) * (step.entering + prefix) ** 2
            votes += (left > step.leaving) * rounds * (left + prefix) ** 2
        less = compared // 2
        return self.layout.heads * votes + (similar > 0) * less * (compared - less) * width


def subgraph(attention: torch.Tensor, left: torch.Tensor, prefix: int) -> torch.Tensor:
    """The graph of the prefix tokens and some patch tokens, (B, heads, prefix + m, prefix + m), rows that sum to 1.

    Args:
        attention: (B, heads, prefix + n, prefix + n).
        left: (B, m), positions of the patch tokens that are left.
        prefix: How many prefix tokens there are.
    """
    first = torch.arange(prefix, device=left.device).expand(left.shape[0], -1)
    node = torch.cat([first, left + prefix], 1)[:, None]  # (B, 1, prefix + m)
    batch = torch.arange(attention.shape[0], device=left.device)[:, None, None, None]
    head = torch.arange(attention.shape[1], device=left.device)[:, None, None]
    among = attention[batch, head, node[..., :, None], node[..., None, :]]
    return among / among.sum(-1, keepdim=True)

"""Zero-TPrune: tokens vote for each other along the attention graph, and of similar tokens the less important go.

Source: Wang et al., "Zero-TPrune", CVPR 2024: importance (I-stage), similarity (S-stage) and their order (I'-S-I).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from tntprune.methods.base import Method, top
from tntprune.methods.checks import as_tuple, check, check_flags, check_words, is_int, is_number
from tntprune.methods.config import Config, option
from tntprune.methods.steps import Step, Turn
from tntprune.ops.attention import Heads
from tntprune.ops.similarity import nearest
from tntprune.ops.tokens import Tokens, pick, ranking, take


@dataclass(frozen=True)
class ZeroTPrune(Config):
    """Zero-TPrune (Wang et al., CVPR 2024): importance by PageRank on the attention graph, then similarity.

    Needs no training. Shares are truncated, and taken of the patches that arrive.

    Args:
        similar: Tokens of the less important half that are removed at each location for being like one of the more
            important half.
        beyond: They go beyond what `keep` or `tokens` leaves, as the paper does it; else they are a part of what goes.
        iterations: Rounds of voting at each location; one value, or one for each. None: 50 in the first quarter of the
            blocks, 5 in the middle, 1 in the last quarter, from the paper's 30 to 50, 5 to 10, and 1.
        start: Votes at first: "cls" gives the CLS token sqrt(n) times as many as any other (the paper's Zero-TPrune),
            "uniform" the same to all (its Zero-TPrune-uni), which is also what a model without CLS token gets.
        variance: Only heads take part whose scores, scaled to a mean of 1 over the patch tokens, have a variance within
            these limits; every head where none does. None takes every head. The paper has limits of 0.01 and 0.7, but
            not the scaling: with this one they leave out the heads that tell most (seen on the bundled digits model),
            so there are none by default.
        stages: "isi" ranks by one vote, removes similar tokens, then ranks what is left by PageRank and prunes (the
            paper's I'-S-I); "is" prunes by PageRank first, as the TNT paper's figures show that it ran.
        feature: What similarity is the cosine of: the "key"s of all heads, or the tokens themselves, "x".
    """

    method = "zerotprune"
    title = "Zero-TPrune"

    usual = 0.9
    listed = ("keep", "tokens", "iterations")

    at: int | Sequence[int] | None = option((1, 3, 6, 9, 11), "block or blocks after which tokens are removed")
    keep: float | Sequence[float] | None = option(None, "share of the patch tokens kept at each location (0.9)")
    similar: int = option(10, "tokens removed for being similar to a kept one")
    beyond: bool = option(True, "remove similar tokens on top of those that keep removes, not among them")
    iterations: int | Sequence[int] | None = option(None, "rounds of PageRank (50, 5 or 1, by depth)")
    start: Literal["cls", "uniform"] = option(
        "cls", "initial PageRank votes: more for the CLS token, or the same for all"
    )
    variance: Sequence[float] | None = option(
        None, "heads count only if the variance of their scores is between these two (none)"
    )
    stages: Literal["isi", "is"] = option(
        "isi", "isi: remove similar tokens, then prune; is: prune, then remove similar tokens"
    )
    feature: Literal["key", "x"] = option("key", "what similarity compares: keys, or tokens (x)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.locations[0] > 0, "at=0: no block has been seen whose attention could vote; expected 1 or larger")
        check(is_int(self.similar) and self.similar >= 0, f"similar={self.similar}: expected 0 or more tokens")
        check_flags(self, "beyond")
        check_words(self, "start", "stages", "feature")
        if self.iterations is not None:
            object.__setattr__(self, "iterations", as_tuple(self.iterations))
            self.check_length("iterations", len(self.locations))
            for value in self.iterations:  # type: ignore[union-attr]
                good = is_int(value) and 0 < value <= 1000
                check(good, f"iterations={value}: expected a whole number from 1 to 1000")
        if self.variance is not None:
            object.__setattr__(self, "variance", as_tuple(self.variance))
            good = len(self.variance) == 2 and all(is_number(value) for value in self.variance)
            good = good and 0 <= self.variance[0] < self.variance[1]
            check(good, f"variance={self.variance}: expected two ascending limits, such as 0.01 0.7")

    @property
    def reads(self) -> bool:
        return True

    def rounds(self, block: int, depth: int) -> int:
        """Return the rounds of voting after a block."""
        if self.iterations is not None:
            given: tuple[int, ...] = self.iterations  # type: ignore[assignment]
            return given[self.locations.index(block)] if len(given) > 1 else given[0]
        return 50 if block <= depth / 4 else 1 if block > 3 * depth / 4 else 5

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        """`ranked` is what ranking alone leaves, `leaving` what is left when the similar tokens are gone as well."""
        stay = self.stay(turn, count)
        if self.beyond:
            similar = min(self.similar, stay // 2, stay - 1)  # one group loses tokens, and one token stays
            return Step(turn.place, count, stay, stay - similar) if stay - similar < count else None
        extra = min(self.similar, count - stay, stay)
        return Step(turn.place, count, stay + extra, stay) if stay < count else None


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


class ZeroTokenPruning(Method):
    """Prefix tokens vote and are voted for as any other token, but never ranked."""

    looks = "map"
    config: ZeroTPrune

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        assert heads is not None
        attention = heads.map().detach().float()  # (B, heads, prefix + n, prefix + n)
        feature = tokens.patches  # (B, n, D)
        if self.config.feature == "key":
            feature = heads.key.transpose(1, 2).flatten(2)[:, tokens.prefix :]  # (B, n, C), of all heads
        rounds, similar = self.config.rounds(step.place.block, self.layout.depth), step.ranked - step.leaving
        if self.config.stages == "is":
            stay = top(self.importance(attention, rounds), step.ranked)  # (B, ranked)
            return take(tokens, without_similar(feature, stay, similar) if similar else stay)
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
    """Return the graph of the prefix tokens and m patch tokens, (B, heads, prefix + m, prefix + m); rows sum to 1.

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

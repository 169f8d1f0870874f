"""ATC: tokens become clusters bottom-up, the two that are closest first, wherever they are.

Source: Haurum et al., "Agglomerative Token Clustering", ECCV 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from tntprune.methods.checks import check_words
from tntprune.methods.config import option
from tntprune.methods.steps import Step, Turn
from tntprune.methods.tome import TokenMerging, ToMe
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens, merge, pick, ranking


@dataclass(frozen=True)
class ATC(ToMe):
    """Agglomerative Token Clustering (Haurum et al., ECCV 2024): clusters of tokens, the closest two merged first.

    Each token starts as a cluster. The two clusters with the smallest distance become one, until so many are left as
    tokens are wanted. The tokens of a cluster become their mean, weighted by how many patches each stands for. One
    step for each token that goes, over a table of all pairs: for many tokens it is slow.

    Args:
        at: Blocks at which tokens are merged.
        keep: Share of the patch tokens that arrive, truncated. 0.7 unless `tokens` or `r` is given.
        r: Tokens merged away at each location; one value or one for each location. One token always stays.
        linkage: The distance of two clusters: the largest of the distances of their tokens ("complete"), their mean
            ("average"), or the smallest ("single").
        metric: The distance of two tokens is 1 - cosine of these: the keys' "mean" over heads, as published, the
            "concat"enated keys, or the tokens themselves, "x".
    """

    method = "atc"
    title = "ATC"
    without = ("window",)

    untimed = "tells little of its time: each token that goes takes a step of its own"
    everywhere = False
    usual = 0.7

    at: int | Sequence[int] | None = option((4, 7, 10), "block or blocks at which tokens are merged")
    keep: float | Sequence[float] | None = option(None, "share of the patch tokens kept at each location (0.7)")
    r: int | Sequence[int] | None = option(None, "tokens merged away at each location, instead of a share")
    linkage: Literal["complete", "average", "single"] = option(
        "complete", "distance of two clusters: the largest, the mean or the smallest of their tokens' distances"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self, "linkage")

    @property
    def rs(self) -> tuple[int, ...]:
        return self.r or ()  # type: ignore[return-value]

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        if not self.rs:
            return super().step(turn, count, patches)
        gone = min(self.merged(turn.number, turn.of), count - 1)
        return Step(turn.place, count, count - gone, count - gone) if gone else None


class AgglomerativeClustering(TokenMerging):
    """Hierarchical clustering with Lance and Williams' updates of the distances. Prefix tokens take no part."""

    config: ATC

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        x = F.normalize(self.compared(tokens, heads).detach().float(), dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            distance = 1 - x @ x.transpose(1, 2)  # (B, n, n)
        first = clusters(distance, step.entering - step.leaving, self.config.linkage)  # (B, n)
        alone = (first == torch.arange(first.shape[1], device=first.device)).int()  # the first of its cluster
        place = ranking(alone, descending=True)  # those first, all in their order
        stay, go = place[:, : step.leaving], place[:, step.leaving :]
        number = alone.cumsum(1) - 1  # of each cluster, in the order of its first token
        target = number.gather(1, first.gather(1, go))
        return merge(tokens, stay[:, :0], stay, go, target, average=self.average(step.place.block))

    def macs(self, step: Step) -> int:
        """Count the distances, 2 n for each merger by their mean, and D for each token that is merged away."""
        n = step.entering
        gone = n - step.leaving
        updates = 2 * n * gone if self.config.linkage == "average" else 0
        return n**2 * self.width + updates + gone * self.layout.embed_dim


def clusters(distance: torch.Tensor, mergers: int, linkage: Literal["complete", "average", "single"]) -> torch.Tensor:
    """Merge the two closest clusters, so many times, beginning with a cluster for each token.

    A cluster has the row and the column of its first token; those of its others are infinite. Of equal distances the
    one counts as the smallest that comes first, row by row.

    Args:
        distance: (B, n, n), finite; what stands above the diagonal counts.
        mergers: How often, less than n.
        linkage: The distance of two clusters; see `ATC`.

    Returns:
        (B, n), the position of the first token of each token's cluster.
    """
    n = distance.shape[1]
    place = torch.arange(n, device=distance.device)
    upper = distance.triu(1)
    table = (upper + upper.transpose(1, 2)).masked_fill(place[:, None] == place, torch.inf)
    first = place.expand(distance.shape[0], -1)
    size = torch.ones_like(distance[:, 0])  # (B, n)
    for _ in range(mergers):
        one = table.amin(2).argmin(1, keepdim=True)  # (B, 1); four times as fast as argmin over the whole table
        a = pick(table, one)[:, 0]  # (B, n)
        other = a.argmin(1, keepdim=True)  # behind `one`, because the table is symmetric
        b, pair = pick(table, other)[:, 0], torch.cat([one, other], 1)  # (B, n), (B, 2)
        if linkage == "average":
            weight = size.gather(1, pair)  # (B, 2)
            total = weight.sum(1, keepdim=True)
            merged = (a * weight[:, :1] + b * weight[:, 1:]) / total
            size = size.scatter(1, one, total)
        else:
            merged = torch.maximum(a, b) if linkage == "complete" else torch.minimum(a, b)
        merged = merged.scatter(1, pair, torch.inf)  # not to itself
        rows = torch.stack([merged, torch.full_like(merged, torch.inf)], 1)  # (B, 2, n)
        where = pair[:, :, None].expand(-1, -1, n)
        table.scatter_(1, where, rows).scatter_(2, where.transpose(1, 2), rows.transpose(1, 2))
        first = torch.where(first == other, one, first)
    return first

"""MCTF: tokens become one that are alike, that little attention goes to, and that stand for few patches.

Source: Lee et al., "Multi-criteria Token Fusion with One-step-ahead Attention for Efficient Vision Transformers", CVPR
2024, sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from tntprune.methods.base import Layout
from tntprune.methods.checks import check, is_number
from tntprune.methods.config import option
from tntprune.methods.steps import Step
from tntprune.methods.tome import TokenMerging, ToMe
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens, in_order, merge, pick, ranking, row_blocks

RAREST = 1e-9  # attention, and (1 + cosine) / 2, below it count as this much: their logarithms are numbers


@dataclass(frozen=True)
class MCTF(ToMe):
    """Multi-criteria Token Fusion (Lee et al., CVPR 2024): ToMe's pairs by likeness, received attention and size.

    The attraction of two tokens is ((1 + cosine) / 2) ** similarity_power, times (1 / (a1 * a2)) ** attention_power,
    times (1 / (s1 * s2)) ** size_power, with the attention a that each receives and its size s. Half of the tokens that
    go join one of the other half, then the other way round. A fused token is the mean, weighted by size and attention.

    The paper weighs tokens by the attention of the block that follows, and calls it one-step-ahead: it takes that
    block's attention map, fuses the tokens that enter the block and then the map's rows and columns, and goes on with
    what is left. Here that block's attention is computed as ever, and the tokens are fused between it and the MLP. The
    map is the same one; the values are summed up before tokens are fused instead of after, and tokens are compared
    with what attention gave them.

    Args:
        at: Blocks at which tokens are fused; None is every block but the first, as published.
        r: Tokens that go at each location, at most half of those that arrive; one value or one for each location.
            8 unless `keep` or `tokens` is given. (The paper has 16.)
        inside: Fuse between the block's attention and its MLP; else after the block, where the attention is that of the
            block before: the paper's ablation.
        metric: What is compared: the tokens themselves, "x", as published, or their keys as in ToMe.
        similarity_power: How much likeness counts.
        attention_power: How much it counts that tokens receive little attention.
        size_power: How much it counts that tokens stand for few patches.
    """

    method = "mctf"
    title = "MCTF"
    without = ("window",)

    earliest = 2

    at: int | Sequence[int] | None = option(None, "block or blocks at which tokens are fused (all but the first)")
    r: int | Sequence[int] | None = option(None, "tokens that go at each location (8)")
    metric: Literal["mean", "concat", "x"] = option(
        "x", "what is compared: tokens (x), the mean of the heads' keys (mean), or all keys side by side (concat)"
    )
    similarity_power: float = option(1.0, "how much likeness counts")
    attention_power: float = option(1 / 20, "how much it counts that tokens receive little attention")
    size_power: float = option(1 / 40, "how much it counts that tokens stand for few patches")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 not in self.locations, "at=0: no block has been seen whose attention could weigh; expected 1 or larger")
        for name in ("similarity_power", "attention_power", "size_power"):
            value = getattr(self, name)
            check(is_number(value) and value >= 0, f"{name}={value!r}: expected a number, 0 or larger")

    @property
    def reads(self) -> bool:
        return True


class MultiCriteriaFusion(TokenMerging):
    """Bidirectional bipartite matching by three criteria. Prefix tokens attend as any other, and take no part.

    The attention that tokens receive is the mean over a map's heads and rows. The block's own map is used, at no cost,
    unless it has more entries than `TABLE`: then fused attention stays in use, and the map is made a second time in
    blocks of rows.
    """

    looks = "heads"
    config: MCTF

    def sees(self, step: Step) -> Literal["", "heads", "map"]:
        return "map" if self.holds_map(step) else "heads"

    def holds_map(self, step: Step) -> bool:
        """Return whether a block's attention map is small enough to be kept for the step."""
        n = self.layout.prefix + step.entering
        return len(row_blocks(n, n * self.layout.heads)) == 1

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        assert heads is not None
        config, odd = self.config, tokens.prefix % 2
        average = self.average(step.place.block)
        attention = received(heads)[:, tokens.prefix :].clamp(min=RAREST)  # (B, n)
        size = torch.ones_like(attention) if tokens.size is None else tokens.size
        compared = replace(tokens, x=self.compared(tokens, heads), prefix=0, carrier=None)
        # Of each patch in a token: the attention that it receives, and what it counts for in means.
        about = replace(compared, x=torch.stack([attention / size, attention], 2), size=size)
        while tokens.count > step.leaving:
            assert about.size is not None
            gone = min(tokens.count - step.leaving, tokens.count // 2)
            attention, weight = about.x[:, :, 0] * about.size, about.x[:, :, 1] * about.size
            pull = -config.attention_power * attention.log() - config.size_power * about.size.log()
            stay, source, target = match(compared.x, pull, gone, odd, config.similarity_power)
            none = stay[:, :0]
            about = merge(about, none, stay, source, target)
            tokens = merge(replace(tokens, size=weight), none, stay, source, target, average)
            tokens = replace(tokens, size=about.size)
            if tokens.count > step.leaving:  # what is compared of a fused token is the mean of its tokens'
                compared = merge(replace(compared, size=weight), none, stay, source, target)
        return tokens

    def macs(self, step: Step) -> int:
        """Count the comparisons, D for each token that is merged away, and the map where it is made again."""
        layout = self.layout
        cost = 0 if self.holds_map(step) else (layout.prefix + step.entering) ** 2 * layout.attn_dim
        count = step.entering
        while count > step.leaving:
            gone = min(count - step.leaving, count // 2)
            second = (count + layout.prefix % 2) // 2
            first = count - second
            cost += first * second * self.width
            if len(row_blocks(first, second)) > 1:  # compared again on the way back
                cost += (first - gone // 2) * second * self.width
            count -= gone
        return cost + (step.entering - step.leaving) * layout.embed_dim

    @classmethod
    def obstacle(cls, layout: Layout, config: MCTF | None = None) -> str | None:  # type: ignore[override]
        return super(TokenMerging, cls).obstacle(layout, config)  # no option spares it the attention


def received(heads: Heads) -> torch.Tensor:
    """Return the attention that each token receives, the mean over heads and over all tokens, (B, n) in fp32.

    Where there is no map, one is made in blocks of rows. No gradient goes through.
    """
    if heads.attention is not None:
        return heads.attention.detach().float().mean((1, 2))
    of, n = heads.query.shape[1:3]
    with torch.no_grad():
        parts = [heads.asked(rows).map().sum((1, 2)) for rows in row_blocks(n, n * of)]
    return torch.stack(parts).sum(0) / (n * of)


def match(
    x: torch.Tensor, pull: torch.Tensor, gone: int, odd: int, power: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pair tokens of A with tokens of B, then tokens of B with what is left of A, the strongest attractions first.

    As published, half of the tokens that go, rounded down, go from A to B. The attractions stay those of the tokens
    that arrived; a token of B may go that has just taken one in.

    Args:
        x: (B, n, width), what is compared.
        pull: (B, n), the logarithm of what each token adds to its attractions by itself.
        gone: How many tokens go, at most n // 2.
        odd: Whether the number of prefix tokens is odd, so that A starts with the second patch, else with the first.
        power: Of the likeness.

    Returns:
        Positions of the tokens that stay, in the order in which they are to stand (B, n - gone), and of those that go
        (B, gone); and where among the first each of these goes (B, gone).
    """
    x = F.normalize(x.detach().float(), dim=-1)
    place = torch.arange(x.shape[1], device=x.device)
    (first, second), (own, other) = ((one[:, odd::2], one[:, 1 - odd :: 2]) for one in (x, pull))
    there = gone // 2
    table = None
    if len(row_blocks(first.shape[1], second.shape[1])) == 1:
        table = attraction(first, second, own, other, power)  # (B, |A|, |B|)
    value, best = strongest(first, second, own, other, power) if table is None else table.max(2)  # (B, |A|) each
    ranked = ranking(value, descending=True)
    go, stay = ranked[:, :there], in_order(ranked[:, there:])
    if table is None:
        value, into = strongest(second, pick(first, stay), other, own.gather(1, stay), power)
    else:
        value, into = pick(table, stay).max(1)  # (B, |B|) each; into: where in `stay`
    ranked = ranking(value, descending=True)
    back, left = ranked[:, : gone - there], in_order(ranked[:, gone - there :])
    ends = torch.cat([left, back], 1)  # all of B
    behind = stay.shape[1] + torch.arange(left.shape[1], device=x.device).expand_as(left)
    lands = torch.zeros_like(ends).scatter(1, ends, torch.cat([behind, into.gather(1, back)], 1))  # (B, |B|)
    return (
        torch.cat([place[odd::2][stay], place[1 - odd :: 2][left]], 1),
        torch.cat([place[odd::2][go], place[1 - odd :: 2][back]], 1),
        torch.cat([lands.gather(1, best.gather(1, go)), into.gather(1, back)], 1),
    )


def attraction(
    first: torch.Tensor, second: torch.Tensor, own: torch.Tensor, other: torch.Tensor, power: float
) -> torch.Tensor:
    """Return the logarithm of the attraction of each pair, (B, a, b).

    Args:
        first: (B, a, width), of length 1.
        second: (B, b, width), of length 1.
        own: (B, a), what each of the first adds.
        other: (B, b), what each of the second adds.
        power: Of the likeness, (1 + cosine) / 2.
    """
    with torch.autocast(first.device.type, enabled=False):
        likeness = (1 + first @ second.transpose(1, 2)) / 2
    return likeness.clamp(min=RAREST).log() * power + own[:, :, None] + other[:, None]


def strongest(
    first: torch.Tensor, second: torch.Tensor, own: torch.Tensor, other: torch.Tensor, power: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each first token's largest `attraction`, and where in `second` it is, (B, a) each; in blocks of rows."""
    found = [
        attraction(first[:, rows], second, own[:, rows], other, power).max(2)
        for rows in row_blocks(first.shape[1], second.shape[1])
    ]
    return torch.cat([one.values for one in found], 1), torch.cat([one.indices for one in found], 1)

"""DTEM: ToMe by an embedding of its own, which learns from a merging that is soft.

Source: Lee and Hong, "Learning to Merge Tokens via Decoupled Embedding for Efficient Vision Transformers", NeurIPS
2024, section 3: decoupled embedding, soft grouping and soft merging. Temperatures, the number of neighbours and the
order of tokens in training are the authors' code's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from tntprune.errors import UsageError
from tntprune.methods.base import Layout
from tntprune.methods.checks import check, check_whole, check_words, is_number
from tntprune.methods.config import Config, option
from tntprune.methods.layers import Affine
from tntprune.methods.steps import Plan, Step
from tntprune.methods.tome import TokenMerging, ToMe, passes
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens, ranking, size_bias, take

MAX_WIDTH = 4096
EPS = torch.finfo(torch.float32).eps
SCALE = 8.0  # of the first weights, which no cosine sees: it makes the usual learning rate small beside them


@dataclass(frozen=True)
class DTEM(ToMe):
    """DTEM (Lee and Hong, NeurIPS 2024): ToMe, with tokens compared by an embedding that is learned for it.

    At each location a linear layer makes the embedding; it is all that is learned, and the model stays frozen. At test
    time tokens are merged as in `ToMe`, by the cosine of their embeddings. In training all of them stay: each goes in
    part into others, and counts in attention by what is left of its size.

    The layer starts as the mean of the heads' keys, where `width` is their width, so that before training this is ToMe.
    (The authors start from random numbers. Their layer reads what queries and keys are made from.)

    Args:
        window: See `ToMe`. At test time; training compares all.
        r: See `ToMe`. Training makes as many pairs as at test time; what is learned can be used with other numbers.
        metric: What the linear layer reads: all keys side by side, "concat", their "mean" over heads, or the tokens,
            "x", after a LayerNorm without weights.
        width: Of the embedding; 64 as published.
        temperature: Of the softmax over pairs in training. As in the authors' code it divides the cosines, and then
            once more what is left of them after each choice.
        neighbours: In training each token can go only into so many tokens, those most like it.
        objective: "kl", divergence from the unpruned model, which needs no labels, or "ce", cross-entropy to the
            labels, as published.
    """

    method = "dtem"
    title = "DTEM"

    metric: Literal["mean", "concat", "x"] = option("concat", "what the embedding is made from", learned=True)
    width: int = option(64, "width of the embedding", learned=True)
    temperature: float = option(0.1, "temperature of the softmax over pairs in training")
    neighbours: int = option(3, "tokens that each one can go into in training")
    objective: Literal["kl", "ce"] = option("kl", "train against labels (ce) or the unpruned model (kl)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self, "objective")
        check_whole("width", self.width, 1, MAX_WIDTH)
        check_whole("neighbours", self.neighbours, 1)
        warm = is_number(self.temperature) and self.temperature > 0
        check(warm, f"temperature={self.temperature}: expected above 0")

    @property
    def must_train(self) -> bool:
        return True


class DecoupledMerging(TokenMerging):
    """In training each choice of a pair is a softmax over all of them, and tokens shrink instead of going."""

    trains = True
    config: DTEM

    def __init__(self, config: DTEM, layout: Layout) -> None:
        super().__init__(config, layout)
        self.ce, self.kl = (1.0, 0.0) if config.objective == "ce" else (0.0, 1.0)
        generator = torch.Generator().manual_seed(0)
        self.embeddings = nn.ModuleDict()
        for block in config.blocks(layout.depth):
            layer = Affine(self.width, config.width, generator)
            layer.weight.data *= SCALE
            if config.metric != "x":
                self.start_as_mean(layer)
            self.embeddings[str(block)] = layer

    @torch.no_grad()
    def start_as_mean(self, layer: Affine) -> None:
        """Let a layer give the mean of the heads' keys, as far as its width reaches."""
        head_dim = self.layout.attn_dim // self.layout.heads
        heads = layer.weight.shape[1] // head_dim
        rows = min(self.config.width, head_dim)
        layer.weight[:rows] = torch.eye(head_dim)[:rows].repeat(1, heads) / heads * SCALE

    def compared(self, tokens: Tokens, heads: Heads | None) -> torch.Tensor:
        """Return the embedding of each patch token, (B, n, width) in fp32. Gradients reach the linear layer alone."""
        read = super().compared(tokens, heads).detach().float()
        if self.config.metric == "x":
            read = F.layer_norm(read, read.shape[-1:], eps=1e-6)
        with torch.autocast(read.device.type, enabled=False):
            return self.embeddings[str(tokens.block)](read)  # type: ignore[no-any-return]

    def plan(self, patches: int) -> Plan:
        """Return in training a plan in which sizes count in attention, without what nothing reads."""
        if not self.training:
            return super().plan(patches)
        steps = self.steps(patches)
        if self.layout.pool == "token":  # nothing reads patches behind the last block's attention
            steps = tuple(step for step in steps if step.place.block < self.layout.depth)
            if not steps and self.steps(patches):
                raise UsageError(
                    f"at={self.layout.depth}: nothing reads patch tokens behind the last block's attention, so nothing "
                    "is learned there; expected an earlier block among the locations"
                )
        first = min((step.place.block for step in steps), default=self.layout.depth)
        return tuple(block._replace(biased=number > first) for number, block in enumerate(self.planned(steps)))

    def bias(self, tokens: Tokens, block: int) -> torch.Tensor | None:
        if self.training and tokens.size is not None:  # else what has gone elsewhere would still be seen
            return size_bias(tokens, 1)
        return super().bias(tokens, block)

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        """Merge as ToMe does; in training softly, where `step.entering` tokens take part and all stay."""
        if not self.training:
            return super().forward(tokens, step, heads)
        features = replace(tokens, x=self.compared(tokens, heads), prefix=0, carrier=None)
        odd = tokens.prefix % 2
        for count, gone in passes(step):
            x = features.x[:, :count]
            share = chosen_softly(
                x[:, odd::2], x[:, 1 - odd :: 2], gone, self.config.neighbours, self.config.temperature
            )
            tokens = merge_softly(tokens, share, count, odd)
            if count - gone > step.leaving:
                features = merge_softly(features, share, count, odd)
        return tokens

    def macs(self, step: Step) -> int:
        """Count the embedding, the comparisons, and D for each token that is averaged with others."""
        width, layout = self.config.width, self.layout
        norm = 5 * layout.embed_dim * (self.config.metric == "x")
        pairs = sum(self.comparisons(count, gone) for count, gone in passes(step))
        own = step.entering * (self.width * width + norm) + pairs * width
        averaged = 0 if self.average(step.place.block) == "none" else step.entering - step.leaving
        return own + averaged * layout.embed_dim

    @classmethod
    def obstacle(cls, layout: Layout, config: Config | None = None) -> str | None:
        if not layout.opens:
            return "it learns by letting the sizes of tokens count in attention, to which its blocks give no access"
        return None


def chosen_softly(
    first: torch.Tensor, second: torch.Tensor, gone: int, neighbours: int, temperature: float
) -> torch.Tensor:
    """Return how much of each token of one group goes into each of the other: soft grouping, the paper's section 3.2.

    One after the other, `gone` pairs are chosen, each by a softmax over all pairs. What has been chosen of a token is
    taken off the logits of all of its pairs, so that none goes twice.

    Args:
        first: (B, a, width), embeddings of those that can go, in fp32.
        second: (B, b, width), of those into which they can.
        gone: How many pairs.
        neighbours: Pairs of each of the first, the most alike.
        temperature: Of the softmax, see `DTEM`.

    Returns:
        (B, a, b) in fp32, each row with a sum from 0 to 1.
    """
    with torch.autocast(first.device.type, enabled=False):
        alike = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).transpose(1, 2)  # (B, a, b)
    near, target = alike.topk(min(neighbours, alike.shape[2]), dim=2)  # (B, a, k)
    logits, total = near / temperature, torch.zeros_like(near)
    for _ in range(gone):
        share = (logits / temperature).flatten(1).softmax(1).view_as(logits)  # over all pairs of an image
        total = total + share
        logits = logits + (1 - share.sum(2, keepdim=True)).clamp(min=EPS).log()
    total = total / total.detach().sum(2, keepdim=True).clamp(min=1)
    return torch.zeros_like(alike).scatter(2, target, total)


def merge_softly(tokens: Tokens, share: torch.Tensor, count: int, odd: int) -> Tokens:
    """Let each token of A go in part into those of B: soft merging, the paper's section 3.3.

    Tokens of B become the mean, weighted by sizes, of themselves and what goes into them. Tokens of A stay as they are
    and lose that part of their size. The `count` then stand by size, the largest first: the smallest take no part the
    next time.

    Args:
        tokens: n patch tokens, of which the first `count` take part.
        share: (B, a, b), how much of each token of A goes into each of B.
        count: How many take part.
        odd: Whether A starts with the second of them, else with the first.

    Returns:
        n patch tokens.
    """
    place = torch.arange(tokens.count, device=share.device)
    parts = place[odd:count:2], place[1 - odd : count : 2], place[count:]
    size = torch.ones_like(tokens.index, dtype=torch.float32) if tokens.size is None else tokens.size
    tokens = take(replace(tokens, size=size), torch.cat(parts).expand(share.shape[0], -1))  # A, B, the others
    assert tokens.size is not None
    a, b = share.shape[1:]
    first, second, others = tokens.size.split([a, b, tokens.count - a - b], 1)
    prefix, light, heavy, rest = tokens.x.split([tokens.prefix, a, b, tokens.count - a - b], 1)
    left = 1 - share.sum(2)
    left = left + (left.clamp(0, 1) - left).detach()  # rounding may go below 0, where no gradient should end
    with torch.autocast(share.device.type, enabled=False):
        moved = (share * first[:, :, None]).transpose(1, 2)  # (B, b, a), in patches
        larger = second + moved.sum(2)  # (B, b)
        mean = (second / larger)[:, :, None] * heavy.to(share.dtype) + (moved / larger[:, :, None]) @ light.to(
            share.dtype
        )
    sizes = torch.cat([first * left, larger], 1)  # (B, count)
    x = torch.cat([prefix, light, mean.to(tokens.x.dtype), rest], 1)
    largest = ranking(sizes.detach(), descending=True)
    last = torch.arange(count, tokens.count, device=share.device).expand(share.shape[0], -1)
    return take(replace(tokens, x=x, size=torch.cat([sizes, others], 1)), torch.cat([largest, last], 1))

"""ToMe: in each block the tokens that are most alike become one.

Source: Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023, section 3; built from the paper alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch

from tntprune.attention import Heads
from tntprune.config import ToMe
from tntprune.methods.base import Layout, Method, Plan, implements
from tntprune.methods.similar import nearest
from tntprune.schedule import Step
from tntprune.tokens import Tokens, in_order, merge, ranking


@implements(ToMe)
class TokenMerging(Method):
    """Bipartite soft matching: each token of set A points to its match in set B, and the likeliest pairs are merged.

    Prefix tokens count when the sequence is dealt out to A and B in turn, as published, but take no part: with one of
    them the first patch is in B, with none or two in A.
    """

    config: ToMe

    def __init__(self, config: ToMe, layout: Layout) -> None:
        super().__init__(config, layout)
        self.proportional = config.proportional

    def sees(self, block: int, plan: Plan) -> Literal["", "heads", "map"]:
        acts = self.config.metric != "x" and any(place.block == block for place in plan)
        return "heads" if acts else ""

    def compared(self, tokens: Tokens, heads: Heads | None) -> torch.Tensor:
        """What is compared of each patch token, (B, n, width)."""
        if self.config.metric == "x":
            return tokens.patches
        assert heads is not None
        key = heads.key[:, :, tokens.prefix :].float()  # (B, heads, n, head_dim)
        return key.mean(1) if self.config.metric == "mean" else key.transpose(1, 2).flatten(2)

    def reduce(self, tokens: Tokens, step: Step, heads: Heads | None) -> Tokens:
        features = replace(tokens, x=self.compared(tokens, heads), prefix=0, source=None)
        for count, gone in _passes(step):
            pairs = match(features.x, gone, odd=tokens.prefix % 2)
            tokens = merge(tokens, *pairs)  # count - gone patch tokens
            if count - gone > step.leaving:  # what is compared of a merged token is the mean of its tokens'
                features = merge(features, *pairs)
        return tokens

    def macs(self, step: Step) -> int:
        """The comparisons, as in the paper's closed form; merging is a weighted sum of tokens, D for each that goes."""
        layout, metric = self.layout, self.config.metric
        width = {"mean": layout.attn_dim // layout.heads, "concat": layout.attn_dim, "x": layout.embed_dim}[metric]
        pairs = sum((count // 2) * (count - count // 2) for count, _ in _passes(step))
        return pairs * width + (step.entering - step.leaving) * layout.embed_dim

    @classmethod
    def obstacle(cls, layout: Layout, config: ToMe | None = None) -> str | None:  # type: ignore[override]
        if layout.opens or config is None:  # without a config: there is one that would do
            return None
        wanted = {"inside": False, "metric": "x", "proportional": False}
        others = [f"{name}={value!r}" for name, value in wanted.items() if getattr(config, name) != value]
        why = "its blocks cannot be opened to merge inside them, to compare keys or to let sizes count in attention"
        return f"{why}; {', '.join(others)} would do" if others else None


def match(x: torch.Tensor, gone: int, odd: int) -> tuple[torch.Tensor, ...]:
    """Pair each token of A with the most similar one of B, and choose the most similar pairs.

    Args:
        x: (B, n, width), what is compared.
        gone: How many pairs, at most n // 2.
        odd: Whether the number of prefix tokens is odd, so that A starts with the second patch, else with the first.

    Returns:
        Positions as `merge` takes them: the tokens of A that stay, in their order (B, |A| - gone); B (|B|,); the
        tokens of A that go (B, gone); and where in B each of these goes (B, gone).
    """
    closest, best = nearest(x[:, odd::2], x[:, 1 - odd :: 2])  # (B, |A|) each
    ranked = ranking(closest, descending=True)
    go, stay = ranked[:, :gone], in_order(ranked[:, gone:])
    into = torch.arange(1 - odd, x.shape[1], 2, device=x.device)
    return 2 * stay + odd, into, 2 * go + odd, best.gather(1, go)


def _passes(step: Step) -> Iterator[tuple[int, int]]:
    """Tokens that arrive and tokens that go, pass by pass: at most half of them, as published, which A always holds."""
    count = step.entering
    while count > step.leaving:
        gone = min(count - step.leaving, count // 2)
        yield count, gone
        count -= gone

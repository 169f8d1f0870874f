"""EViT: Top-K by the CLS token's attention, and one token that sums up what was dropped.

Source: Liang et al., "Not All Patches are What You Need", ICLR 2022, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tntprune.methods.base import Method
from tntprune.methods.checks import as_tuple, check, check_flags, is_number
from tntprune.methods.config import option
from tntprune.methods.steps import Plan, Step, Turn, ceiled
from tntprune.methods.topk import Attended, readers, received
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens, append, pick, ranking, take


@dataclass(frozen=True)
class EViT(Attended):
    """EViT (Liang et al., ICLR 2022): Top-K, and one more token that sums up those that were dropped.

    Shares are rounded up and taken of the patch tokens that arrive, an earlier fused token among them; the fused token
    comes on top. It takes part as any other patch token from there on. It has no place in the grid: in a trace its
    index is -1.

    Args:
        inside: Drop between the block's attention and its MLP, as published; else after the block.
        rows: Whose attention ranks: the "cls" token's, or the "mean" of the CLS and the distillation token's.
        fuse: Add the fused token.
        normalise: Weights of the fused token sum to 1; as published they are the CLS token's attentions as they are.
        anneal: From and to which share of a fine-tuning the kept share falls, by a cosine, from 1 to its value; None
            trains at its value throughout, as the authors' fine-tuning does. (Their training from scratch: 10 to 110
            of 300 epochs.)
    """

    method = "evit"
    title = "EViT"

    usual = 0.7

    at: int | Sequence[int] | None = option((4, 7, 10), "block or blocks at which tokens are removed")
    keep: float | Sequence[float] | None = option(None, "share of the patch tokens kept at each location (0.7)")
    fuse: bool = option(True, "add the dropped tokens, weighted by attention, as one token")
    normalise: bool = option(False, "let the weights of the dropped tokens sum to 1")
    anneal: Sequence[float] | None = option(
        None, "start and end, as shares of the training, between which keep falls from 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "fuse", "normalise")
        if self.anneal is not None:
            object.__setattr__(self, "anneal", as_tuple(self.anneal))
            good = len(self.anneal) == 2 and all(is_number(share) for share in self.anneal)
            good = good and 0 <= self.anneal[0] < self.anneal[1] <= 1
            check(good, f"anneal={self.anneal}: expected two ascending shares of the training, such as 0 0.5")

    def stay(self, turn: Turn, count: int) -> int:
        """Patch tokens that stay of `count`, without the fused one: shares are rounded up."""
        return ceiled(count, self.amount(turn.number)) if self.tokens is None else super().stay(turn, count)

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        stay = self.stay(turn, count)
        return Step(turn.place, count, stay, stay + self.fuse) if stay < count else None


class ExpediteViT(Method):
    """Prefix tokens never take part in ranking, so that distilled models come out right."""

    looks = "heads"
    needs_cls = True
    config: EViT

    def plan(self, patches: int) -> Plan:
        if not self.training or self.config.anneal is None:
            return super().plan(patches)
        return self.planned(self.annealed(patches))

    def annealed(self, patches: int) -> list[Step]:
        """Return the steps of a training step: the share of kept tokens falls from 1 to its value by half a cosine."""
        first, last = self.config.anneal  # type: ignore[misc]
        done = min(1.0, max(0.0, (self.trained - first) / (last - first)))
        whole = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
        steps, count = [], patches
        for step in self.steps(patches):
            share = step.ranked / step.entering
            stay = min(count, math.ceil(count * (share + (1 - share) * whole) - 1e-9))
            if stay < count:
                steps.append(Step(step.place, count, stay, stay + self.config.fuse))
                count = stay + self.config.fuse
        return steps

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        assert heads is not None
        score = received(heads, readers(self.config.rows, self.layout), tokens.prefix)  # (B, n), sums to at most 1
        ranked = ranking(score, descending=True)
        kept, dropped = ranked[:, : step.ranked], ranked[:, step.ranked :]
        if not self.config.fuse:
            return take(tokens, kept)
        weight = score.gather(1, dropped)  # (B, n - k)
        if self.config.normalise:
            weight = weight / weight.sum(1, keepdim=True)
        fused = weight.to(tokens.x.dtype)[:, None] @ pick(tokens.patches, dropped)  # (B, 1, D)
        return append(take(tokens, kept), fused)  # (B, prefix + k + 1, D)

    def macs(self, step: Step) -> int:
        rows = readers(self.config.rows, self.layout) * (step.entering + self.layout.prefix) * self.layout.attn_dim
        return rows + self.config.fuse * (step.entering - step.ranked) * self.layout.embed_dim

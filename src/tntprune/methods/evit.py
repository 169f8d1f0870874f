"""EViT: Top-K by the CLS token's attention, and one token that sums up what was dropped.

Source: Liang et al., "Not All Patches are What You Need", ICLR 2022, section 3.
"""

from __future__ import annotations

import math

from tntprune.attention import Heads
from tntprune.config import EViT
from tntprune.methods.base import Method, Plan, implements
from tntprune.methods.topk import readers, received
from tntprune.schedule import Step
from tntprune.tokens import Tokens, append, pick, ranking, take


@implements(EViT)
class ExpediteViT(Method):
    """Prefix tokens never take part in ranking, so that distilled models come out right."""

    looks = "heads"
    needs_cls = True
    config: EViT

    def plan(self, patches: int) -> Plan:
        if not self.training or self.config.anneal is None:
            return super().plan(patches)
        return self.annealed(patches)

    def annealed(self, patches: int) -> Plan:
        """The plan of a training step: what is kept falls from all to its share by half a cosine."""
        first, last = self.config.anneal  # type: ignore[misc]
        done = min(1.0, max(0.0, (self.trained - first) / (last - first)))
        whole = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
        plan, count = {}, patches
        for step in super().plan(patches).values():
            share = step.ranked / step.entering
            stay = min(count, math.ceil(count * (share + (1 - share) * whole) - 1e-9))
            if stay < count:
                plan[step.place] = Step(step.place, count, stay, stay + self.config.fuse)
                count = stay + self.config.fuse
        return plan

    def reduce(self, tokens: Tokens, step: Step, heads: Heads | None) -> Tokens:
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

"""Evo-ViT: informative tokens go through the blocks, one representative goes for all the others.

Source: Xu et al., "Evo-ViT: Slow-Fast Token Evolution for Dynamic Vision Transformer", AAAI 2022, sections on global
class attention and slow-fast updating. The authors' code for DeiT has no representative; this is the paper's method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tntprune.methods.base import Method
from tntprune.methods.checks import check, is_number
from tntprune.methods.config import Config, option
from tntprune.methods.steps import Place, Plan, Step, Turn
from tntprune.methods.topk import received
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import Tokens, append, pick, ranking, take


@dataclass(frozen=True)
class EvoViT(Config):
    """Evo-ViT (Xu et al., AAAI 2022): informative tokens go through the blocks, the rest follow a representative.

    Nothing is dropped for good: at each location all patches are put together again and divided anew, and after the
    last block they are together. In between, the blocks see the informative tokens and one representative, which is the
    others' mean weighted by their global attention; whatever a block adds to it is added to each of the others.

    `keep` and `tokens` count from all patches of the image; the representative comes on top, so that leaving out a
    single patch saves nothing, and is not done.

    Args:
        at: Block or blocks after which the patches are divided anew.
        mix: Share of the earlier global attention in the new one; up to the first location each block's attention
            replaces the one before it, as in the authors' code.
    """

    method = "evovit"
    title = "Evo-ViT"
    untimed = "is not what its counts say: it brings tokens back"

    at: int | Sequence[int] | None = option((4, 8), "block or blocks after which tokens are selected again")
    mix: float = option(0.5, "weight of earlier blocks in a token's CLS attention; the rest: this block")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(is_number(self.mix) and 0 <= self.mix <= 1, f"mix={self.mix}: expected a share from 0 to 1")
        check(self.locations[0] > 0, "at=0: no block has been seen that could rank the tokens; expected 1 or larger")

    @property
    def reads(self) -> bool:
        return True

    @property
    def alone(self) -> bool:
        return True

    def places(self, depth: int) -> tuple[Place, ...]:
        return (*super().places(depth), Place(depth))

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        """`leaving` holds the informative tokens and the representative; the last step puts all together again."""
        stay = patches if turn.number == turn.of - 1 else self.stay(turn, patches)
        if stay >= patches - 1:  # a representative of one token would only take its place
            return Step(turn.place, count, patches, patches) if count < patches else None
        return Step(turn.place, count, stay, stay + 1)


class Division(NamedTuple):
    """What travels with the tokens.

    Args:
        attention: (B, N) in fp32, the global CLS attention of each place in the grid.
        places: (B, m), the places in the grid of the tokens that a representative stands for, if they are divided.
        apart: (B, m, D), how far each of these is from the representative. What a block adds to the representative it
            adds to them all (the fast update), which leaves this as it is.
    """

    attention: torch.Tensor
    places: torch.Tensor | None = None
    apart: torch.Tensor | None = None


class SlowFast(Method):
    """While tokens are divided, the representative is the last patch token. At the end all are there, in grid order."""

    looks = "heads"
    needs_cls = True
    config: EvoViT

    def planned(self, steps: Sequence[Step]) -> Plan:
        """Return a plan in which every block is seen whose attention counts."""
        seen = self.seen(steps)
        return tuple(
            block._replace(sees=self.looks, watchers=(0,)) if number in seen else block._replace(sees="")
            for number, block in enumerate(super().planned(steps))
        )

    def seen(self, steps: Sequence[Step]) -> range:
        """Return the blocks whose attention counts, from the first location to the last step that divides.

        Before the first location each would only replace the one before.
        """
        last = max((step.place.block for step in steps if _divides(step)), default=0)
        return range(self.config.locations[0], last + 1)

    def watch(self, tokens: Tokens, heads: Heads | None) -> Tokens:
        assert heads is not None
        return replace(tokens, state=self.attended(tokens, heads))

    def attended(self, tokens: Tokens, heads: Heads) -> Division:
        """Return the state with this block's attention; tokens that did not go through the block keep theirs."""
        new, state = received(heads, 1, tokens.prefix), tokens.state  # (B, n)
        if state is None:
            return Division(new)  # all patches are still there, in grid order
        own = tokens.index if state.places is None else tokens.index[:, :-1]  # without the representative
        old = state.attention.gather(1, own)
        mixed = self.config.mix * old + (1 - self.config.mix) * new[:, : own.shape[1]]
        return state._replace(attention=state.attention.scatter(1, own, mixed))  # type: ignore[no-any-return]

    def unfold(self, tokens: Tokens) -> Tokens:
        return together(tokens) if isinstance(tokens.state, Division) else tokens

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        state = tokens.state
        tokens = together(tokens)
        if not _divides(step):
            return take(replace(tokens, state=state._replace(places=None, apart=None)), ranking(tokens.index))
        attention = state.attention.gather(1, tokens.index)  # (B, N)
        ranked = ranking(attention, descending=True)
        kept, rest = ranked[:, : step.ranked], ranked[:, step.ranked :]
        weight = F.normalize(attention.gather(1, rest), p=1.0, dim=1, eps=1e-30)  # (B, m)
        others = pick(tokens.patches, rest)  # (B, m, D)
        representative = weight.to(others.dtype)[:, None] @ others  # (B, 1, D)
        state = Division(state.attention, tokens.index.gather(1, rest), others - representative)
        return append(replace(take(tokens, kept), state=state), representative)  # (B, prefix + k + 1, D)

    def macs(self, step: Step) -> int:
        """Count the CLS rows of the blocks since the step before, and the weighted mean."""
        earlier = [one.place.block for one in self._steps if one.place.block < step.place.block]
        blocks = [block for block in self.seen(self._steps) if max(earlier, default=0) < block <= step.place.block]
        rows = len(blocks) * (step.entering + self.layout.prefix) * self.layout.attn_dim
        return rows + _divides(step) * (self.layout.patches - step.ranked) * self.layout.embed_dim


def _divides(step: Step) -> bool:
    """Return whether tokens are divided in a step, or put together again."""
    return step.leaving > step.ranked


def together(tokens: Tokens) -> Tokens:
    """Return all patch tokens in one sequence: those in the blocks, then those that the representative stood for."""
    state = tokens.state
    if state.places is None:
        return tokens
    others = state.apart + tokens.x[:, -1:]  # (B, m, D)
    index = torch.cat([tokens.index[:, :-1], state.places], 1)  # (B, N)
    source = None if tokens.carrier is None else ranking(index)  # nothing is lost any more
    return replace(tokens, x=torch.cat([tokens.x[:, :-1], others], 1), index=index, carrier=source)

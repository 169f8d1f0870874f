"""The options of Evo-ViT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tntprune.config.base import Config, method, option
from tntprune.config.checks import check, is_number
from tntprune.schedule import Place, Step, Turn


@method("evovit")
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

    at: int | Sequence[int] | None = option((4, 8), "block or blocks after which tokens are divided anew")
    mix: float = option(0.5, "share of the earlier global attention in the new one")

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

"""The options of Adaptive Token Sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tntprune.config.base import Config, method, option
from tntprune.schedule import Step, Turn


@method("ats")
@dataclass(frozen=True)
class ATS(Config):
    """Adaptive Token Sampling (Fayyaz et al., ECCV 2022): tokens are drawn by their share of the CLS token's attention.

    A token that is drawn more than once stays once, so the number of tokens differs from image to image; `keep` and
    `tokens` say how often is drawn, which is the most that can stay. Needs no training.

    Args:
        at: Blocks inside which tokens are sampled; None is every block from the fourth on.
        keep: Draws at each location as a share of the patch tokens that can arrive; 1 leaves the location out.
        tokens: Draws at each location. Neither: as many draws as patches in the image, as published.
    """

    everywhere = True

    at: int | Sequence[int] | None = option(None, "block or blocks inside which tokens are sampled (4 to the last)")
    keep: float | Sequence[float] | None = option(None, "draws as a share of the patch tokens")
    tokens: int | Sequence[int] | None = option(None, "draws at each location")

    @property
    def reads(self) -> bool:
        return True

    @property
    def variable(self) -> bool:
        return True

    @property
    def is_inside(self) -> bool:
        return True

    def blocks(self, depth: int) -> tuple[int, ...]:
        if self.at is not None:
            return super().blocks(depth)
        found = tuple(range(min(4, depth), depth + 1))
        self.check_length("keep" if self.tokens is None else "tokens", len(found))
        return found

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        """`ranked` is the number of draws, `leaving` the most tokens that can stay."""
        if self.tokens is not None:
            draws = int(self.amount(turn.number))
        elif self.keep is None:
            draws = patches
        else:
            draws = self.stay(turn, count)
            if draws == count:
                return None
        return Step(turn.place, count, draws, min(draws, count))

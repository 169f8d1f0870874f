"""Random drop, the baseline every other method has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tntprune.methods.base import Layout, ScoringMethod
from tntprune.methods.checks import check, is_int
from tntprune.methods.config import Config, option
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import NOWHERE, Tokens, shuffled


@dataclass(frozen=True)
class Random(Config):
    """Random drop, the baseline: the same tokens go in every image, as the seed says.

    Args:
        order: Seed of the order in which tokens are dropped.
    """

    method = "random"
    title = "random drop"

    order: int = option(0, "seed of the order in which tokens are dropped")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(is_int(self.order) and self.order >= 0, f"order={self.order}: expected a whole number, 0 or larger")


class RandomDrop(ScoringMethod):
    """Keeps the places of the grid that come first in a seeded order, the same in every image.

    What is kept at a small rate is also kept at a larger one; nothing depends on the batch or on a random generator.
    """

    config: Random
    rank: torch.Tensor

    def __init__(self, config: Random, layout: Layout) -> None:
        super().__init__(config, layout)
        self.register_buffer("rank", self.ranks(), persistent=False)

    def resize(self, grid: tuple[int, int]) -> None:
        super().resize(grid)
        self.rank = self.ranks().to(self.rank.device)

    def ranks(self) -> torch.Tensor:
        """Return the rank of each place of the model's own grid, after a first entry for a token without a place.

        Made beforehand, for it takes whole numbers of 64 bits, which not every runtime has.
        """
        places = torch.arange(NOWHERE, self.layout.patches, device="cpu")
        return shuffled(places, self.config.order).argsort().argsort()  # (1 + N,)

    def score(self, tokens: Tokens, heads: Heads | None) -> torch.Tensor:
        if tokens.grid_size == self.layout.patches:
            return -self.rank[tokens.index + 1]
        return -shuffled(tokens.index, self.config.order)  # an image of another size than the model's

"""Random drop, the baseline every other method has to beat."""

from __future__ import annotations

from tntprune.attention import Heads
from tntprune.config import Random
from tntprune.methods.base import Method, implements
from tntprune.schedule import Step
from tntprune.tokens import Tokens, shuffled, take


@implements(Random)
class RandomDrop(Method):
    """Keeps the places of the grid that come first in a seeded order, the same in every image.

    What is kept at a small rate is also kept at a larger one; nothing depends on the batch or on a random generator.
    """

    config: Random

    def reduce(self, tokens: Tokens, step: Step, heads: Heads | None) -> Tokens:
        key = shuffled(tokens.index, self.config.order)  # (B, n)
        return take(tokens, key.topk(step.leaving, dim=1, largest=False).indices)

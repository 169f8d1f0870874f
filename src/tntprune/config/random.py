"""The options of random drop."""

from __future__ import annotations

from dataclasses import dataclass

from tntprune.config.base import Config, method, option
from tntprune.config.checks import check, is_int


@method("random")
@dataclass(frozen=True)
class Random(Config):
    """Random drop, the baseline: the same tokens go in every image, as the seed says.

    Args:
        order: Seed of the order in which tokens are dropped.
    """

    order: int = option(0, "seed of the order in which tokens are dropped")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(is_int(self.order) and self.order >= 0, f"order={self.order}: expected a whole number, 0 or larger")

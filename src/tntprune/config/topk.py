"""The options of Top-K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tntprune.config.base import Config, method, option
from tntprune.config.checks import check, check_flags, check_words


@method("topk")
@dataclass(frozen=True)
class TopK(Config):
    """Top-K: the patches to which the CLS token attends most stay (the TNT paper's baseline, without fusion).

    Shares are truncated, and taken of the patches that arrive.

    Args:
        inside: Drop between the block's attention and its MLP, as the TNT paper ran it; else after the block.
        rows: Whose attention ranks: the "cls" token's, or the "mean" of the CLS and the distillation token's.
    """

    inside: bool = option(True, "drop between attention and MLP, or after the block")
    rows: Literal["cls", "mean"] = option(
        "cls", "rank by the CLS token's attention, or its mean with the distillation's"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "inside")
        check_words(self, "rows")
        check(self.locations[0] > 0, "at=0: no block has been seen whose attention could rank; expected 1 or larger")

    @property
    def reads(self) -> bool:
        return True

    @property
    def is_inside(self) -> bool:
        return self.inside

"""ToFu: in early blocks the tokens that are most alike are pruned down to one, in late blocks they are merged.

Source: Kim et al., "Token Fusion: Bridging the Gap between Token Pruning and Token Merging", WACV 2024, section 3.
From its description; no code was taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tntprune.methods.checks import check_whole
from tntprune.methods.config import option
from tntprune.methods.tome import TokenMerging, ToMe
from tntprune.ops.tokens import Average


@dataclass(frozen=True)
class ToFu(ToMe):
    """ToFu (Kim et al., WACV 2024): ToMe's pairs, pruned in early blocks and merged with their norm kept in late ones.

    Early blocks answer to a mean of two tokens with something far from the mean of their answers. There one token of
    each pair goes and the other one stays as it is ("pruned merging").

    Sizes: a token that stays stands for the patches of those that went, as if they had been replaced by copies of it.
    So sizes count in attention, in later means and in mean pooling as they do in ToMe, and in a trace the patches that
    went are carried by the one that stayed.

    The options are ToMe's, and one more.

    Args:
        average: What a merged token is in late blocks: "mlerp", the mean with the norm of the longest of its tokens, as
            published; or the "mean".
        merge_from: The first block in which pairs are merged; before it they are pruned. None is the second half of the
            blocks: 7 of 12. The authors tell early from late by how linear a model's blocks are. 1 merges everywhere,
            and a number beyond the last block prunes everywhere.
    """

    method = "tofu"
    title = "ToFu"

    average: Literal["mean", "mlerp"] = option(
        "mlerp", "what a merged token is in late blocks: the mean, or the mean with the norm of the longest (mlerp)"
    )
    merge_from: int | None = option(None, "first block that merges; earlier ones prune (the second half)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge_from is not None:
            check_whole("merge_from", self.merge_from, 1)


class TokenFusion(TokenMerging):
    """Pairs tokens as ToMe does."""

    config: ToFu

    def average(self, block: int) -> Average:
        first = self.layout.depth // 2 + 1 if self.config.merge_from is None else self.config.merge_from
        return self.config.average if block >= first else "none"

"""The options of ToMe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tntprune.config.base import Config, method, option
from tntprune.config.checks import as_tuple, check, check_flags, check_words, is_int
from tntprune.schedule import Step, Turn


@method("tome")
@dataclass(frozen=True)
class ToMe(Config):
    """Token Merging (Bolya et al., ICLR 2023): the r most similar pairs of tokens become one in each block.

    Args:
        at: Blocks at which tokens are merged; None is every block.
        r: Tokens merged away at each location, at most half of those that arrive; one value or one for each location.
            8 unless `keep` or `tokens` is given. Those two reach their count at each location by merging as often as it
            takes.
        decreasing: `r` falls evenly from twice its value at the first location to 0 at the last.
        inside: Merge between the block's attention and its MLP, as published; else after the block.
        metric: What is compared: the keys' "mean" over heads, as published; the "concat"enated keys, as the TNT paper
            ran it on its ViT/16; or the tokens themselves, "x".
        proportional: A merged token counts in attention like as many equal ones (log of its size is added to its
            logits). The authors leave it out for models from masked-image pretraining.
    """

    everywhere = True
    listed = ("r", "keep", "tokens")
    rivals = ("r", "keep", "tokens")

    at: int | Sequence[int] | None = option(None, "block or blocks at which tokens are merged (all)")
    keep: float | Sequence[float] | None = option(None, "share of the patch tokens kept at each location")
    r: int | Sequence[int] | None = option(None, "tokens merged away at each location (8)")
    decreasing: bool = option(False, "let r fall from twice its value to 0")
    inside: bool = option(True, "merge between attention and MLP, or after the block")
    metric: Literal["mean", "concat", "x"] = option(
        "mean", "compare the mean of the heads' keys, all of them, or tokens"
    )
    proportional: bool = option(True, "let merged tokens count in attention by their size")

    def __post_init__(self) -> None:
        super().__post_init__()
        counted = self.keep is not None or self.tokens is not None
        check(self.r is None or not counted, "r was given with keep or tokens; expected one of them")
        if self.r is not None:
            object.__setattr__(self, "r", as_tuple(self.r))
            if self.at is not None:
                self.check_length("r", len(self.locations))
            for value in self.rs:
                check(is_int(value) and value >= 0, f"r={value}: expected a whole number, 0 or larger")
        check_flags(self, "decreasing", "inside", "proportional")
        check_words(self, "metric")
        unseen = 0 in self.locations and self.metric != "x"
        check(not unseen, "at=0: no block has been seen whose keys could be compared; expected metric='x' or 1 and up")
        even = not self.decreasing or len(self.rs) == 1
        check(even, "decreasing=True: expected one value of r, from twice which it falls")

    @property
    def reads(self) -> bool:
        return self.metric != "x"

    @property
    def rs(self) -> tuple[int, ...]:
        """`r` as a tuple; empty where `keep` or `tokens` is given."""
        return (() if self.keep or self.tokens else (8,)) if self.r is None else self.r  # type: ignore[return-value]

    @property
    def is_inside(self) -> bool:
        return self.inside

    def blocks(self, depth: int) -> tuple[int, ...]:
        if self.at is not None:
            return super().blocks(depth)
        last = depth if self.inside else depth - 1
        self.check_length("r" if self.rs else "keep" if self.tokens is None else "tokens", last)
        return tuple(range(1, last + 1))

    def merged(self, number: int, of: int) -> int:
        """Tokens merged away at one of so many locations, counted from 0, if enough arrive there.

        Falling from 2r to 0, r is rounded so that the sum over all locations is the same as without falling.
        """
        r = self.rs[number] if len(self.rs) > 1 else self.rs[0]
        return round(2 * r * (of - 1 - number) / (of - 1)) if self.decreasing and of > 1 else r

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        if not self.rs:
            return super().step(turn, count, patches)
        gone = min(self.merged(turn.number, turn.of), count // 2)  # as published; set A never holds less
        return Step(turn.place, count, count - gone, count - gone) if gone else None

    def singles(self, depth: int) -> list[Any]:
        found = super().singles(depth)
        if not self.decreasing:
            return found
        last = len(found)
        return [single.changed(r=self.merged(number, last), decreasing=False) for number, single in enumerate(found)]

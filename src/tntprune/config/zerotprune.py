"""The options of Zero-TPrune."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tntprune.config.base import Config, method, option
from tntprune.config.checks import as_tuple, check, check_flags, check_words, is_int, is_number
from tntprune.schedule import Step, Turn


@method("zerotprune")
@dataclass(frozen=True)
class ZeroTPrune(Config):
    """Zero-TPrune (Wang et al., CVPR 2024): importance by PageRank on the attention graph, then similarity.

    Needs no training. Shares are truncated, and taken of the patches that arrive.

    Args:
        similar: Tokens of the less important half that are removed at each location for being like one of the more
            important half.
        beyond: They go beyond what `keep` or `tokens` leaves, as the paper does it; else they are a part of what goes.
        iterations: Rounds of voting at each location; one value, or one for each. None: 50 in the first quarter of the
            blocks, 5 in the middle, 1 in the last quarter, from the paper's 30 to 50, 5 to 10, and 1.
        start: Votes at first: "cls" gives the CLS token sqrt(n) times as many as any other (the paper's Zero-TPrune),
            "uniform" the same to all (its Zero-TPrune-uni), which is also what a model without CLS token gets.
        variance: Only heads take part whose scores, scaled to a mean of 1 over the patch tokens, have a variance within
            these limits; every head where none does. None takes every head. The paper has limits of 0.01 and 0.7, but
            not the scaling: with this one they leave out the heads that tell most (seen on the bundled digits model),
            so there are none by default.
        stages: "isi" ranks by one vote, removes similar tokens, then ranks what is left by PageRank and prunes (the
            paper's I'-S-I); "is" prunes by PageRank first, as the TNT paper's figures show that it ran.
        feature: What similarity is the cosine of: the "key"s of all heads, or the tokens themselves, "x".
    """

    usual = 0.9
    listed = ("keep", "tokens", "iterations")

    at: int | Sequence[int] | None = option((1, 3, 6, 9, 11), "block or blocks after which tokens are removed")
    keep: float | Sequence[float] | None = option(None, "share of the patch tokens kept at each location (0.9)")
    similar: int = option(10, "tokens removed for being similar to a kept one")
    beyond: bool = option(True, "similar tokens go beyond what keep leaves, or are part of it")
    iterations: int | Sequence[int] | None = option(None, "rounds of voting (50, 5 or 1, by depth)")
    start: Literal["cls", "uniform"] = option("cls", "who has more votes at first")
    variance: Sequence[float] | None = option(None, "limits for the variance of the scores of a head (none)")
    stages: Literal["isi", "is"] = option("isi", "remove similar tokens before or after pruning")
    feature: Literal["key", "x"] = option("key", "what similarity compares")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.locations[0] > 0, "at=0: no block has been seen whose attention could vote; expected 1 or larger")
        check(is_int(self.similar) and self.similar >= 0, f"similar={self.similar}: expected 0 or more tokens")
        check_flags(self, "beyond")
        check_words(self, "start", "stages", "feature")
        if self.iterations is not None:
            object.__setattr__(self, "iterations", as_tuple(self.iterations))
            self.check_length("iterations", len(self.locations))
            for value in self.iterations:  # type: ignore[union-attr]
                good = is_int(value) and 0 < value <= 1000
                check(good, f"iterations={value}: expected a whole number from 1 to 1000")
        if self.variance is not None:
            object.__setattr__(self, "variance", as_tuple(self.variance))
            good = len(self.variance) == 2 and all(is_number(value) for value in self.variance)
            good = good and 0 <= self.variance[0] < self.variance[1]
            check(good, f"variance={self.variance}: expected two ascending limits, such as 0.01 0.7")

    @property
    def reads(self) -> bool:
        return True

    def rounds(self, block: int, depth: int) -> int:
        """Rounds of voting after one block."""
        if self.iterations is not None:
            given: tuple[int, ...] = self.iterations  # type: ignore[assignment]
            return given[self.locations.index(block)] if len(given) > 1 else given[0]
        return 50 if block <= depth / 4 else 1 if block > 3 * depth / 4 else 5

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        """`ranked` is what ranking alone leaves, `leaving` what is left when the similar tokens are gone as well."""
        stay = self.stay(turn, count)
        if self.beyond:
            similar = min(self.similar, stay // 2, stay - 1)  # one group loses tokens, and one token stays
            return Step(turn.place, count, stay, stay - similar) if stay - similar < count else None
        extra = min(self.similar, count - stay, stay)
        return Step(turn.place, count, stay + extra, stay) if stay < count else None

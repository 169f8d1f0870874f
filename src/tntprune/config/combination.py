"""Several reductions of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tntprune.config.base import Config, option
from tntprune.config.checks import check


@dataclass(frozen=True)
class Combination(Config):
    """Reductions that share a model, each at places of its own: pruning and then merging, for example.

    Args:
        parts: Their configs. Rates are shares of what arrives at each of their places.

    Raises:
        UsageError: there are fewer than two.
    """

    everywhere = True
    method = "combination"

    at: None = option(None, "")
    parts: Sequence[Config] = option((), "the reductions")

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        check(len(self.parts) > 1, f"{len(self.parts)} reductions to combine; expected two or more")
        annealed = [part.method for part in self.parts if getattr(part, "anneal", None) is not None]
        check(not annealed, "anneal: evit is trained alone and then combined; expected anneal=None here")

    @property
    def by_share(self) -> bool:
        return False

    @property
    def variable(self) -> bool:
        return any(part.variable for part in self.parts)

    def singles(self, depth: int) -> list[Any]:
        return [single for part in self.parts for single in part.singles(depth)]

    def changed(self, **changes: Any) -> Any:
        check(
            not changes,
            f"{', '.join(changes)}: a combination of {' and '.join(part.method for part in self.parts)} is taken as it "
            "was saved; expected no changes, or its parts given anew",
        )
        return self

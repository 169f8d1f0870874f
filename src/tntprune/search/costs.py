"""What is known of the time of blocks and of a method's steps: lines, polynomials, and what they are of."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, fields
from typing import Any

from tntprune.methods import Config
from tntprune.methods.steps import Step

FREE = {  # options that change how many tokens go and where, which ones, or how a method learns, and no step's time
    "at", "keep", "tokens", "r", "decreasing", "similar", "order", "noise_blocks", "noise_at", "capacity",
    "noise_scale", "stream_norm", "beta", "objective", "prune_prob", "score_weight", "size_weight", "anneal",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """Seconds at measured numbers of patch tokens, ascending, with straight lines between; it may rise and fall."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, count: int) -> float:
        """Seconds with so many patch tokens; beyond the ends what is measured there."""
        right = bisect_right(self.counts, count)
        if right == 0 or self.counts[right - 1] == count or right == len(self.counts):
            return self.seconds[max(0, right - 1)]
        left = right - 1
        share = (count - self.counts[left]) / (self.counts[right] - self.counts[left])
        return self.seconds[left] + share * (self.seconds[right] - self.seconds[left])


@dataclass(frozen=True)
class StepCost:
    """Seconds of one kind of step: a polynomial of second degree in the tokens that enter, are ranked and leave.

    Args:
        weights: Of `features`.
        least: Below which no step of the kind comes.
        sized: Whether it leaves tokens that stand for several.
    """

    weights: tuple[float, ...]
    least: float
    sized: bool

    def at(self, step: Step) -> float:
        """Seconds of one step."""
        return max(self.least, sum(w * f for w, f in zip(self.weights, features(step), strict=True)))


def features(step: Step) -> tuple[float, ...]:
    """What a step's time is a sum of. Work is done for each token, each pair of tokens, and each halving."""
    e, k, n = step.entering / 100, step.ranked / 100, step.leaving / 100
    halvings = math.ceil(math.log2(max(1.0, step.entering / step.leaving)) - 1e-9)
    return (1.0, e, k, n, e * e, k * k, n * n, e * k, e * n, k * n, float(halvings))


def kind(step: Step) -> str:
    """What is done in a step, as far as the numbers tell."""
    similar, ranked = step.leaving < step.ranked, step.ranked < step.entering
    return "both" if similar and ranked else "similar" if similar else "ranked"


@dataclass(frozen=True)
class Part:
    """What is known of one method.

    Args:
        method: Its name.
        options: Those that its steps' time depends on.
        sees: What it looks at of a block's attention where it acts.
        proportional: Whether the sizes of merged tokens count in attention.
        groups: Blocks by number, to the first of those at which its steps are alike.
    """

    method: str
    options: dict[str, Any]
    sees: str
    proportional: bool
    groups: dict[int, int]

    def group(self, block: int) -> int:
        """The group of a block; of one at which it could not be tried, that of the nearest."""
        return self.groups[min(self.groups, key=lambda known: abs(known - block))]


def timed_options(config: Config) -> dict[str, Any]:
    """The options of a config that its steps' time depends on, as JSON holds them."""
    own = {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name not in FREE}
    own |= {"how": config.what} if hasattr(config, "what") else {}  # said or not, it is the same
    return {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}


def step_name(part: Part, step: Step) -> str:
    """The name of a kind of step."""
    return f"{part.method} {part.group(step.place.block)} {kind(step)}"

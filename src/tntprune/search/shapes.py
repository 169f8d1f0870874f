"""How what goes is spread over the blocks: a few families of shapes, each scaled to a budget, and small changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tntprune.errors import UsageError
from tntprune.methods import Config
from tntprune.search.space import Left, Space

PAPER = (3, 4, 5)  # the locations of the paper's schedules with several
BISECTIONS = 26  # far below one token


@dataclass(frozen=True)
class Shape:
    """Where tokens go, up to a scale.

    Args:
        weights: For each block of a space, how much goes there; their sum does not matter.
        shares: Whether equal weights are equal shares of the tokens that arrive, or equal numbers.
        similar: Similar tokens that go at the start.
        name: Of a shape that is known by one.
    """

    weights: tuple[float, ...]
    shares: bool = False
    similar: int = 0
    name: str = ""

    def left(self, scale: float, patches: int, least: int) -> Left:
        """Return the patch tokens after each block; they fall as the scale, from 0, grows.

        Rounding errors do not add up.
        """
        start = patches - self.similar
        gone = [scale * total for total in accumulate(self.weights)]
        exact = [start * math.exp(-one) if self.shares else start - one for one in gone]
        return tuple(max(least, math.floor(one + 0.5)) for one in exact)


@dataclass(frozen=True)
class Schedule:
    """A shape at a scale, and what it costs."""

    shape: Shape
    left: Left
    config: Config
    cost: float


def fit(shape: Shape, space: Space, cost: Callable[[Config], float], limit: float) -> Schedule | None:
    """Scale a shape so that it uses up a budget, to the token, and does not go beyond it.

    Returns:
        The schedule; None where not even the largest scale is within the budget.
    """
    smallest = min(weight for weight in shape.weights if weight > 0)
    low, high = 0.0, (math.log(space.patches + 1) + 1 if shape.shares else float(space.patches)) / smallest
    scale, last = high, Left()
    best: Schedule | None = None
    for _ in range(BISECTIONS):
        left = shape.left(scale, space.patches, space.least)
        if left != last:
            last, found = left, priced(shape, left, space, cost)
        if found is not None and found.cost <= limit:
            high = scale
            best = found if best is None or found.cost >= best.cost else best
        elif best is None:
            return None
        else:
            low = scale
        scale = (low + high) / 2
    return best


def priced(shape: Shape, left: Left, space: Space, cost: Callable[[Config], float]) -> Schedule | None:
    """Return a schedule with its cost; None where nothing goes or the method has no such schedule.

    What goes for nothing in the last block goes, unless the shape is one that is known by its name.
    """
    if space.free and not shape.name:
        left = (*left[:-1], space.least)
    try:
        config = space.config(left, shape.similar)
        return Schedule(shape, left, config, cost(config))
    except UsageError:
        return None


def simple(space: Space) -> list[Shape]:
    """List the schedules that need no search: one block, the paper's three blocks, and all blocks evenly.

    One block is each from a quarter to half of the depth at which tokens may go; of those outside, the first ones
    where there are none inside.
    """
    middle = [block for block in space.blocks if space.depth // 4 <= block <= space.depth // 2 and block > 0]
    found = [Shape(_at(space, {alone}), True, name=f"block {alone} alone") for alone in middle or space.blocks[:4]]
    if set(PAPER) <= set(space.blocks):
        found.append(Shape(_at(space, set(PAPER)), True, name="the paper's [3, 4, 5]"))
    inner = set(space.blocks) - {0}
    if len(inner) > 1:
        found += [Shape(_at(space, inner), True, name="uniform rates"), Shape(_at(space, inner), name="uniform counts")]
    return found


def family(space: Space) -> list[Shape]:
    """List shapes of a few numbers: from which block to which, falling, even or rising; and a few blocks only."""
    blocks, depth = space.blocks, space.depth
    lasts = [block for block in blocks if block > depth // 2] or [blocks[-1]]
    kinds: list[tuple[tuple[float, ...], bool]] = []
    for first in [block for block in blocks if block <= depth // 3 + 1]:
        for last in lasts[(len(lasts) + 1) % 2 :: 2]:  # the last one is among them
            for shares, trends in ((False, (-0.7, 0.0, 0.7)), (True, (0.0, 0.3))) if last > first else ():
                kinds += [(tuple(_ramp(block, first, last, trend) for block in blocks), shares) for trend in trends]
    for part in (4, 3, 2):  # one block, or three of them evenly apart, from a quarter, a third and a half of the depth
        first, apart = max(1, depth // part), max(1, depth // 4)
        kinds += [(_at(space, {first}), True), (_at(space, {first, first + apart, first + 2 * apart}), True)]
    found = [Shape(weights, shares, one) for weights, shares in kinds if any(weights) for one in space.similars]
    return list(dict.fromkeys([*simple(space), *found]))


def _at(space: Space, spots: set[int]) -> tuple[float, ...]:
    return tuple(float(block in spots) for block in space.blocks)


def _ramp(block: int, first: int, last: int, trend: float) -> float:
    if not first <= block <= last:
        return 0.0
    return 1 + trend * (2 * (block - first) / (last - first) - 1)


def moved(schedule: Schedule, space: Space, rng: random.Random) -> Shape:
    """Change a little: what goes at one block, or a part of it, goes at another; or other similar tokens go before."""
    similar, others = schedule.shape.similar, [one for one in space.similars if one != schedule.shape.similar]
    start = space.patches - similar
    gone = [float(before - after) for before, after in pairwise(accumulate((start, *schedule.left), min))]
    if others and rng.random() < 0.2:
        similar = rng.choice(others)
    elif len(gone) > 1:
        source = rng.choice([place for place, count in enumerate(gone) if count > 0])
        near = [place for place in (source - 1, source + 1) if 0 <= place < len(gone)]
        target = rng.choice(near if rng.random() < 0.5 else [place for place in range(len(gone)) if place != source])
        part = gone[source] * rng.choice((0.25, 0.5, 1.0))
        gone[source] -= part
        gone[target] += part
    return Shape(tuple(gone), similar=similar)

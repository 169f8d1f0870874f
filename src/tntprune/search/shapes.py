"""How what goes is spread over the blocks: a few families of shapes, each scaled to a budget, and small changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tntprune.errors import UsageError
from tntprune.methods import Config
from tntprune.search.space import Left, Space

PAPER = (3, 4, 5)  # the locations of the paper's schedules with several
ROUNDS = 26  # of the bisection: far below one token


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
        """Patch tokens after each block; they fall as the scale, from 0, grows. Rounding errors do not add up."""
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
    """A shape scaled so that it uses up a budget, to the token, and does not go beyond it.

    Returns:
        The schedule; None where not even the largest scale is within the budget.
    """
    smallest = min(weight for weight in shape.weights if weight > 0)
    reach = math.log(space.patches + 1) + 1 if shape.shares else float(space.patches)
    low, high = 0.0, reach / smallest
    best: Schedule | None = None
    last: Left = ()
    for turn in range(ROUNDS):
        scale = high if turn == 0 else (low + high) / 2
        left = shape.left(scale, space.patches, space.least)
        if left != last:
            last, found = left, priced(shape, left, space, cost)
        if found is not None and found.cost <= limit:
            high = scale
            best = found if best is None or found.cost >= best.cost else best
        elif turn == 0:
            return None
        else:
            low = scale
    return best


def priced(shape: Shape, left: Left, space: Space, cost: Callable[[Config], float]) -> Schedule | None:
    """A schedule with its cost; None where nothing goes or the method has no such schedule.

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
    found = []
    for alone in middle or space.blocks[:4]:
        found.append(Shape(tuple(float(block == alone) for block in space.blocks), True, name=f"block {alone} alone"))
    paper = tuple(float(block in PAPER) for block in space.blocks)
    if sum(paper) == len(PAPER):
        found.append(Shape(paper, True, name="the paper's [3, 4, 5]"))
    inner = tuple(float(block > 0) for block in space.blocks)
    if sum(inner) > 1:
        found += [Shape(inner, True, name="uniform rates"), Shape(inner, name="uniform counts")]
    return found


def family(space: Space) -> list[Shape]:
    """Shapes of a few numbers: from which block to which, falling, even or rising; and a few blocks only."""
    found = simple(space)
    blocks, depth = space.blocks, space.depth
    firsts = [block for block in blocks if block <= depth // 3 + 1]
    lasts = [block for block in blocks if block > depth // 2] or [blocks[-1]]
    for first in firsts:
        for last in lasts[::2] if len(lasts) % 2 else lasts[1::2]:
            if last <= first:
                continue
            for trend in (-0.7, 0.0, 0.7):
                weights = tuple(_ramp(block, first, last, trend) for block in blocks)
                found += [Shape(weights, similar=similar) for similar in space.similars]
            for trend in (0.0, 0.3):
                weights = tuple(_ramp(block, first, last, trend) for block in blocks)
                found += [Shape(weights, True, similar) for similar in space.similars]
    for spots in _few(depth):
        weights = tuple(float(block in spots) for block in blocks)
        if any(weights):
            found += [Shape(weights, True, similar) for similar in space.similars]
    return list(dict.fromkeys(found))


def _ramp(block: int, first: int, last: int, trend: float) -> float:
    if not first <= block <= last:
        return 0.0
    return 1 + trend * (2 * (block - first) / (last - first) - 1)


def _few(depth: int) -> Iterator[set[int]]:
    """One block, or three of them evenly apart, at a quarter, a third and a half of the depth."""
    for part in (4, 3, 2):
        first = max(1, depth // part)
        yield {first}
        yield {first, first + max(1, depth // 4), first + 2 * max(1, depth // 4)}


def moved(schedule: Schedule, space: Space, rng: random.Random) -> Shape:
    """A small change: what goes at one block, or a part of it, goes at another; or other similar tokens go before."""
    similars = space.similars
    if len(similars) > 1 and rng.random() < 0.2:
        similar = rng.choice([one for one in similars if one != schedule.shape.similar])
    else:
        similar = schedule.shape.similar
    gone = _gone(schedule.left, space.patches - schedule.shape.similar)
    if similar == schedule.shape.similar and len(gone) > 1:
        source = rng.choice([place for place, count in enumerate(gone) if count > 0])
        near = [place for place in (source - 1, source + 1) if 0 <= place < len(gone)]
        others = [place for place in range(len(gone)) if place != source]
        target = rng.choice(near if rng.random() < 0.5 else others)
        part = gone[source] * rng.choice((0.25, 0.5, 1.0))
        gone[source] -= part
        gone[target] += part
    return Shape(tuple(gone), similar=similar)


def _gone(left: Sequence[int], start: int) -> list[float]:
    found, before = [], start
    for count in left:
        found.append(float(max(0, before - count)))
        before = min(before, count)
    return found

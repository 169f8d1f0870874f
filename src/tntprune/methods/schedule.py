"""Rates and counts to whole numbers of tokens, once, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from tntprune.errors import UsageError

if TYPE_CHECKING:
    from tntprune.methods import Config


class Place(NamedTuple):
    """Where in a model something happens to the tokens.

    Args:
        block: 0 is before the first block.
        inside: Between the block's attention and its MLP, instead of after it.
    """

    block: int
    inside: bool = False

    def __str__(self) -> str:
        return f"inside block {self.block}" if self.inside else f"after block {self.block}"


class Turn(NamedTuple):
    """One of the places at which a method acts.

    Args:
        place: Where.
        number: Which one, from 0.
        of: How many there are.
    """

    place: Place
    number: int
    of: int


class Step(NamedTuple):
    """What happens to the patch tokens at one place.

    Args:
        place: Where.
        entering: Patch tokens that arrive.
        ranked: Patch tokens that stay when those with the smallest scores are gone.
        leaving: Patch tokens that stay when the similar ones are gone as well. Where the number differs from image to
            image, the largest that is possible.
        part: Which of several combined reductions acts, from 0.
    """

    place: Place
    entering: int
    ranked: int
    leaving: int
    part: int = 0


def truncated(count: int, rate: float) -> int:
    """Whole tokens in a share of `count`: truncated as in the authors' code, but at least one stays.

    The small term keeps what is a whole number on paper whole: 0.29 of 100 is 29, although 100 * 0.29 < 29.
    """
    return max(1, math.floor(count * rate + 1e-9))


def ceiled(count: int, rate: float) -> int:
    """Whole tokens in a share of `count`, rounded up; at most `count`."""
    return min(count, max(1, math.ceil(count * rate - 1e-9)))


def schedule(configs: Sequence[Config], patches: int, depth: int) -> tuple[Step, ...]:
    """The steps at which tokens are removed, in order; a place where everything stays has none.

    Args:
        configs: One reduction, or several that share a model.
        patches: Patch tokens of the unpruned model.
        depth: Its blocks.

    Raises:
        UsageError: a location is not in the model, two reductions want the same place, or more tokens are to stay than
            arrive.
    """
    if len(configs) > 1:
        _check_combination(configs)
    turns: list[tuple[int, Turn]] = []
    for part, config in enumerate(configs):
        places = config.places(depth)
        turns += [(part, Turn(place, number, len(places))) for number, place in enumerate(places)]
    turns.sort(key=lambda turn: (turn[1].place.block, not turn[1].place.inside))
    for (part, turn), (another, other) in pairwise(turns):
        if part != another:
            _check_neighbours(configs[part], turn.place, configs[another], other.place)
    steps: list[Step] = []
    count = patches
    for part, turn in turns:
        step = configs[part].step(turn, count, patches)
        if step is not None:
            steps.append(step._replace(part=part))
            count = step.leaving
    return tuple(steps)


def _check_combination(configs: Sequence[Config]) -> None:
    for config in configs:
        if config.alone:
            raise UsageError(f"{config.method} needs the whole model to itself; expected it without another reduction")


def _check_neighbours(first: Config, place: Place, then: Config, other: Place) -> None:
    """Refuse two places in a row, of two reductions, that do not go together."""
    if place == other:
        raise UsageError(f"{first.method} and {then.method} both act {place}; expected places of their own (at=...)")
    if place.block == other.block and then.reads:
        raise UsageError(
            f"{then.method} {other} reads the attention of tokens that {first.method} has changed {place}; "
            "expected blocks of their own (at=...)"
        )
    if first.variable:
        raise UsageError(
            f"{first.method} leaves another number of tokens in each image, which {then.method} {other} cannot go on "
            f"from; expected {first.method} behind it"
        )


class Counts(NamedTuple):
    """Patch tokens on their way through a model.

    Args:
        attention: That enter each block.
        mlp: That enter each block's MLP.
        last: That are left at the end.
    """

    attention: list[int]
    mlp: list[int]
    last: int


def counts(steps: Iterable[Step], patches: int, depth: int) -> Counts:
    """Patch tokens at each block, from the first to the last."""
    leaving = {step.place: step.leaving for step in steps}
    count = leaving.get(Place(0), patches)
    attention, mlp = [], []
    for block in range(1, depth + 1):
        attention.append(count)
        count = leaving.get(Place(block, inside=True), count)
        mlp.append(count)
        count = leaving.get(Place(block), count)
    return Counts(attention, mlp, count)

"""Rates and counts to whole numbers of tokens, once, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tntprune.errors import UsageError
from tntprune.methods.config import Config
from tntprune.methods.steps import Place, Step, Turn


def schedule(configs: Sequence[Config], patches: int, depth: int) -> tuple[Step, ...]:
    """Return the steps at which tokens are removed, in order; a place where everything stays has none.

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

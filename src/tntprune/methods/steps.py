"""Steps at which tokens go, and the plan of one pass: what a reduction does at each block."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple


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


class BlockPlan(NamedTuple):
    """What a reduction does at one block.

    Args:
        sees: What it must see of the block's attention: nothing, the heads, or the whole map.
        inside: What it does to the tokens between attention and MLP, or None.
        after: What it does to the tokens that leave the block, or None.
        watchers: Which of several combined reductions look at the tokens that leave, though none may go.
        biased: Whether the sizes of tokens may count in the block's attention.
    """

    sees: Literal["", "heads", "map"] = ""
    inside: Step | None = None
    after: Step | None = None
    watchers: tuple[int, ...] = ()
    biased: bool = False

    @property
    def idle(self) -> bool:
        """Whether the reduction neither acts nor looks."""
        return not (self.sees or self.inside or self.after or self.watchers)


IDLE = BlockPlan()
Plan = tuple[BlockPlan, ...]  # of a whole pass: the embedding, and then each block


def begins(plan: Plan) -> int:
    """Return the last block up to which, and in which, a plan does nothing; what it does after it may be something."""
    first = next((number for number, block in enumerate(plan) if not block.idle), len(plan) - 1)
    return first - (plan[first].inside is not None or bool(plan[first].sees)) if first else 0


class Counts(NamedTuple):
    """Patch tokens on their way through a model.

    Args:
        attention: That enter each block.
        mlp: That enter each block's MLP.
        last: That are left at the end.
        narrow: Whether they are keys and values alone in the last block, which the prefix tokens leave.
    """

    attention: list[int]
    mlp: list[int]
    last: int
    narrow: bool = False

    def narrowed(self) -> Counts:
        """Return the counts where the last block runs for the prefix tokens alone."""
        return Counts(self.attention, [*self.mlp[:-1], 0], 0, True)


def before_last(steps: Iterable[Step], depth: int) -> tuple[Step, ...]:
    """Return the steps that are taken where the last block runs for the prefix tokens alone."""
    return tuple(step for step in steps if step.place.block < depth)


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

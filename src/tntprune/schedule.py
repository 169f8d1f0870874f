"""Rates and counts to whole numbers of tokens, once, before anything runs."""

from __future__ import annotations

import math
from typing import NamedTuple

from tntprune.config import TNT, Config
from tntprune.errors import UsageError


class Step(NamedTuple):
    """What happens to the patch tokens after one block.

    Args:
        block: 0 is before the first block.
        entering: Patch tokens that arrive.
        ranked: Patch tokens that stay when those with the smallest scores are gone.
        leaving: Patch tokens that stay when the similar ones are gone as well.
    """

    block: int
    entering: int
    ranked: int
    leaving: int


def truncated(count: int, rate: float) -> int:
    """Whole tokens in a share of `count`: truncated as in the authors' code, but at least one stays.

    The small term keeps what is a whole number on paper whole: 0.29 of 100 is 29, although 100 * 0.29 < 29.
    """
    return max(1, math.floor(count * rate + 1e-9))


def schedule(config: Config, patches: int, depth: int) -> tuple[Step, ...]:
    """The steps at which tokens are removed; a location where everything stays has none.

    Args:
        config: Any method's.
        patches: Patch tokens of the unpruned model.
        depth: Its blocks.

    Raises:
        UsageError: a location lies after the last block, or more tokens are to stay than arrive.
    """
    for at in config.locations:
        if at >= depth:
            raise UsageError(
                f"at={at}: the model has {depth} blocks, and removing tokens after the last one saves nothing; "
                f"expected 0 to {depth - 1}"
            )
    similar, at_start = 0, False
    if isinstance(config, TNT):
        similar, at_start = config.similar, config.resolved.similar_at == "start"
    if similar and at_start and config.locations[0] == 0:
        raise UsageError("at=0 with similar_at='start': both act before block 1; expected similar_at='score' or at=1")
    steps: list[Step] = []
    count = patches
    if at_start and min(similar, patches // 2):
        count -= min(similar, patches // 2)
        steps.append(Step(0, patches, patches, count))
    for at, amount in zip(config.locations, config.amounts, strict=True):
        stay = truncated(count, amount) if config.tokens is None else int(amount)
        if stay > count:
            raise UsageError(f"tokens={stay} after block {at}: only {count} patch tokens arrive there")
        if stay < count:
            extra = 0 if at_start else min(similar, count - stay, stay)  # no more can be matched than stay
            steps.append(Step(at, count, stay + extra, stay))
        count = stay
    return tuple(steps)


def entering(steps: tuple[Step, ...], patches: int, depth: int) -> list[int]:
    """Patch tokens that enter each block, from the first to the last."""
    counts = []
    for block in range(depth):
        patches = next((step.leaving for step in steps if step.block == block), patches)
        counts.append(patches)
    return counts

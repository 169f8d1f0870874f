"""One pass of a frozen model in training: the unpruned and the reduced model share what is the same in both."""

from __future__ import annotations

from typing import Any

import torch

from tntprune.backbones.reduced import Reduced
from tntprune.methods.steps import Plan, begins
from tntprune.ops.tokens import Tokens


def run_both(tower: Reduced, images: torch.Tensor, whole: bool, narrow: bool) -> tuple[Tokens | None, Tokens]:
    """Return the last tokens of the unpruned model, without gradients, and of the reduced one.

    The blocks before the first at which anything is done are run once for both. Gradients reach the reduction and
    what comes after it, so this is for models that are frozen.

    Args:
        tower: A reduced model.
        images: (B, C, H, W).
        whole: Whether anyone asks for the unpruned model's; else None is given.
        narrow: Whether prefix tokens are all that anyone asks for.
    """
    if tower.trace is not None:  # somebody wants to see a whole pass
        with torch.no_grad():
            teacher = finish(tower, *tower.enter(images), None, 0, narrow) if whole else None
        return teacher, tower.walk(images)
    with torch.no_grad():
        tokens, everywhere = tower.enter(images)
        plan = tower.reduction.plan(tokens.count)
        first = begins(plan)
        tokens = tower.onward(tokens, everywhere, None, 0, first)
        teacher = finish(tower, tokens, everywhere, None, first, narrow) if whole else None
    return teacher, finish(tower, tokens, everywhere, plan, first, narrow)


def run_from(tower: Reduced, tokens: Tokens, narrow: bool) -> Tokens:
    """Return the reduced model's last tokens, from those that leave a block before which it does nothing."""
    plan = tower.reduction.plan(tokens.count)
    assert begins(plan) >= tokens.block, "the reduction acts before the block whose tokens were kept"
    return finish(tower, tokens, None, plan, tokens.block, narrow)


def finish(tower: Reduced, tokens: Tokens, everywhere: Any, plan: Plan | None, first: int, narrow: bool) -> Tokens:
    """Go on to the end; only prefix tokens leave the last block, where nobody asks for others and it is idle."""
    depth = len(tower.blocks)
    if not narrow or first == depth or not (plan is None or plan[depth].idle):
        return tower.onward(tokens, everywhere, plan, first)
    return tower.run_for_prefix(*tower.advance(tokens, everywhere, plan, first, depth - 1), apart=False)

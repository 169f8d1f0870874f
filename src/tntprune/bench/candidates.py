"""What is timed: the unpruned model, its reductions, and beside each the bound of its speed and random drop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tntprune.analysis.macs import macs
from tntprune.analysis.speed_bound import Scattered, Slicing, beside
from tntprune.backbones.attach import base_of, is_reduced, reduction_of, twin_of
from tntprune.methods import Config
from tntprune.methods.text import described
from tntprune.reduce import reduce_

BESIDE = ("bound", "random")  # the methods of what is timed beside a reduction


@dataclass(frozen=True)
class Candidate:
    """One model to time. All of them share their weights.

    Args:
        method: "unpruned", "bound", "random" or a method's name.
        options: The method's options that are not at their defaults; for the bound and random drop, those of the
            method whose numbers of tokens they have.
        keep: The share that stays at each location, or None where a method has no such option.
        model: In eval mode.
        mac_ratio: The unpruned model's multiply-accumulates over this one's; of a method whose number of tokens
            differs from image to image, the least it can be.
        variable: Whether it is such a method.
        tokens: Patch tokens that enter each block.
        bound: Which candidate is the bound of this one, by its number, or None.
    """

    method: str
    options: str
    keep: float | tuple[float, ...] | None
    model: nn.Module
    mac_ratio: float
    variable: bool
    tokens: tuple[int, ...]
    bound: int | None = None


def candidates(
    model: nn.Module, configs: Sequence[Config], reduced: Sequence[nn.Module] = (), last_block: str | None = None
) -> list[Candidate]:
    """Return the unpruned model, then every reduction; after each new set of token counts the bound and random drop.

    Args:
        model: In eval mode; a reduction that is on it is left out.
        configs: What to put on it.
        reduced: Models of the same shape that are reduced already, such as trained ones.
        last_block: Of the configs, see `tntprune.reduce_`; the bound is of the same kind.
    """
    base = base_of(model)
    found = [_candidate("unpruned", base)]
    bounds: dict[Any, int] = {}
    for one in [*reduced, *(reduce_(twin_of(base), config, last_block=last_block) for config in configs)]:
        method = reduction_of(one)
        method.warned = True  # its time does not depend on what it has learned
        steps = tuple((step.place, step.leaving) for step in method.steps(method.layout.patches))
        key = steps, method.last_block
        new = bool(steps) and key not in bounds
        bound = bounds.setdefault(key, len(found) + 1) if steps else None
        found.append(replace(_candidate(method.config.method, one), bound=bound))
        if new:
            found.append(_candidate("bound", beside(one, Slicing)))
            found.append(replace(_candidate("random", beside(one, Scattered)), bound=bound))
    return found


def _candidate(method: str, model: nn.Module) -> Candidate:
    cost, options, keep = macs(model), "", None
    if is_reduced(model):
        config = reduction_of(model).config
        options = described(config)
        if cost.last_block == "prefix":
            options = f"{options} last_block=prefix".strip()
        if config.by_share and (config.at is not None or config.keep is not None):
            keep = config.given[0] if len(config.given) == 1 else config.given
    return Candidate(method, options, keep, model, cost.base_macs / cost.macs, cost.most, tuple(cost.tokens))

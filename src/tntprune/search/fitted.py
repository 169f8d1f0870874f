"""The keep rate that meets a budget of MACs, by counting alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from tntprune.analysis.macs import macs
from tntprune.methods import Config
from tntprune.reduce import reduce_, restore_

C = TypeVar("C", bound=Config)


def fitted(model: nn.Module, make: Callable[[float], C], budget: float, steps: int = 1000) -> C:
    """Return the config whose MACs come nearest to a budget from below, by bisection; the model is not reduced then.

    Args:
        model: The model, reduced or not.
        make: Makes a config of a keep rate in (0, 1].
        budget: Multiply-accumulates per image. If none meets it, the config of the smallest rate is returned.
        steps: Rates that are tried: 1 / steps, 2 / steps, ..., 1.
    """
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        meets = macs(reduce_(model, make(middle / steps))).macs <= budget
        low, high = (middle, high) if meets else (low, middle - 1)
    restore_(model)
    return make(low / steps)

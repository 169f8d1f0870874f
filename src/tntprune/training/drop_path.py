"""Stochastic depth on a model that was made without: in training, now and then a block is left out for an image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from timm.layers import DropPath
from torch import nn

from tntprune.backbones.base import tower_of
from tntprune.errors import UserError

PLACES = ("drop_path1", "drop_path2")


class Depth:
    """The drop-path of a model's blocks, rising linearly to a rate at the last one, as timm's models have it.

    Args:
        model: Whose blocks have timm's places for it.
        rate: At the last block, from 0 to below 1; 0 changes nothing.

    Raises:
        UserError: the blocks have no such places.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.blocks: list[Any] = list(getattr(tower_of(model), "blocks", ())) if rate else []
        if rate and not all(hasattr(block, place) for block in self.blocks or [None] for place in PLACES):
            raise UserError(
                f"drop_path={rate}: the blocks of {type(model).__name__} have no drop-path; expected one of timm's "
                "models, or drop_path=0"
            )
        steps = max(1, len(self.blocks) - 1)
        self.places = [(block, place) for block in self.blocks for place in PLACES]
        self.made = [DropPath(rate * (turn // len(PLACES)) / steps).train() for turn in range(len(self.places))]

    @contextmanager
    def on(self) -> Iterator[None]:
        """It is there for as long as the context lasts, whatever the mode of the model."""
        kept = [getattr(block, place) for block, place in self.places]
        try:
            for (block, place), module in zip(self.places, self.made, strict=True):
                setattr(block, place, module)
            yield
        finally:
            for (block, place), module in zip(self.places, kept, strict=True):
                setattr(block, place, module)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Nothing is left out meanwhile, although it is on."""
        for module in self.made:
            module.eval()
        try:
            yield
        finally:
            for module in self.made:
                module.train()

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

    With a rate of 0 nothing changes. Blocks without timm's places for it are a UserError.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        blocks: list[Any] = list(getattr(tower_of(model), "blocks", ())) if rate else []
        if rate and not all(hasattr(block, place) for block in blocks or [None] for place in PLACES):
            raise UserError(
                f"drop_path={rate}: the blocks of {type(model).__name__} have no drop-path; expected one of timm's "
                "models, or drop_path=0"
            )
        steps = max(1, len(blocks) - 1)
        self.places = [(block, place) for block in blocks for place in PLACES]
        self.own = [getattr(block, place) for block, place in self.places]
        self.made = [DropPath(rate * (turn // len(PLACES)) / steps).train() for turn in range(len(self.places))]

    @contextmanager
    def on(self, on: bool = True) -> Iterator[None]:
        """Leave blocks out for as long as the context lasts, whatever the mode of the model; or not, within it."""
        kept = [getattr(block, place) for block, place in self.places]
        self._put(self.made if on else self.own)
        try:
            yield
        finally:
            self._put(kept)

    def _put(self, modules: list[Any]) -> None:
        for (block, place), module in zip(self.places, modules, strict=True):
            setattr(block, place, module)

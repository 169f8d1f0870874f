"""Where the vision towers of Hugging Face's transformers have what all of them have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn


class Parts(NamedTuple):
    """One block of any family, under one set of names.

    Args:
        norm: Before the attention.
        attention: The module.
        query: The projection to all heads; key and value: the same.
        project: What the heads give, to the width of the tokens.
        head_dim: Of each head.
        join: What is done to the attention's output before it is added to the residual.
        mlp_norm: Before the MLP.
        mlp: The MLP.
        mlp_join: What is done to its output before it is added to the residual.
    """

    norm: nn.Module
    attention: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    project: nn.Linear
    head_dim: int
    join: Callable[[torch.Tensor], torch.Tensor]
    mlp_norm: nn.Module
    mlp: nn.Module
    mlp_join: Callable[[torch.Tensor], torch.Tensor]


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    """Return the output of an attention or an MLP, for blocks that add it to the residual unchanged."""
    return x


@dataclass(frozen=True)
class Anatomy:
    """Where the towers of one family have what every one of them has.

    Args:
        name: Of the family.
        layers: The classes of its blocks.
        blocks: A tower's blocks.
        prefix: A tower's number of prefix tokens.
        patch: A tower's patch convolution.
        image_size: A tower's own image size, rows and columns of pixels.
        parts: A block's parts.
        interpolates: Whether its embedding has to be told to interpolate positions, where it does not do so by itself.
        norm: Multiply-accumulates that its norms are counted with, for each element; 0 for RMS norms.
    """

    name: str
    layers: tuple[type[nn.Module], ...]
    blocks: Callable[[Any], nn.ModuleList]
    prefix: Callable[[Any], int]
    patch: Callable[[Any], nn.Conv2d]
    image_size: Callable[[Any], tuple[int, int]]
    parts: Callable[[Any], Parts]
    interpolates: bool = True
    norm: int = 5

    def grid(self, tower: Any, images: torch.Tensor) -> tuple[int, int]:
        """Return rows and columns of patches of such images."""
        height, width = self.patch(tower).stride
        return images.shape[-2] // height, images.shape[-1] // width

    def options(self, tower: Any, images: torch.Tensor) -> dict[str, Any]:
        """Return what its embedding has to be told of images of this size, where the caller does not say."""
        own = tuple(images.shape[-2:]) == self.image_size(tower)
        return {"interpolate_pos_encoding": True} if self.interpolates and not own else {}

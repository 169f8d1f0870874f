"""Dense output: the full grid of a model's last features, whatever it has dropped or merged."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import nn

from tntprune.backbones.base import find_backbone
from tntprune.backbones.reduced import Reduced
from tntprune.ops.tokens import Tokens, fill


@overload
def features(model: nn.Module, images: torch.Tensor, return_prefix_tokens: Literal[False] = False) -> torch.Tensor: ...
@overload
def features(
    model: nn.Module, images: torch.Tensor, return_prefix_tokens: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...


def features(
    model: nn.Module, images: torch.Tensor, return_prefix_tokens: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised tokens that leave a model, one for every patch of its images.

    A merged patch gets the token that carries it, a dropped one the token that was kept nearest to it. Where nothing of
    an image was kept, as A-ViT can do, its grid is 0. Of an unpruned model it is simply its own grid.

    A module that calls this compiles in one graph and can be exported; an unpruned model has to have been run here once
    before it is compiled, because a compiler cannot import its adapter.

    Args:
        model: A supported model, reduced or not.
        images: (B, C, H, W), normalised as the model wants them, of any size that it takes.
        return_prefix_tokens: Also give the prefix tokens: CLS, distillation, registers.

    Returns:
        (B, D, rows, columns), and with prefix tokens also (B, P, D).

    Raises:
        UserError: the model is not supported, or takes no images of that size.
    """
    if isinstance(model, Reduced):  # no adapter need be looked for, so that this is one graph for a compiler
        tower: Any = model
        grid = tower.grid(images)
    else:
        backbone = find_backbone(model)
        tower, grid = backbone.tower(model), backbone.grid(model, images)
    if isinstance(tower, Reduced):
        tokens: Tokens = tower.final(tower.walk(images, follow=True))
    else:
        last = find_backbone(tower).answer(tower, images).tokens
        assert last is not None  # of a tower
        tokens = last
    found = fill(tokens, grid)
    return (found, tokens.x[:, : tokens.prefix]) if return_prefix_tokens else found

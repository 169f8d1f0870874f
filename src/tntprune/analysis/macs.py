"""Multiply-accumulates in closed form: no weights, no run. What the paper calls GFLOPs.

Counted as the paper does, with fvcore's rules: matrix products in full, 5 for each element of a normalisation, nothing
for softmax, activations, sorting and gathering. Fused attention is counted too, which counting tools miss.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tntprune.backbones.attach import is_reduced, reduction_of
from tntprune.backbones.base import Costs, find_backbone, tower_of
from tntprune.errors import UserError
from tntprune.methods.steps import Counts, counts
from tntprune.system.units import unit_of


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates per image."""

    macs: int  # in all
    base_macs: int  # of the unpruned model
    tokens: list[int]  # patch tokens that enter each block
    mlp_tokens: list[int]  # patch tokens that enter each block's MLP
    per_block: list[int]
    reduction: dict[int, int]  # of the steps that remove tokens, by block
    embed: int  # of the patch embedding
    head: int  # of everything after the last block
    most: bool = False  # whether tokens differ from image to image, so that each figure is the most that is possible

    def __str__(self) -> str:
        scale, unit = unit_of(self.base_macs)
        lines = [f"{self.macs / scale:.2f} {unit} instead of {self.base_macs / scale:.2f}"]
        if self.most:
            lines[0] = f"at most {lines[0]}: each image keeps another number of tokens, and `eval` tells the mean"
        lines += [
            f"  block {number:2}: {tokens:4} patch tokens, {cost / scale:.3f} {unit}"
            for number, (tokens, cost) in enumerate(zip(self.tokens, self.per_block, strict=True), 1)
        ]
        lines.append(f"  scoring and removing: {sum(self.reduction.values()) / scale:.3f} {unit}")
        lines.append(f"  embedding and head: {(self.embed + self.head) / scale:.3f} {unit}")
        return "\n".join(lines)


def macs(model: nn.Module, img_size: tuple[int, int] | None = None) -> Macs:
    """Count the multiply-accumulates of a model, reduced or not.

    Args:
        model: A supported model; it is not changed.
        img_size: Rows and columns of pixels, if not the model's own size. Only of timm's models.

    Raises:
        UserError: the model is not supported, or cannot be given another image size.
    """
    if img_size is not None:
        return macs(_at_size(model, img_size))
    backbone = find_backbone(model)
    layout, costs = backbone.layout(model), backbone.costs(model)
    method = reduction_of(model) if is_reduced(model) else None
    steps = () if method is None else method.steps(layout.patches)
    left = counts(steps, layout.patches, layout.depth)
    own: dict[int, int] = {}
    for step in steps:
        assert method is not None
        own[step.place.block] = own.get(step.place.block, 0) + method.macs(step)
    base = model_macs(costs, counts((), layout.patches, layout.depth), layout.prefix)
    total = model_macs(costs, left, layout.prefix) + sum(own.values())
    per_block, head = block_macs(costs, left, layout.prefix), head_macs(costs, left.last, layout.prefix)
    most = method is not None and method.config.variable
    return Macs(total, base, left.attention, left.mlp, per_block, own, costs.embed, head, most)


def macs_by_image(model: nn.Module, counts: list[torch.Tensor]) -> list[int]:
    """Count the multiply-accumulates of each image of a batch, where the number of tokens differs between them.

    Padding, which a batch of images needs, is not counted: this is what an image costs on its own.

    Args:
        model: A reduced model.
        counts: `Trace.counts` of the batch, and at its end the tokens that are left.

    Raises:
        UserError: the model is not supported.
    """
    backbone, method = find_backbone(model), reduction_of(model)
    layout, costs = backbone.layout(model), backbone.costs(model)
    steps = method.steps(layout.patches)
    found = []
    for image in torch.stack(counts, 1).tolist():  # patch tokens before each half of each block, then at the end
        total = model_macs(costs, Counts(image[:-1:2], image[1:-1:2], image[-1]), layout.prefix)
        for step in steps:
            half = 2 * step.place.block - (2 if step.place.inside else 1)
            total += method.macs(step._replace(entering=image[max(0, half)]))
        found.append(total)
    return found


def _at_size(model: nn.Module, img_size: tuple[int, int]) -> nn.Module:
    """Copy a model without its weights, so that it takes images of another size."""
    find_backbone(model)
    shapes: dict[int, Any] = {id(value): torch.empty_like(value, device="meta") for value in model.buffers()}
    for value in model.parameters():
        shapes[id(value)] = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
    twin = copy.deepcopy(model, shapes)  # what it is told to have copied already, it does not copy
    tower: Any = tower_of(twin)
    if not hasattr(tower, "set_input_size"):
        raise UserError(f"{type(model).__name__} cannot be given another image size; expected one of timm's models")
    patch = tower.patch_embed.patch_size
    if any(size < step or size % step for size, step in zip(img_size, patch, strict=True)):
        raise UserError(f"img_size={img_size}: expected rows and columns in multiples of the patches' {patch}")
    tower.set_input_size(img_size)
    return twin


def model_macs(costs: Costs, left: Counts, prefix: int) -> int:
    """Return the multiply-accumulates of a model with so many patch tokens in its blocks, without removing any."""
    return sum(block_macs(costs, left, prefix)) + costs.embed + head_macs(costs, left.last, prefix)


def block_macs(costs: Costs, left: Counts, prefix: int) -> list[int]:
    """Return the multiply-accumulates of each block with so many patch tokens in it."""
    pairs = zip(left.attention, left.mlp, costs.blocks, strict=True)
    return [(n + prefix) * b.attention + (n + prefix) ** 2 * b.pair + (m + prefix) * b.mlp for n, m, b in pairs]


def head_macs(costs: Costs, patches: int, prefix: int) -> int:
    """Return the multiply-accumulates of everything after the last block, which so many patch tokens leave."""
    return costs.norm * (patches + prefix) + costs.pool * patches + costs.head

"""Hugging Face's SigLIP 2 for grids of any shape (NaFlex), which takes patches instead of images.

The vision tower alone, with a classifier, and inside the whole model. All images of a batch have the same number of
patches; padding behind them is cut off, because a reduced model would count it as patches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.siglip2 import modeling_siglip2 as siglip2

from tntprune.backbones.base import Costs
from tntprune.backbones.hf import clip
from tntprune.backbones.hf.siglip import HuggingFaceSiglip, Tower, tables
from tntprune.backbones.hf.towers import (
    ReducedPooling,
    mean_by_size,
)
from tntprune.errors import UserError
from tntprune.methods.base import Layout


class Linearly(NamedTuple):
    """A patch embedding by a linear layer, with the names of a convolution."""

    in_channels: int
    stride: tuple[int, int]
    weight: torch.Tensor


def _patch(tower: Any) -> Any:
    config = tower.config
    return Linearly(config.num_channels, (config.patch_size,) * 2, tower.embeddings.patch_embedding.weight)


def _size(tower: Any) -> tuple[int, int]:
    return (tower.embeddings.position_embedding_size * tower.config.patch_size,) * 2


ANATOMY = replace(
    clip.ANATOMY, name="SigLIP 2", layers=(siglip2.Siglip2EncoderLayer,), prefix=lambda tower: 0, patch=_patch,
    image_size=_size, interpolates=False,
)  # fmt: skip


def patches_of(tower: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut images (B, C, H, W) into what the model reads: patches (B, N, P * P * C), and the shapes of grids (B, 2)."""
    rows, columns = ANATOMY.grid(tower, images)
    size = tower.config.patch_size
    images = images[:, :, : rows * size, : columns * size]
    cut = images.unflatten(3, (columns, size)).unflatten(2, (rows, size))  # (B, C, rows, P, columns, P)
    shapes = torch.tensor([[rows, columns]], device=images.device).expand(len(images), -1)
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2), shapes


def without_padding(patches: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Cut off the padding behind patches (B, N, P * P * C) whose mask (B, N) is 0 there.

    Raises:
        UserError: the images have different numbers of patches.
    """
    if mask is None:
        return patches
    if torch.compiler.is_compiling():
        torch._assert_async(mask.bool().all(), "padded patches in a compiled model; expected images that fill the grid")
        return patches
    fewest, most = (int(count) for count in mask.sum(1).aminmax())
    if fewest != most:
        raise UserError(
            f"images of {fewest} to {most} patches in one batch: a reduced model would count padding as patches; "
            "expected images with the same number of patches, or one image at a time"
        )
    return patches[:, :most]


class _Tower(Tower):
    anatomy = ANATOMY

    def embed(self: Any, images: torch.Tensor, shapes: Any = None, **options: Any) -> tuple[torch.Tensor, None]:
        """Take patches with the shapes of their grids, or images."""
        if shapes is None and images.ndim != 4:
            raise UserError("patches without spatial_shapes; expected them too, as the processor makes them")
        patches, shapes = patches_of(self, images) if shapes is None else (images, shapes)
        return self.embeddings(patches, shapes), None

    def forward(
        self, pixel_values: Any, pixel_attention_mask: Any = None, spatial_shapes: Any = None, **kwargs: Any
    ) -> Any:
        """Turn patches into the tokens that are left, normalised, and pooled where the model does that."""
        patches = without_padding(pixel_values, pixel_attention_mask)
        return self.answer(patches, (kwargs.get("attention_mask"),), kwargs, shapes=spatial_shapes)


class _Classifier(ReducedPooling):
    pool = staticmethod(mean_by_size)

    def forward(
        self: Any, pixel_values: Any = None, pixel_attention_mask: Any = None, spatial_shapes: Any = None,
        labels: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Turn patches into logits, as the unpruned model; the mean weighs merged tokens by their size."""
        patches = without_padding(pixel_values, pixel_attention_mask)
        masks = (kwargs.get("attention_mask"),)
        tokens, out = self.vision_model.outputs(patches, masks, kwargs, pools=False, shapes=spatial_shapes)
        if tokens.size is None and pixel_attention_mask is not None:  # the unpruned model sums and divides then
            tokens = replace(tokens, size=torch.ones_like(tokens.index, dtype=tokens.x.dtype))
        return self.classify(labels, (tokens, out), kwargs)


class HuggingFaceSiglip2(HuggingFaceSiglip):
    """The adapter. It cuts images into patches itself, so that all that takes images works."""

    anatomy = ANATOMY
    swaps, opened, holders = tables(siglip2, "Siglip2", _Tower, _Classifier, __name__)

    def takes_images(self, model: nn.Module) -> bool:
        return False

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        tower: Any = self.tower(model)
        resampled = shape.patches * tower.embeddings.position_embedding.weight.numel()  # at each pass, as a product
        return super().ends(model, costs, shape)._replace(embed=costs.embed + resampled)

    def unpruned(self, tower: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        patches, shapes = patches_of(tower, images)
        out = tower(patches, torch.ones(patches.shape[:2], device=patches.device), shapes)
        return out.last_hidden_state, out.pooler_output


ADAPTER = HuggingFaceSiglip2()

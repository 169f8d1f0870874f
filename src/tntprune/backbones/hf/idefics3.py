"""The vision towers of Hugging Face's Idefics3 and SmolVLM: SigLIP without a pooling head, for padded images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.idefics3 import modeling_idefics3 as idefics3
from transformers.models.smolvlm import modeling_smolvlm as smolvlm

from tntprune.backbones.base import Costs
from tntprune.backbones.hf import clip
from tntprune.backbones.hf.adapter import HuggingFace
from tntprune.backbones.hf.towers import OpenAttention, OpenLayer, ReducedTower, derived, mean_by_size
from tntprune.errors import UserError
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens

FAMILIES = ((idefics3, "Idefics3"), (smolvlm, "SmolVLM"))  # and how their classes' names begin
ANATOMY = replace(
    clip.ANATOMY,
    name="Idefics3",
    layers=tuple(getattr(module, f"{name}EncoderLayer") for module, name in FAMILIES),
    prefix=lambda tower: 0,
    interpolates=False,
)


class _Tower(ReducedTower):
    anatomy = ANATOMY

    def embed(self: Any, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        whole = images.new_ones((len(images), *self.grid(images)), dtype=torch.bool)
        return self.embeddings(pixel_values=images, patch_attention_mask=whole), None

    def final(self: Any, tokens: Tokens) -> Tokens:
        return replace(tokens, x=self.post_layernorm(tokens.x))

    def pooled(self, tokens: Tokens) -> None:
        return None

    def forward(self, pixel_values: Any, patch_attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Turn images into the tokens that are left, normalised."""
        if patch_attention_mask is not None and not patch_attention_mask.all():
            raise UserError(
                "a reduced tower takes no padded images, and this batch has images of different sizes; expected images "
                "of one size, such as a batch of 1, or the processor's do_image_splitting=True"
            )
        return self.answer(pixel_values, (), kwargs)


OPENED = {
    kind: derived(kind, mixin, home=__name__, **attributes)
    for module, name in FAMILIES
    for kind, mixin, attributes in (
        (getattr(module, f"{name}EncoderLayer"), OpenLayer, {"parts": staticmethod(clip.parts)}),
        (
            getattr(module, f"{name}VisionAttention"),
            OpenAttention,
            {"names": ("out_proj", "scale", "dropout")},
        ),
    )
}
TOWERS = {
    kind: derived(kind, _Tower, home=__name__)
    for kind in (getattr(module, f"{name}VisionTransformer") for module, name in FAMILIES)
}


class HuggingFaceIdefics3(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    swaps: ClassVar = TOWERS
    opened: ClassVar = OPENED

    def pool(self, model: nn.Module) -> str:
        return "avg"

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        return costs

    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = mean_by_size(tokens)
        return out, out


ADAPTER = HuggingFaceIdefics3()

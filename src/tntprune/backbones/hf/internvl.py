"""The vision tower of Hugging Face's InternVL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.internvl import modeling_internvl as internvl

from tntprune.backbones.base import Costs
from tntprune.backbones.hf.adapter import HuggingFace
from tntprune.backbones.hf.anatomy import Anatomy, Parts
from tntprune.backbones.hf.towers import OpenAttention, OpenLayer, ReducedTower, mean_by_size
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens


def _parts(block: Any) -> Parts:
    attention = block.attention
    return Parts(
        block.layernorm_before, attention, attention.q_proj, attention.k_proj, attention.v_proj,
        attention.projection_layer, attention.head_dim,
        lambda x: block.lambda_1 * attention.projection_dropout(x), block.layernorm_after, block.mlp,
        lambda x: block.lambda_2 * block.dropout(x),
    )  # fmt: skip


ANATOMY = Anatomy(
    name="InternVL",
    layers=(internvl.InternVLVisionLayer,),
    blocks=lambda tower: tower.encoder.layer,
    prefix=lambda tower: 1,
    patch=lambda tower: tower.embeddings.patch_embeddings.projection,
    image_size=lambda tower: tuple(tower.embeddings.image_size),
    parts=_parts,
    interpolates=False,
)


class InternVLVisionLayer(OpenLayer, internvl.InternVLVisionLayer):  # type: ignore[misc]
    """An InternVLVisionLayer with a reduction inside it."""

    parts = staticmethod(_parts)


class InternVLVisionAttention(OpenAttention, internvl.InternVLVisionAttention):  # type: ignore[misc]
    """An InternVLVisionAttention that a reduction can look at."""

    names = ("projection_layer", "scale", "attention_dropout")

    def placed(self: Any, query: torch.Tensor, key: torch.Tensor, **context: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys (B, heads, n, head_dim), normalised over all heads together."""
        split = query.shape[1:4:2]
        query, key = (
            norm(x.transpose(1, 2).flatten(2)).unflatten(2, split).transpose(1, 2)
            for norm, x in ((self.q_norm, query), (self.k_norm, key))
        )
        return query, key


class InternVLVisionModel(ReducedTower, internvl.InternVLVisionModel):  # type: ignore[misc]
    """An InternVLVisionModel whose forward drops or merges tokens."""

    anatomy = ANATOMY
    output = internvl.InternVLVisionModelOutputWithPooling
    masked = False

    def final(self, tokens: Tokens) -> Tokens:
        return replace(tokens, x=self.layernorm(tokens.x))

    def pooled(self, tokens: Tokens) -> None:
        return None

    def forward(self, pixel_values: Any, bool_masked_pos: Any = None, **kwargs: Any) -> Any:
        """Turn images into the tokens that are left, normalised where the model does that."""
        return self.answer(pixel_values, (bool_masked_pos,), kwargs)


class HuggingFaceInternVL(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    swaps: ClassVar = {internvl.InternVLVisionModel: InternVLVisionModel}
    opened: ClassVar = {
        internvl.InternVLVisionLayer: InternVLVisionLayer,
        internvl.InternVLVisionAttention: InternVLVisionAttention,
    }

    def pool(self, model: nn.Module) -> str:
        return "avg"

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        return costs if isinstance(model.layernorm, nn.LayerNorm) else costs._replace(norm=0)

    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = mean_by_size(tokens)
        return out, out


ADAPTER = HuggingFaceInternVL()

"""Hugging Face's AIMv2: the vision tower alone and inside the whole model. No CLS token; pooled by attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.aimv2 import modeling_aimv2 as aimv2

from tntprune.backbones.base import Costs
from tntprune.backbones.hf.adapter import HuggingFace, linears
from tntprune.backbones.hf.anatomy import Anatomy, Parts, as_it_is
from tntprune.backbones.hf.towers import (
    OpenAttention,
    OpenLayer,
    ReducedModel,
    ReducedTower,
    derived,
    mean_by_size,
)
from tntprune.errors import UserError
from tntprune.methods.base import Layout
from tntprune.ops.attention import log_size
from tntprune.ops.tokens import Tokens


def _parts(block: Any) -> Parts:
    attention = block.attention
    return Parts(
        block.rms_norm1, attention, attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj,
        attention.head_dim, as_it_is, block.rms_norm2, block.ffn, as_it_is,
    )  # fmt: skip


def _size(tower: Any) -> tuple[int, int]:
    return tower.config.image_size, tower.config.image_size


ANATOMY = Anatomy(
    name="AIMv2",
    layers=(aimv2.Aimv2EncoderLayer,),
    blocks=lambda tower: tower.encoder.layers,
    prefix=lambda tower: 0,
    patch=lambda tower: tower.embeddings.patch_embed,
    image_size=_size,
    parts=_parts,
    interpolates=False,
    norm=0,
)


class _Tower(ReducedTower):
    anatomy = ANATOMY

    def final(self: Any, tokens: Tokens) -> Tokens:
        return replace(tokens, x=self.rms_norm(tokens.x))

    def pooled(self: Any, tokens: Tokens) -> torch.Tensor | None:
        return self.head(tokens.x, tokens.size) if self.use_head else None

    def forward(self, pixel_values: Any, **kwargs: Any) -> Any:
        """Turn images into the tokens that are left, normalised, and pooled where the model does that."""
        return self.answer(pixel_values, (kwargs.get("attention_mask"),), kwargs)


class _Pool:
    """A pooling head to which a token of size s counts like s equal ones."""

    def forward(self: Any, hidden_states: torch.Tensor, size: torch.Tensor | None = None) -> torch.Tensor:
        """Pool tokens (B, n, D) of sizes (B, n), or None if each stands for one patch, to (B, D)."""
        if size is None:
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        bias = log_size(size, 0, power=1).to(hidden_states.dtype)  # (B, 1, 1, n)
        heads = (self.num_heads, hidden_states.shape[2] // self.num_heads)
        query = self.cls_token.expand(len(hidden_states), -1, -1).unflatten(2, heads).transpose(1, 2)
        key, value = (layer(hidden_states).unflatten(2, heads).transpose(1, 2) for layer in (self.k_proj, self.v_proj))
        pooled = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.output_proj(pooled.transpose(1, 2).flatten(2)[:, 0])  # type: ignore[no-any-return]


class HuggingFaceAimv2(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    swaps: ClassVar = {
        aimv2.Aimv2VisionModel: derived(aimv2.Aimv2VisionModel, _Tower, home=__name__),
        aimv2.Aimv2Model: derived(aimv2.Aimv2Model, ReducedModel, home=__name__),
    }
    opened: ClassVar = {
        aimv2.Aimv2EncoderLayer: derived(aimv2.Aimv2EncoderLayer, OpenLayer, home=__name__, parts=staticmethod(_parts)),
        aimv2.Aimv2Attention: derived(
            aimv2.Aimv2Attention, OpenAttention, home=__name__, names=("out_proj", "scale", "dropout")
        ),
        aimv2.Aimv2AttentionPoolingHead: derived(aimv2.Aimv2AttentionPoolingHead, _Pool, home=__name__),
    }
    holders: ClassVar = {aimv2.Aimv2Model: "vision_model"}

    def check_images(self, model: nn.Module, images: torch.Tensor) -> None:
        super().check_images(model, images)
        tower: Any = self.tower(model)
        given, own = tuple(images.shape[-2:]), _size(tower)
        if not tower.config.is_native and given != own:  # its positions cannot be resampled
            raise UserError(f"images of {given[0]} x {given[1]}: {type(model).__name__} takes {own[0]} x {own[1]} only")

    def pool(self, model: nn.Module) -> str:
        tower: Any = self.tower(model)
        return "map" if tower.use_head else "avg"

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        """Of a whole Aimv2Model, what an image costs; the text is not counted."""
        tower: Any = self.tower(model)
        width, once = shape.embed_dim, linears(getattr(model, "visual_projection", nn.Identity()))
        if not tower.use_head:
            return costs._replace(head=once)
        pool = 2 * width * width + 2 * width  # keys and values, and their products with one query
        return costs._replace(pool=pool, head=once + linears(tower.head.output_proj))

    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = mean_by_size(tokens) if pooled is None else pooled
        if hasattr(model, "visual_projection"):
            out = model.visual_projection(out)
        return out, out


ADAPTER = HuggingFaceAimv2()

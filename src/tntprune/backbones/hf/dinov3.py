"""Hugging Face's DINOv3: the model alone and as a backbone. Rotary positions go with the tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3

from tntprune.backbones.base import Costs
from tntprune.backbones.hf import dinov2
from tntprune.backbones.hf.adapter import HuggingFace
from tntprune.backbones.hf.anatomy import Anatomy
from tntprune.backbones.hf.maps import MapsTower
from tntprune.backbones.hf.towers import OpenAttention, OpenLayer, ReducedTower, derived
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens


class Turns(NamedTuple):
    """How far queries and keys are turned: cosines and sines.

    Args:
        table: Both, (N + 1, 2 * head_dim), of each place, then of a token without one, which is not turned.
        turns: Both as the blocks take them, of the tokens that there are.
    """

    table: torch.Tensor
    turns: tuple[torch.Tensor, torch.Tensor]


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


ANATOMY = Anatomy(
    name="DINOv3",
    layers=(dinov3.DINOv3ViTLayer,),
    blocks=lambda tower: tower.model.layer,
    prefix=lambda tower: 1 + tower.config.num_register_tokens,
    patch=lambda tower: tower.embeddings.patch_embeddings,
    image_size=lambda tower: _pair(tower.config.image_size),
    parts=dinov2.parts,
    interpolates=False,
)


class _Attention(OpenAttention):
    names = ("o_proj", "scaling", "dropout")

    def placed(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: Any = None, **context: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        turned: tuple[torch.Tensor, torch.Tensor] = dinov3.apply_rotary_pos_emb(query, key, *position_embeddings)
        return turned


class _Rotary(ReducedTower):
    anatomy = ANATOMY

    def embed(self: Any, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Turns]:
        images = images.to(ANATOMY.patch(self).weight.dtype)
        cosine, sine = self.rope_embeddings(images)  # (N, head_dim); in training other ones at each call
        still = torch.cat([torch.ones_like(cosine[:1]), torch.zeros_like(sine[:1])], 1)  # of a token without a place
        table = torch.cat([torch.cat([cosine, sine], 1), still])
        return self.embeddings(images), Turns(table, (cosine, sine))

    def placed(self, places: Turns, index: torch.Tensor) -> Turns:
        row = index % len(places.table)  # NOWHERE becomes the last
        turns = places.table.index_select(0, row.flatten()).unflatten(0, row.shape)[:, None]  # (B, 1, n, 2 * head_dim)
        cosine, sine = turns.chunk(2, -1)
        return Turns(places.table, (cosine, sine))

    def context(self, number: int, places: Turns, opened: bool) -> dict[str, Any]:
        return {"position_embeddings": places.turns}

    def final(self: Any, tokens: Tokens) -> Tokens:
        return replace(tokens, x=self.norm(tokens.x))

    def pooled(self, tokens: Tokens) -> torch.Tensor:
        return tokens.x[:, 0, :]


class _Tower(_Rotary):
    def forward(self, pixel_values: Any, bool_masked_pos: Any = None, **kwargs: Any) -> Any:
        """Turn images into the tokens that are left, normalised."""
        return self.answer(pixel_values, (bool_masked_pos, kwargs.get("attention_mask")), kwargs)


class _Backbone(MapsTower, _Rotary):
    norms_last = True
    prefixed = False

    def mapped(
        self: Any, maps: tuple[Any, ...], classes: tuple[torch.Tensor, ...], states: tuple[Any, ...] | None
    ) -> Any:
        cls_tokens = classes if getattr(self.config, "return_class_token", False) else None
        return dinov3.DINOv3ViTBackboneOutput(feature_maps=maps, cls_tokens=cls_tokens, hidden_states=states)


class HuggingFaceDinov3(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    swaps: ClassVar = {
        dinov3.DINOv3ViTModel: derived(dinov3.DINOv3ViTModel, _Tower, home=__name__),
        dinov3.DINOv3ViTBackbone: derived(dinov3.DINOv3ViTBackbone, _Backbone, home=__name__),
    }
    opened: ClassVar = {
        dinov3.DINOv3ViTLayer: derived(
            dinov3.DINOv3ViTLayer, OpenLayer, home=__name__, parts=staticmethod(dinov2.parts)
        ),
        dinov3.DINOv3ViTAttention: derived(dinov3.DINOv3ViTAttention, _Attention, home=__name__),
    }

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        return costs

    def unpruned(self, tower: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(tower, dinov3.DINOv3ViTBackbone):
            return super().unpruned(tower, images)
        x = tower.embeddings(images.to(ANATOMY.patch(tower).weight.dtype))
        out = tower.model(x, position_embeddings=tower.rope_embeddings(images))
        return tower.norm(out.last_hidden_state), None

    def head(self, model: nn.Module, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens.x[:, 0], tokens.x[:, 0]


ADAPTER = HuggingFaceDinov3()

"""Hugging Face's ViT and DeiT: the models alone and with their classifiers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from transformers.models.deit import modeling_deit as deit
from transformers.models.vit import modeling_vit as vit

from tntprune.backbones.base import Costs
from tntprune.backbones.hf.adapter import HuggingFace, linears
from tntprune.backbones.hf.anatomy import Anatomy, Parts
from tntprune.backbones.hf.towers import OpenAttention, OpenLayer, ReducedModel, ReducedTower
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens


def _parts(block: Any) -> Parts:
    attention = block.attention
    return Parts(
        block.layernorm_before, attention, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        attention.head_dim, block.dropout, block.layernorm_after, block.mlp, block.dropout,
    )  # fmt: skip


ANATOMY = Anatomy(
    name="ViT",
    layers=(vit.ViTLayer, deit.DeiTLayer),
    blocks=lambda tower: tower.layers,
    prefix=lambda tower: 2 if hasattr(tower.embeddings, "distillation_token") else 1,
    patch=lambda tower: tower.embeddings.patch_embeddings.projection,
    image_size=lambda tower: tuple(tower.embeddings.patch_embeddings.image_size),
    parts=_parts,
)


class ViTLayer(OpenLayer, vit.ViTLayer):  # type: ignore[misc]
    """A ViTLayer with a reduction inside it."""

    parts = staticmethod(_parts)


class DeiTLayer(OpenLayer, deit.DeiTLayer):  # type: ignore[misc]
    """A DeiTLayer with a reduction inside it."""

    parts = staticmethod(_parts)


class ViTAttention(OpenAttention, vit.ViTAttention):  # type: ignore[misc]
    """A ViTAttention that a reduction can look at."""


class DeiTAttention(OpenAttention, deit.DeiTAttention):  # type: ignore[misc]
    """A DeiTAttention that a reduction can look at."""


class _Tower(ReducedTower):
    anatomy = ANATOMY

    def embed(self, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        return super().embed(images.to(ANATOMY.patch(self).weight.dtype), **options)

    def final(self: Any, tokens: Tokens) -> Tokens:
        return replace(tokens, x=self.layernorm(tokens.x))

    def pooled(self: Any, tokens: Tokens) -> torch.Tensor | None:
        return None if self.pooler is None else self.pooler(tokens.x)

    def forward(
        self,
        pixel_values: Any = None,
        bool_masked_pos: Any = None,
        interpolate_pos_encoding: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Turn images into the tokens that are left, normalised."""
        masks = (bool_masked_pos, attention_mask)
        return self.answer(pixel_values, masks, kwargs, interpolate_pos_encoding=interpolate_pos_encoding)


class ViTModel(_Tower, vit.ViTModel):  # type: ignore[misc]
    """A ViTModel whose forward drops or merges tokens."""


class DeiTModel(_Tower, deit.DeiTModel):  # type: ignore[misc]
    """A DeiTModel whose forward drops or merges tokens."""


class ViTForImageClassification(ReducedModel, vit.ViTForImageClassification):  # type: ignore[misc]
    """A ViTForImageClassification with such a tower."""


class DeiTForImageClassification(ReducedModel, deit.DeiTForImageClassification):  # type: ignore[misc]
    """A DeiTForImageClassification with such a tower."""


class DeiTForImageClassificationWithTeacher(
    ReducedModel,
    deit.DeiTForImageClassificationWithTeacher,  # type: ignore[misc]
):
    """A DeiTForImageClassificationWithTeacher with such a tower."""


class HuggingFaceViT(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    swaps: ClassVar = {
        vit.ViTModel: ViTModel,
        vit.ViTForImageClassification: ViTForImageClassification,
        deit.DeiTModel: DeiTModel,
        deit.DeiTForImageClassification: DeiTForImageClassification,
        deit.DeiTForImageClassificationWithTeacher: DeiTForImageClassificationWithTeacher,
    }
    opened: ClassVar = {
        vit.ViTLayer: ViTLayer,
        deit.DeiTLayer: DeiTLayer,
        vit.ViTAttention: ViTAttention,
        deit.DeiTAttention: DeiTAttention,
    }
    holders: ClassVar = {
        vit.ViTForImageClassification: "vit",
        deit.DeiTForImageClassification: "deit",
        deit.DeiTForImageClassificationWithTeacher: "deit",
    }

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        tower: Any = self.tower(model)
        heads = [tower.pooler] if tower.pooler is not None else []
        heads += [getattr(model, name) for name in ("classifier", "cls_classifier", "distillation_classifier")
                  if hasattr(model, name)]  # fmt: skip
        return costs._replace(head=linears(*heads))

    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        cls = tokens.x[:, 0]
        if isinstance(model, deit.DeiTForImageClassificationWithTeacher):
            logits = model.cls_classifier(cls)
            return (logits + model.distillation_classifier(tokens.x[:, 1])) / 2, logits
        if hasattr(model, "classifier"):
            cls = model.classifier(cls)
        elif pooled is not None:
            cls = pooled
        return cls, cls


ADAPTER = HuggingFaceViT()

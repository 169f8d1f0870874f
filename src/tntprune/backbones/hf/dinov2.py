"""Hugging Face's DINOv2, with and without register tokens: the models alone, with classifiers, as backbones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.dinov2 import modeling_dinov2 as plain
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers as registers

from tntprune.backbones.base import Costs
from tntprune.backbones.hf.adapter import HuggingFace, linears
from tntprune.backbones.hf.anatomy import Anatomy, Parts
from tntprune.backbones.hf.maps import MapsTower
from tntprune.backbones.hf.towers import (
    OpenAttention,
    OpenLayer,
    ReducedPooling,
    ReducedTower,
    derivations,
    mean_by_size,
)
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens

FAMILIES = ((plain, "Dinov2"), (registers, "Dinov2WithRegisters"))  # and how their classes' names begin


def parts(block: Any) -> Parts:
    """Return the parts of a block of DINOv2, which DINOv3's are named after."""
    attention = block.attention
    return Parts(
        block.norm1, attention, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        attention.head_dim, lambda x: block.drop_path(block.layer_scale1(x)),
        block.norm2, block.mlp, lambda x: block.drop_path(block.layer_scale2(x)),
    )  # fmt: skip


ANATOMY = Anatomy(
    name="DINOv2",
    layers=(plain.Dinov2Layer, registers.Dinov2WithRegistersLayer),
    blocks=lambda tower: tower.encoder.layer,
    prefix=lambda tower: 1 + getattr(tower.config, "num_register_tokens", 0),
    patch=lambda tower: tower.embeddings.patch_embeddings.projection,
    image_size=lambda tower: tuple(tower.embeddings.patch_embeddings.image_size),
    parts=parts,
    interpolates=False,
)


class _Tower(ReducedTower):
    anatomy = ANATOMY

    def final(self: Any, tokens: Tokens) -> Tokens:
        return replace(tokens, x=self.layernorm(tokens.x))

    def pooled(self, tokens: Tokens) -> torch.Tensor:
        return tokens.x[:, 0, :]


class _Model(_Tower):
    def forward(
        self, pixel_values: Any = None, bool_masked_pos: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        """Turn images into the tokens that are left, normalised."""
        return self.answer(pixel_values, (bool_masked_pos, attention_mask), kwargs)


def _pool(tokens: Tokens) -> torch.Tensor:
    """Return what the classifiers read: the CLS token and the mean of the patch tokens, (B, 2 D)."""
    return torch.cat([tokens.x[:, 0], mean_by_size(tokens)], dim=1)


class _Classifier(ReducedPooling):
    pool = staticmethod(_pool)

    def forward(
        self: Any, pixel_values: Any = None, labels: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        """Turn images into logits, as the unpruned model; the mean weighs merged tokens by their size."""
        tower: Any = self.get_submodule(self.base_model_prefix)
        loss = {name: value for name, value in kwargs.items() if name != "return_dict"}
        return self.classify(
            labels, tower.outputs(pixel_values, (attention_mask,), kwargs, pools=False), kwargs, **loss
        )


class _Backbone(MapsTower, _Tower):
    """A DINOv2 that gives maps."""


made = partial(derivations, FAMILIES, home=__name__)


class HuggingFaceDinov2(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    swaps: ClassVar = {
        **made("Model", _Model),
        **made("Backbone", _Backbone),
        **made("ForImageClassification", _Classifier),
    }
    opened: ClassVar = {**made("Layer", OpenLayer, parts=staticmethod(parts)), **made("Attention", OpenAttention)}
    holders: ClassVar = {
        kind: kind.base_model_prefix
        for kind in (plain.Dinov2ForImageClassification, registers.Dinov2WithRegistersForImageClassification)
    }

    def pool(self, model: nn.Module) -> str:
        return "avg" if hasattr(model, "classifier") else "token"

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        return costs._replace(head=linears(getattr(model, "classifier", nn.Identity())))

    def unpruned(self, tower: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(tower, plain.Dinov2Backbone | registers.Dinov2WithRegistersBackbone):
            return super().unpruned(tower, images)
        return tower.layernorm(tower.encoder(tower.embeddings(images)).last_hidden_state), None

    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = model.classifier(_pool(tokens)) if hasattr(model, "classifier") else tokens.x[:, 0]
        return out, out


ADAPTER = HuggingFaceDinov2()

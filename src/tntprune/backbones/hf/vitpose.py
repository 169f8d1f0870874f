"""Hugging Face's ViTPose: its backbone, which gives the full grid to the heads for poses. No CLS token."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.vitpose_backbone import modeling_vitpose_backbone as vitpose

from tntprune.backbones.base import Costs
from tntprune.backbones.blocks import Inside
from tntprune.backbones.hf.adapter import HuggingFace
from tntprune.backbones.hf.anatomy import Anatomy, Parts, as_it_is
from tntprune.backbones.hf.maps import MapsTower
from tntprune.backbones.hf.towers import OpenAttention, OpenLayer, derived, mean_by_size
from tntprune.errors import UserError
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens


def _parts(block: Any) -> Parts:
    attention = block.attention.attention
    return Parts(
        block.layernorm_before, block.attention, attention.query, attention.key, attention.value,
        block.attention.output.dense, attention.attention_head_size, as_it_is, block.layernorm_after, block.mlp,
        as_it_is,
    )  # fmt: skip


ANATOMY = Anatomy(
    name="ViTPose",
    layers=(vitpose.VitPoseBackboneLayer,),
    blocks=lambda tower: tower.encoder.layer,
    prefix=lambda tower: 0,
    patch=lambda tower: tower.embeddings.patch_embeddings.projection,
    image_size=lambda tower: tuple(tower.embeddings.patch_embeddings.image_size),
    parts=_parts,
    interpolates=False,
)


class _Layer(OpenLayer):
    parts = staticmethod(_parts)

    def attention_half(self: Any, x: torch.Tensor, inside: Inside, **context: Any) -> torch.Tensor:
        attended: torch.Tensor = self.attention(self.layernorm_before(x), inside=inside)  # hands it to the one within
        return inside.asking(x) + attended


class _Attention(OpenAttention):
    """The attention inside the module that the layers call attention; that one has the last projection."""

    names = ("project", "scaling", "dropout_prob")
    project = staticmethod(as_it_is)
    q_proj, k_proj, v_proj = (property(attrgetter(name)) for name in ("query", "key", "value"))
    head_dim = property(attrgetter("attention_head_size"))

    def forward(self: Any, hidden_states: torch.Tensor, *, inside: Inside | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the attention: as the plain class does, which takes no mask, or shown to a reduction."""
        if inside is None:
            return vitpose.VitPoseBackboneSelfAttention.forward(self, hidden_states, **kwargs)
        return super().forward(hidden_states, inside=inside, **kwargs)


class _Backbone(MapsTower):
    anatomy = ANATOMY
    norms = True
    reshapes = False

    def final(self: Any, tokens: Tokens) -> Tokens:
        return replace(tokens, x=self.layernorm(tokens.x))

    def pooled(self, tokens: Tokens) -> None:
        return None


class HuggingFaceVitPose(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    swaps: ClassVar = {vitpose.VitPoseBackbone: derived(vitpose.VitPoseBackbone, _Backbone, home=__name__)}
    opened: ClassVar = {
        vitpose.VitPoseBackboneLayer: derived(vitpose.VitPoseBackboneLayer, _Layer, home=__name__),
        vitpose.VitPoseBackboneSelfAttention: derived(vitpose.VitPoseBackboneSelfAttention, _Attention, home=__name__),
    }

    def takes_images(self, model: nn.Module) -> bool:
        return False

    def obstacle(self, model: Any) -> str | None:
        if model.config.num_experts > 1:
            return f"num_experts={model.config.num_experts} (ViTPose+, whose experts go by dataset; expected 1)"
        return super().obstacle(model)

    def check_images(self, model: nn.Module, images: torch.Tensor) -> None:
        super().check_images(model, images)
        given, own = tuple(images.shape[-2:]), self.anatomy.image_size(model)
        if given != own:
            raise UserError(f"images of {given[0]} x {given[1]}: {type(model).__name__} takes {own[0]} x {own[1]} only")

    def pool(self, model: nn.Module) -> str:
        return "avg"

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        return costs

    def unpruned(self, tower: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return tower.layernorm(tower.encoder(tower.embeddings(images)).last_hidden_state), None

    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        mean = mean_by_size(tokens)
        return mean, mean


ADAPTER = HuggingFaceVitPose()

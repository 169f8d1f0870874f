"""Hugging Face's CLIP, MetaCLIP 2, OWL-ViT and OWLv2: the vision tower alone, with a head, in a whole model."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.clip import modeling_clip as clip
from transformers.models.metaclip_2 import modeling_metaclip_2 as metaclip
from transformers.models.owlv2 import modeling_owlv2 as owlv2
from transformers.models.owlvit import modeling_owlvit as owlvit

from tntprune.backbones.base import Costs
from tntprune.backbones.hf.adapter import HuggingFace, linears
from tntprune.backbones.hf.anatomy import Anatomy, Parts, as_it_is
from tntprune.backbones.hf.towers import (
    OpenAttention,
    OpenLayer,
    ReducedModel,
    ReducedPooling,
    ReducedTower,
    derivations,
    mean_by_size,
)
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens

CLIPS = ((clip, "CLIP"), (metaclip, "MetaClip2"))  # and how their classes' names begin
OWLS = ((owlvit, "OwlViT"), (owlv2, "Owlv2"))


def parts(block: Any) -> Parts:
    """Return the parts of a block of CLIP, which SigLIP's are named after."""
    attention = block.self_attn
    return Parts(
        block.layer_norm1, attention, attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj,
        attention.head_dim, as_it_is, block.layer_norm2, block.mlp, as_it_is,
    )  # fmt: skip


ANATOMY = Anatomy(
    name="CLIP",
    layers=tuple(getattr(module, f"{name}EncoderLayer") for module, name in (*CLIPS, *OWLS)),
    blocks=lambda tower: tower.encoder.layers,
    prefix=lambda tower: 1,
    patch=lambda tower: tower.embeddings.patch_embedding,
    image_size=lambda tower: (tower.config.image_size, tower.config.image_size),
    parts=parts,
)


class _Tower(ReducedTower):
    anatomy = ANATOMY

    def embed(self: Any, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        x = super().embed(images.to(ANATOMY.patch(self).weight.dtype), **options)[0]
        return (self.pre_layrnorm if hasattr(self, "pre_layrnorm") else self.pre_layernorm)(x), None

    def final(self, tokens: Tokens) -> Tokens:
        return tokens  # CLIP's last norm is for the CLS token alone

    def pooled(self: Any, tokens: Tokens) -> torch.Tensor:
        return self.post_layernorm(tokens.x[:, 0, :])  # type: ignore[no-any-return]

    def forward(self, pixel_values: Any = None, interpolate_pos_encoding: Any = False, **kwargs: Any) -> Any:
        """Turn images into the tokens that are left, and to the CLS token, normalised."""
        masks = (kwargs.get("attention_mask"),)
        return self.answer(pixel_values, masks, kwargs, interpolate_pos_encoding=interpolate_pos_encoding)


class Classifier(ReducedPooling):
    """A classifier of the mean of all tokens, of CLIP and SigLIP."""

    pool = staticmethod(mean_by_size)

    def forward(
        self: Any, pixel_values: Any = None, labels: Any = None, interpolate_pos_encoding: Any = False, **kwargs: Any
    ) -> Any:
        """Turn images into logits, as the unpruned model; the mean weighs merged tokens by their size."""
        options = {"interpolate_pos_encoding": interpolate_pos_encoding}
        found = self.vision_model.outputs(pixel_values, (kwargs.get("attention_mask"),), kwargs, pools=False, **options)
        return self.classify(labels, found, kwargs)


made = partial(derivations, home=__name__)
OPENED = {
    **made((*CLIPS, *OWLS), "EncoderLayer", OpenLayer, parts=staticmethod(parts)),
    **made((*CLIPS, *OWLS), "Attention", OpenAttention, names=("out_proj", "scale", "dropout")),
}
TOWERS = {**made(CLIPS, "VisionModel", _Tower), **made(OWLS, "VisionTransformer", _Tower)}
HOLDERS = {
    **made(OWLS, "VisionModel", ReducedModel),
    **made(CLIPS, "VisionModelWithProjection", ReducedModel),
    **made(CLIPS, "ForImageClassification", Classifier),
    **made((*CLIPS, *OWLS), "Model", ReducedModel),  # the text is left as it is
}


class HuggingFaceCLIP(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    swaps: ClassVar = {**TOWERS, **HOLDERS}
    opened: ClassVar = OPENED
    holders: ClassVar = dict.fromkeys(HOLDERS, "vision_model")

    def pool(self, model: nn.Module) -> str:
        return "avg" if hasattr(model, "classifier") else "token"

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        """Of a whole CLIPModel, what an image costs; the text is not counted."""
        heads = [getattr(model, name) for name in ("classifier", "visual_projection") if hasattr(model, name)]
        return costs._replace(  # the last norm is for the CLS token alone
            embed=costs.embed + (shape.patches + shape.prefix) * costs.norm, norm=0, head=costs.norm + linears(*heads)
        )

    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out: Any = pooled
        if hasattr(model, "classifier"):
            out = model.classifier(mean_by_size(tokens))
        elif hasattr(model, "visual_projection"):
            out = model.visual_projection(pooled)
        return out, out


ADAPTER = HuggingFaceCLIP()

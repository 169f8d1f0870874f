"""Hugging Face's ViT, DeiT, ViT-MSN, ViT-MAE and I-JEPA, alone and with classifiers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deit import modeling_deit as deit
from transformers.models.ijepa import modeling_ijepa as ijepa
from transformers.models.vit import modeling_vit as vit
from transformers.models.vit_mae import modeling_vit_mae as mae
from transformers.models.vit_msn import modeling_vit_msn as msn

from tntprune.backbones.base import Costs
from tntprune.backbones.hf.adapter import HuggingFace, linears
from tntprune.backbones.hf.anatomy import Anatomy, Parts
from tntprune.backbones.hf.towers import (
    OpenAttention,
    OpenLayer,
    ReducedModel,
    ReducedPooling,
    ReducedTower,
    derivations,
    derived,
    mean_by_size,
)
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens

ALIKE = ((vit, "ViT"), (deit, "DeiT"), (ijepa, "IJepa"))  # and how their classes' names begin
NARROW = "reads_prefix"  # with which a classifier tells its tower that nobody reads patch tokens
MSN, MAE = ((msn, "ViTMSN"),), ((mae, "ViTMAE"),)
FAMILIES = (*ALIKE, *MSN, *MAE)


def _parts(block: Any) -> Parts:
    attention = block.attention
    return Parts(
        block.layernorm_before, attention, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        attention.head_dim, block.dropout, block.layernorm_after, block.mlp, block.dropout,
    )  # fmt: skip


ANATOMY = Anatomy(
    name="ViT",
    layers=tuple(getattr(module, f"{name}Layer") for module, name in FAMILIES),
    blocks=lambda tower: tower.layers,
    prefix=lambda tower: sum(hasattr(tower.embeddings, name) for name in ("cls_token", "distillation_token")),
    patch=lambda tower: tower.embeddings.patch_embeddings.projection,
    image_size=lambda tower: tuple(tower.embeddings.patch_embeddings.image_size),
    parts=_parts,
)


class _Tower(ReducedTower):
    anatomy = ANATOMY

    def embed(self, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        return super().embed(images.to(ANATOMY.patch(self).weight.dtype), **options)

    def final(self: Any, tokens: Tokens) -> Tokens:
        return replace(tokens, x=self.layernorm(tokens.x))

    def behind(self: Any) -> tuple[nn.Module, ...]:
        return self, self.layernorm

    def pooled(self: Any, tokens: Tokens) -> torch.Tensor | None:
        pooler = getattr(self, "pooler", None)  # ViT-MSN has none
        return None if pooler is None else pooler(tokens.x)

    def forward(
        self,
        pixel_values: Any = None,
        bool_masked_pos: Any = None,
        interpolate_pos_encoding: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Turn images into the tokens that are left, normalised."""
        masks, narrow = (bool_masked_pos, attention_mask), bool(kwargs.pop(NARROW, False))
        options = {"interpolate_pos_encoding": interpolate_pos_encoding}
        return self.answer(pixel_values, masks, kwargs, narrow=narrow, **options)


def in_order(tower: Any, images: torch.Tensor) -> torch.Tensor:
    """Return the noise, (B, N), with which ViT-MAE does not shuffle the patches of images."""
    rows, columns = ANATOMY.grid(tower, images)
    return torch.arange(rows * columns, device=images.device, dtype=torch.float32).expand(len(images), -1)


class _Masked(_Tower):
    """A ViT-MAE that masks nothing. Whatever the noise, its tokens are in the order of the image."""

    output = mae.ViTMAEModelOutput

    def embed(self, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        options = options or ANATOMY.options(self, images)
        (x, _, _), places = super().embed(images, noise=in_order(self, images), **options)
        return x, places

    def outputs(self, pixel_values: torch.Tensor, *args: Any, **options: Any) -> tuple[Tokens, Any]:
        tokens, out = super().outputs(pixel_values, *args, **options)
        noise = in_order(self, pixel_values)  # (B, N)
        return tokens, self.output(**out, mask=torch.zeros_like(noise), ids_restore=noise.long())

    def forward(  # type: ignore[override]
        self, pixel_values: Any = None, noise: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Turn images into the tokens that are left, normalised."""
        return super().forward(pixel_values, None, *args, **kwargs)


class _Pooling(ReducedPooling):
    """I-JEPA's classifier, which takes the mean of all tokens."""

    pool = staticmethod(mean_by_size)

    def forward(
        self: Any, pixel_values: Any = None, labels: Any = None, interpolate_pos_encoding: Any = None, **kwargs: Any
    ) -> Any:
        """Turn images into logits, as the unpruned model; the mean weighs merged tokens by their size."""
        options = {"interpolate_pos_encoding": interpolate_pos_encoding}
        loss = {name: value for name, value in kwargs.items() if name != "return_dict"}
        found = self.ijepa.outputs(pixel_values, (kwargs.get("attention_mask"),), kwargs, pools=False, **options)
        return self.classify(labels, found, kwargs, **loss)


class _Reader(ReducedModel):
    """A classifier whose head reads prefix tokens alone."""

    def forward(self, pixel_values: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Turn images into logits, as the unpruned model; without labels its tower need not give patch tokens."""
        if not args and kwargs.get("labels") is None:
            kwargs[NARROW] = True  # which the plain class hands to the tower
        return super().forward(pixel_values, *args, **kwargs)  # type: ignore[misc]


class _Labelled(_Reader):
    """The same, where labels come second: transformers' Trainer looks for their name."""

    def forward(self, pixel_values: Any = None, labels: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Turn images into logits, and with labels also into a loss, as the unpruned model."""
        second = () if labels is None and not args else (labels, *args)
        return super().forward(pixel_values, *second, **kwargs)


made = partial(derivations, home=__name__)
TOWERS = {
    **made(ALIKE, "Model", _Tower),
    **made(MSN, "Model", _Tower, output=BaseModelOutput),
    **made(MAE, "Model", _Masked),
}
HOLDERS = {  # classifiers, and the name of the tower in them
    vit.ViTForImageClassification: "vit",
    deit.DeiTForImageClassification: "deit",
    deit.DeiTForImageClassificationWithTeacher: "deit",
    msn.ViTMSNForImageClassification: "vit",
    ijepa.IJepaForImageClassification: "ijepa",
}
CLASSIFIERS = {  # what each takes on
    **dict.fromkeys(HOLDERS, _Labelled),
    deit.DeiTForImageClassificationWithTeacher: _Reader,
    ijepa.IJepaForImageClassification: _Pooling,
}


class HuggingFaceViT(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    opened: ClassVar = {
        **made(FAMILIES, "Layer", OpenLayer, parts=staticmethod(_parts)),
        **made(FAMILIES, "Attention", OpenAttention),
    }
    holders: ClassVar = HOLDERS
    swaps: ClassVar = {
        **TOWERS,
        **{kind: derived(kind, own, home=__name__) for kind, own in CLASSIFIERS.items()},
    }

    def takes_images(self, model: nn.Module) -> bool:
        return "ViTMAE" not in type(model).__name__  # which shuffles its patches anew at each call

    def obstacle(self, model: nn.Module) -> str | None:
        if isinstance(model, mae.ViTMAEModel) and model.config.mask_ratio:
            share = model.config.mask_ratio
            return f"mask_ratio={share}, which drops patches at random (expected 0: model.config.mask_ratio = 0.0),"
        return super().obstacle(model)

    def last_block_obstacle(self, model: nn.Module) -> str | None:
        if any(isinstance(model, kind) for kind in HOLDERS):
            return None if self.pool(model) == "token" else "its head reads the patch tokens"
        return super().last_block_obstacle(model)

    def pool(self, model: nn.Module) -> str:
        return "token" if self.anatomy.prefix(self.tower(model)) else "avg"

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        pooler = getattr(self.tower(model), "pooler", None)
        heads = [pooler] if pooler is not None else []
        heads += [getattr(model, name) for name in ("classifier", "cls_classifier", "distillation_classifier")
                  if hasattr(model, name)]  # fmt: skip
        return costs._replace(head=linears(*heads))

    def unpruned(self, tower: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        noise = {"noise": in_order(tower, images)} if isinstance(tower, mae.ViTMAEModel) else {}
        out = tower(images, **noise, **self.anatomy.options(tower, images))
        return out.last_hidden_state, out.get("pooler_output")

    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        first = tokens.x[:, 0] if tokens.prefix else mean_by_size(tokens)
        if isinstance(model, deit.DeiTForImageClassificationWithTeacher):
            logits = model.cls_classifier(first)
            return (logits + model.distillation_classifier(tokens.x[:, 1])) / 2, logits
        if hasattr(model, "classifier"):
            first = model.classifier(first)
        elif pooled is not None:
            first = pooled
        return first, first


ADAPTER = HuggingFaceViT()

"""Hugging Face's SigLIP: the vision tower alone, with a classifier, and inside the whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.models.siglip import modeling_siglip as siglip

from tntprune.backbones.base import Costs
from tntprune.backbones.hf import clip
from tntprune.backbones.hf.adapter import HuggingFace, linears
from tntprune.backbones.hf.towers import (
    OpenAttention,
    OpenLayer,
    ReducedModel,
    ReducedTower,
    derivations,
    mean_by_size,
)
from tntprune.methods.base import Layout
from tntprune.ops.attention import log_size
from tntprune.ops.tokens import Tokens

ANATOMY = replace(clip.ANATOMY, name="SigLIP", layers=(siglip.SiglipEncoderLayer,), prefix=lambda tower: 0)


class Pool:
    """A pooling head to which a token of size s counts like s equal ones."""

    def forward(self: Any, hidden_state: torch.Tensor, size: torch.Tensor | None = None) -> torch.Tensor:
        """Pool tokens (B, n, D) of sizes (B, n), or None if each stands for one patch, to (B, D)."""
        if size is None:
            return super().forward(hidden_state)  # type: ignore[misc, no-any-return]
        bias = log_size(size, 0, power=1)[:, 0, 0].to(hidden_state.dtype)  # (B, n)
        probe = self.probe.expand(hidden_state.shape[0], -1, -1)  # (B, 1, D)
        x = self.attention(probe, hidden_state, hidden_state, key_padding_mask=bias, need_weights=False)[0]
        x = x + self.mlp(self.layernorm(x))
        return x[:, 0]  # type: ignore[no-any-return]


class Tower(ReducedTower):
    """What the towers of SigLIP and SigLIP 2 have in common."""

    def final(self: Any, tokens: Tokens) -> Tokens:
        return replace(tokens, x=self.post_layernorm(tokens.x))

    def pooled(self: Any, tokens: Tokens) -> torch.Tensor | None:
        return self.head(tokens.x, tokens.size) if self.use_head else None


class _Tower(Tower):
    anatomy = ANATOMY

    def forward(self, pixel_values: Any, interpolate_pos_encoding: Any = False, **kwargs: Any) -> Any:
        """Turn images into the tokens that are left, normalised, and pooled where the model does that."""
        masks = (kwargs.get("attention_mask"),)
        return self.answer(pixel_values, masks, kwargs, interpolate_pos_encoding=interpolate_pos_encoding)


def tables(module: Any, name: str, tower: type, classifier: type, home: str) -> tuple[dict[Any, Any], ...]:
    """Return the adapter's `swaps`, `opened` and `holders` for one of the SigLIPs.

    Args:
        module: Of transformers.
        name: How the names of its classes begin.
        tower: Mixed into its vision model.
        classifier: Mixed into its classifier.
        home: The name of the module that calls.
    """
    made = partial(derivations, ((module, name),), home=home)
    swaps = {
        **made("VisionModel", tower),
        **made("ForImageClassification", classifier),
        **made("Model", ReducedModel),  # the text is left as it is
    }
    opened = {
        **made("EncoderLayer", OpenLayer, parts=staticmethod(clip.parts)),
        **made("Attention", OpenAttention, names=("out_proj", "scale", "dropout")),
        **made("MultiheadAttentionPoolingHead", Pool),
    }
    whole = (getattr(module, name + ending) for ending in ("ForImageClassification", "Model"))
    return swaps, opened, dict.fromkeys(whole, "vision_model")


class HuggingFaceSiglip(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    swaps, opened, holders = tables(siglip, "Siglip", _Tower, clip.Classifier, __name__)

    def pool(self, model: nn.Module) -> str:
        tower: Any = self.tower(model)
        return "avg" if hasattr(model, "classifier") or not tower.use_head else "map"

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        """Of a whole SiglipModel, what an image costs. Not counted: the text, and a pooled output that nobody reads."""
        tower: Any = self.tower(model)
        width, pool = shape.embed_dim, 0
        once = linears(getattr(model, "classifier", nn.Identity()))
        if tower.use_head and not hasattr(model, "classifier"):
            pool = 2 * width * width + 2 * width  # keys and values, and their products with one query
            once += 2 * width * width + costs.norm + linears(tower.head.mlp)
        return costs._replace(pool=pool, head=once)

    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if hasattr(model, "classifier"):
            out = model.classifier(mean_by_size(tokens))
        else:
            out = mean_by_size(tokens) if pooled is None else pooled
        return out, out


ADAPTER = HuggingFaceSiglip()

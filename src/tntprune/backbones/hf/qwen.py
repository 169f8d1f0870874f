"""The adapter of the vision towers of Hugging Face's Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from math import isqrt
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen3_moe

from tntprune.backbones.base import Answer, Backbone, BlockCost, Costs
from tntprune.backbones.hf.adapter import linears, outdated
from tntprune.backbones.hf.packed import Grid
from tntprune.backbones.hf.qwen_tower import QwenTower, WeighedAttention, patches_of
from tntprune.backbones.hf.towers import derived, mean_by_size
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens, start

SIDE = 48  # patches of the square image that is counted where a model has no size of its own; Qwen3-VL's own is this
FAMILIES = (  # of each family the module, its tower and its attention
    (qwen2, "Qwen2VisionTransformerPretrainedModel", "VisionAttention"),
    (qwen2_5, "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionAttention"),
    (qwen3, "Qwen3VLVisionModel", "Qwen3VLVisionAttention"),
    (qwen3_moe, "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionAttention"),
)
TOWERS = {
    getattr(module, name): derived(
        getattr(module, name), QwenTower, home=__name__,
        output=getattr(module, "BaseModelOutputWithDeepstackFeatures", BaseModelOutputWithPooling),
    )
    for module, name, _ in FAMILIES
}  # fmt: skip
ATTENTIONS = {
    getattr(module, name): derived(
        getattr(module, name), WeighedAttention, home=__name__,
        rotate=staticmethod(module.apply_rotary_pos_emb_vision),
    )
    for module, _, name in FAMILIES
}  # fmt: skip


class HuggingFaceQwen(Backbone):
    """The adapter of the towers."""

    swaps: ClassVar = TOWERS
    opened: ClassVar = ATTENTIONS
    in_parts = False

    @property
    def names(self) -> list[str]:
        return ["Qwen2-VL, Qwen2.5-VL and Qwen3-VL"]

    def takes_images(self, model: nn.Module) -> bool:
        return False

    def obstacle(self, model: nn.Module) -> str | None:
        return outdated()

    def sides(self, tower: Any) -> tuple[int, int]:
        """Return the patches along a side of the square image that is counted, and those along one of a cell."""
        own = isqrt(tower.config.num_position_embeddings) if hasattr(tower, "pos_embed") else SIDE
        return own, tower.spatial_merge_size

    def input_size(self, model: nn.Module) -> tuple[int, int, int]:
        tower: Any = model
        side = self.sides(tower)[0] * tower.patch_embed.patch_size
        return tower.patch_embed.in_channels, side, side

    def grid(self, model: nn.Module, images: torch.Tensor) -> Grid:
        return QwenTower.grid(model, images)

    def layout(self, model: nn.Module) -> Layout:
        tower: Any = model
        side, cell = self.sides(tower)
        attention = tower.blocks[0].attn
        return Layout(
            family="transformers Qwen-VL",
            embed_dim=attention.dim * cell**2,
            depth=len(tower.blocks),
            prefix=0,
            grid=(side // cell, side // cell),
            cls=False,
            heads=attention.num_heads,
            attn_dim=attention.dim,
            pool="avg",
            opens=False,
            weighs=True,
        )

    def costs(self, model: nn.Module) -> Costs:
        """Return what a tower costs for each cell, its mergers included.

        Windows count as if the tokens that are left were spread evenly over them.
        """
        tower: Any = model
        shape, side, cell = self.layout(tower), *self.sides(tower)
        unit, width = cell**2, shape.attn_dim
        windows = 1
        if hasattr(tower, "fullatt_block_indexes"):
            windows = (-(-side // (tower.window_size // tower.patch_size))) ** 2
        blocks = []
        for number, block in enumerate(tower.blocks):
            norm = 5 * width if isinstance(block.norm1, nn.LayerNorm) else 0  # as fvcore counts it
            full = windows == 1 or number in tower.fullatt_block_indexes
            pair = unit**2 * 2 * width // (1 if full else windows)
            attention, mlp = (unit * (linears(part) + norm) for part in (block.attn, block.mlp))
            blocks.append(BlockCost(attention, pair, mlp, key=unit * (2 * width**2 + norm)))
        merger = linears(tower.merger) + 5 * unit * width
        for number, own in zip(
            getattr(tower, "deepstack_visual_indexes", ()), getattr(tower, "deepstack_merger_list", ()), strict=True
        ):  # each merges the tokens that enter the next block
            cost = linears(own) + 5 * unit * width
            if number + 1 == len(blocks):
                merger += cost
            else:
                blocks[number + 1] = blocks[number + 1]._replace(attention=blocks[number + 1].attention + cost)
        embed = shape.patches * unit * tower.patch_embed.proj.weight.numel()
        return Costs(embed, tuple(blocks), merger, 0, 0)

    def answer(self, model: nn.Module, images: torch.Tensor, narrow: bool = False) -> Answer:
        tower: Any = model
        if isinstance(tower, QwenTower):
            return self.judge(model, tower.walk(images))
        out = tower(*patches_of(tower, images)).pooler_output
        return self.pooled(start(out.unflatten(0, (len(images), -1)), 0))

    def judge(self, model: nn.Module, tokens: Tokens) -> Answer:
        tower: Any = model
        return self.pooled(tower.final(tokens))

    def output(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return self.answer(model, images).logits

    def pooled(self, tokens: Tokens) -> Answer:
        """Return the mean of the visual tokens."""
        out = mean_by_size(tokens)
        return Answer(out, out, tokens)


ADAPTER = HuggingFaceQwen()

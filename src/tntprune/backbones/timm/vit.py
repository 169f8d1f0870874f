"""timm's VisionTransformer and VisionTransformerDistilled.

Plain, distilled and register tokens, no CLS token, every kind of pooling but "prr", LayerScale, q/k norm, pre-norm,
dynamic image sizes, any patch size. A reduction can act between attention and MLP of `Block` and `ResPostBlock`; in a
`ParallelScalingBlock` the two are one, so that methods that look inside are refused. Other blocks are refused by name.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from timm.layers import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ParallelScalingBlock, ResPostBlock, VisionTransformer

from tntprune.backbones.base import BlockCost
from tntprune.backbones.timm.base import ReducedTimm, Timm
from tntprune.backbones.timm.block import OpenAttention, PostNorm, PreNorm, block_cost, linears, norm_cost


class OpenViTBlock(PreNorm, Block):  # type: ignore[misc]
    """A Block with a reduction inside it."""


class OpenResPostBlock(PostNorm, ResPostBlock):  # type: ignore[misc]
    """A ResPostBlock with a reduction inside it."""


class OpenViTAttention(OpenAttention, Attention):  # type: ignore[misc]
    """An Attention that a reduction can look at."""


class _ReducedViT(ReducedTimm):
    takes_mask = True

    def embed(self: Any, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        return self.norm_pre(self._pos_embed(self.patch_embed(images))), None


class ReducedVisionTransformer(_ReducedViT, VisionTransformer):  # type: ignore[misc]
    """A VisionTransformer whose forward drops or merges tokens."""


class ReducedVisionTransformerDistilled(_ReducedViT, VisionTransformerDistilled):  # type: ignore[misc]
    """A VisionTransformerDistilled whose forward drops or merges tokens."""


class TimmViT(Timm):
    """The adapter."""

    family = "timm VisionTransformer"
    swaps: ClassVar = {
        VisionTransformer: ReducedVisionTransformer,
        VisionTransformerDistilled: ReducedVisionTransformerDistilled,
    }
    opened: ClassVar = {Block: OpenViTBlock, ResPostBlock: OpenResPostBlock, Attention: OpenViTAttention}

    def obstacle(self, model: Any) -> str | None:
        for block in model.blocks:
            kind = self.plain(block)
            if kind not in (Block, ResPostBlock, ParallelScalingBlock):
                return f"block {kind.__name__} (supported: Block, ResPostBlock, ParallelScalingBlock)"
            if kind is not ParallelScalingBlock and self.plain(block.attn) is not Attention:
                return f"attention {self.plain(block.attn).__name__} (supported: Attention)"
        if model.global_pool == "prr":
            return "global_pool='prr' (supported: token, avg, avgmax, max, map)"
        return super().obstacle(model)

    def block_cost(self, block: Any, width: int) -> BlockCost:
        if isinstance(block, ParallelScalingBlock):
            norms = 2 * norm_cost(block.q_norm, width) + norm_cost(block.in_norm, width)
            attention = linears(block) + norms
            return BlockCost(attention, pair=2 * width, mlp=0, key=attention)
        return block_cost(block, width)


ADAPTER = TimmViT()

"""timm's VisionTransformer and VisionTransformerDistilled.

Plain, distilled and register tokens, no CLS token, every kind of pooling but "prr", LayerScale, q/k norm, pre-norm,
dynamic image sizes, any patch size. `Block` and `ResPostBlock` can be opened between attention and MLP; in a
`ParallelScalingBlock` the two are one, so that methods that look inside are refused. Other blocks are refused by name.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from timm.layers import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ParallelScalingBlock, ResPostBlock, VisionTransformer

from tntprune.backbones.base import BlockCost
from tntprune.backbones.reduced import Halves
from tntprune.backbones.timm_base import ReducedTimm, Timm
from tntprune.backbones.timm_block import block_cost, halves, heads_of, linears, norm_cost


class _ReducedViT(ReducedTimm):
    def embed(self: Any, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        return self.norm_pre(self._pos_embed(self.patch_embed(images))), None

    def halves(self, number: int, places: Any) -> Halves:
        block: Any = self.blocks[number - 1]
        return halves(block, partial(heads_of, block.attn), post_norm=isinstance(block, ResPostBlock))


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

    def obstacle(self, model: Any) -> str | None:
        for block in model.blocks:
            if type(block) not in (Block, ResPostBlock, ParallelScalingBlock):
                return f"block {type(block).__name__} (supported: Block, ResPostBlock, ParallelScalingBlock)"
            if type(block) is not ParallelScalingBlock and type(block.attn) is not Attention:
                return f"attention {type(block.attn).__name__} (supported: Attention)"
        if model.global_pool == "prr":
            return "global_pool='prr' (supported: token, avg, avgmax, max, map)"
        return super().obstacle(model)

    def block_cost(self, block: Any, width: int) -> BlockCost:
        if isinstance(block, ParallelScalingBlock):
            norms = 2 * norm_cost(block.q_norm, width) + norm_cost(block.in_norm, width)
            return BlockCost(attention=linears(block) + norms, pair=2 * width, mlp=0)
        return block_cost(block, width)


ADAPTER = TimmViT()

"""timm's Eva: EVA, EVA-02, DINOv3, Perception Encoder, rope ViTs.

Rotary position embeddings of every kind that Eva has (axial, mixed by depth and head, DINOv3's, multimodal) are
gathered with the tokens. Registers, no CLS token, every kind of pooling, q/k norm, gated and grouped-query attention,
fused or separate projections, SwiGLU, pre- and post-norm blocks, dynamic image sizes. Other blocks, attentions and
embeddings are refused by name.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm

from tntprune.backbones.timm.base import ReducedTimm, Timm
from tntprune.backbones.timm.block import OpenAttention, PostNorm, PreNormGamma, heads_of
from tntprune.ops.attention import Heads

ROPES = ("RotaryEmbeddingCat", "RotaryEmbeddingDinoV3", "RotaryEmbeddingMixed", "RotaryEmbeddingMRope")


class Turns(NamedTuple):
    """How far queries and keys are turned, sines and cosines of an angle side by side (2 * head_dim).

    Args:
        table: (N + 1, 2 * head_dim) of each place, then of a token without one, which is not turned;
            or (depth, heads, N, 2 * head_dim) where it differs by block and by head.
        rope: Of the tokens that there are, as timm's blocks take it, where it is the same in every block.
        row: (B, n), those of the table of the tokens that there are; None if all are there.
    """

    table: torch.Tensor
    rope: torch.Tensor | None = None
    row: torch.Tensor | None = None


class OpenEvaBlock(PreNormGamma, EvaBlock):  # type: ignore[misc]
    """An EvaBlock with a reduction inside it."""


class OpenEvaBlockPostNorm(PostNorm, EvaBlockPostNorm):  # type: ignore[misc]
    """An EvaBlockPostNorm with a reduction inside it."""


class _OpenRope(OpenAttention):
    def heads(
        self: Any, x: torch.Tensor, bias: torch.Tensor | None, queries: int | None = None, rope: Any = None,
        **context: Any,
    ) -> Heads:  # fmt: skip
        def turn(x: torch.Tensor) -> torch.Tensor:
            first = self.num_prefix_tokens
            if x.shape[2] == first:  # prefix tokens alone, which are not turned
                return x
            turned = apply_rot_embed_cat(x[:, :, first:], rope, half=self.rotate_half)
            return torch.cat([x[:, :, :first], turned], 2).to(x.dtype)

        return heads_of(self, x, bias, queries, None if rope is None else turn)


class OpenEvaAttention(_OpenRope, EvaAttention):  # type: ignore[misc]
    """An EvaAttention that a reduction can look at."""


class OpenAttentionRope(_OpenRope, AttentionRope):  # type: ignore[misc]
    """An AttentionRope that a reduction can look at."""


class ReducedEva(ReducedTimm, Eva):  # type: ignore[misc]
    """An Eva whose forward drops or merges tokens."""

    takes_mask = True

    def embed(self: Any, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Turns | None]:
        x, rope = self._pos_embed(self.patch_embed(images))  # in training the rope may be another one at each call
        if rope is not None:
            rope = Turns(rope) if self.rope_mixed else Turns(_and_nowhere(rope), rope)
        return self.norm_pre(x), rope

    def placed(self: Any, places: Turns, index: torch.Tensor) -> Turns:
        row = index % (places.table.shape[-2] + int(self.rope_mixed))  # NOWHERE becomes the last
        if self.rope_mixed:  # each block gathers its own, which no other one can use
            return Turns(places.table, row=row)
        return Turns(places.table, _rows(places.table, row)[:, None])  # (B, 1, n, 2 * head_dim)

    def context(self, number: int, places: Turns | None, opened: bool) -> dict[str, Any]:
        return {"rope": self.rope_of(number, places)}

    def rope_of(self: Any, number: int, places: Turns | None) -> torch.Tensor | None:
        """Return one block's, as it takes it."""
        if places is None or not self.rope_mixed:
            return None if places is None else places.rope
        table = places.table[number - 1]  # (heads, N, 2 * head_dim)
        if places.row is None:
            return table
        return _rows(_and_nowhere(table), places.row).transpose(0, 1)  # (B, heads, n, 2 * head_dim)


def _and_nowhere(table: torch.Tensor) -> torch.Tensor:
    """(..., N, 2 * head_dim) to one row more, which turns nothing: sine 0, cosine 1."""
    still = torch.arange(table.shape[-1], device=table.device) >= table.shape[-1] // 2
    return torch.cat([table, still.to(table.dtype).expand(*table.shape[:-2], 1, -1)], -2)


def _rows(table: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """(..., N + 1, C) at (B, n) to (..., B, n, C)."""
    found: torch.Tensor = table.index_select(-2, row.flatten()).unflatten(-2, row.shape)
    return found


class TimmEva(Timm):
    """The adapter."""

    family = "timm Eva"
    swaps: ClassVar = {Eva: ReducedEva}
    opened: ClassVar = {
        EvaBlock: OpenEvaBlock,
        EvaBlockPostNorm: OpenEvaBlockPostNorm,
        EvaAttention: OpenEvaAttention,
        AttentionRope: OpenAttentionRope,
    }

    def obstacle(self, model: Any) -> str | None:
        for block in model.blocks:
            if self.plain(block) not in (EvaBlock, EvaBlockPostNorm):
                return f"block {self.plain(block).__name__} (supported: EvaBlock, EvaBlockPostNorm)"
            if self.plain(block.attn) not in (EvaAttention, AttentionRope):
                return f"attention {self.plain(block.attn).__name__} (supported: EvaAttention, AttentionRope)"
        if model.rope is not None and type(model.rope).__name__ not in ROPES:
            return f"position embedding {type(model.rope).__name__} (supported: {', '.join(ROPES)})"
        return super().obstacle(model)


ADAPTER = TimmEva()

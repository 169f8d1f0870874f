"""timm's Beit: BEiT and BEiT v2.

The relative position bias, of each block or shared by all, is gathered for the pairs of tokens that are left. What a
token of many patches adds to the logits comes on top of it. Any window but the whole grid is refused.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from timm.models.beit import Attention, Beit, Block

from tntprune.backbones.blocks import Inside
from tntprune.backbones.timm.base import ReducedTimm, Timm
from tntprune.backbones.timm.block import OpenAttention, PreNormGamma, heads_of
from tntprune.ops.attention import Heads, added


class Pairs(NamedTuple):
    """What the logits of each pair of tokens get by their places.

    Args:
        shared: The bias that all blocks share, (heads, 1 + N, 1 + N), or (B, heads, 1 + n, 1 + n) of the tokens
            that there are; None if there is none.
        rows: (B, 1 + n, 1 + n), where each pair's bias stands in the blocks' own tables, one past their end for a
            pair without a place; None if all tokens are there.
    """

    shared: torch.Tensor | None = None
    rows: torch.Tensor | None = None


class OpenBeitBlock(PreNormGamma, Block):  # type: ignore[misc]
    """A Block with a reduction inside it."""


class OpenBeitAttention(OpenAttention, Attention):  # type: ignore[misc]
    """An Attention that a reduction can look at, and whose bias can be that of the tokens that are left."""

    def heads(
        self: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        queries: int | None = None,
        shared_rel_pos_bias: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        **context: Any,
    ) -> Heads:
        own = None
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias() if rows is None else _bias(self, rows)
        return heads_of(self, x, added(added(own, shared_rel_pos_bias), bias), queries)


class ReducedBeit(ReducedTimm, Beit):  # type: ignore[misc]
    """A Beit whose forward drops or merges tokens."""

    def embed(self: Any, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Pairs | None]:
        x = self.patch_embed(images)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)  # (B, 1 + N, D)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        shared = None if self.rel_pos_bias is None else self.rel_pos_bias()
        return self.pos_drop(x), None if _biased(self) is None else Pairs(shared)

    def placed(self: Any, places: Pairs, index: torch.Tensor) -> Pairs:
        biased: Any = _biased(self)
        rows, nowhere = biased.relative_position_index, len(biased.relative_position_bias_table)
        rows = F.pad(rows, (0, 1, 0, 1), value=nowhere)  # (1 + N + 1, 1 + N + 1), the last for tokens without a place
        token = F.pad(torch.where(index < 0, rows.shape[0] - 2, index) + 1, (1, 0))  # (B, 1 + n), the CLS token first
        rows = rows[token[:, :, None], token[:, None]]  # (B, 1 + n, 1 + n)
        if self.rel_pos_bias is None:
            return Pairs(None, rows)
        return Pairs(_bias(self.rel_pos_bias, rows), rows)

    def context(self, number: int, places: Pairs | None, opened: bool) -> dict[str, Any]:
        if places is None:
            return {"shared_rel_pos_bias": None}
        return {"shared_rel_pos_bias": places.shared, **({"rows": places.rows} if opened else {})}

    def run(
        self, number: int, x: torch.Tensor, places: Pairs | None, inside: Inside | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        own: Any = self.blocks[number - 1].attn
        gathered = places is not None and places.rows is not None and own.relative_position_bias_table is not None
        if inside is None and gathered:
            inside = Inside()  # timm's own attention would take its bias for all places
        return super().run(number, x, places, inside)


def _bias(biased: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return (B, m, m) rows of a table of biases to (B, heads, m, m)."""
    table = F.pad(biased.relative_position_bias_table.t(), (0, 1))  # (heads, pairs + 1), the last one 0
    bias: torch.Tensor = table.index_select(1, rows.flatten()).unflatten(1, rows.shape)  # (heads, B, m, m)
    return bias.transpose(0, 1)


def _biased(model: Any) -> Any:
    """Return a module with a table of biases; the pairs' rows are the same in all of them."""
    own = [block.attn for block in model.blocks if block.attn.relative_position_bias_table is not None]
    return model.rel_pos_bias if model.rel_pos_bias is not None or not own else own[0]


class TimmBeit(Timm):
    """The adapter."""

    family = "timm Beit"
    swaps: ClassVar = {Beit: ReducedBeit}
    opened: ClassVar = {Block: OpenBeitBlock, Attention: OpenBeitAttention}

    def obstacle(self, model: Any) -> str | None:
        for block in model.blocks:
            if self.plain(block) is not Block:
                return f"block {self.plain(block).__name__} (supported: Block)"
            if self.plain(block.attn) is not Attention:
                return f"attention {self.plain(block.attn).__name__} (supported: Attention)"
        grid = tuple(model.patch_embed.grid_size)
        for biased in (model.rel_pos_bias, *(block.attn for block in model.blocks)):
            window = getattr(biased, "window_size", None)
            if window is not None and tuple(window) != grid:
                return f"a relative position bias over {window[0]} x {window[1]} of {grid[0]} x {grid[1]} patches"
        return super().obstacle(model)


ADAPTER = TimmBeit()

"""timm's blocks and attentions with a reduction inside them, and what a block costs.

The blocks of ViT, EVA and BEiT differ in names more than in what they do: fused or separate projections, biases that
are parameters of their own, LayerScale as a module or as a parameter, norms and a gate that may be there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tntprune.backbones.base import BlockCost
from tntprune.backbones.blocks import Inside, OpenBlock
from tntprune.ops.attention import Heads

Turn = Callable[[torch.Tensor], torch.Tensor]


class PreNorm(OpenBlock):
    """A block with `norm1`, `attn`, `norm2` and `mlp`, whose norms come before attention and MLP."""

    def attention_half(self: Any, x: torch.Tensor, inside: Inside, **context: Any) -> torch.Tensor:
        out = self.attn(self.norm1(x), inside=inside, **context)
        return inside.asking(x) + self.drop_path1(_scale(self, 1, out))  # type: ignore[no-any-return]

    def mlp_half(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop_path2(_scale(self, 2, self.mlp(self.norm2(x))))  # type: ignore[no-any-return]


class PostNorm(OpenBlock):
    """A block with `norm1`, `attn`, `norm2` and `mlp`, whose norms come after attention and MLP."""

    def attention_half(self: Any, x: torch.Tensor, inside: Inside, **context: Any) -> torch.Tensor:
        out = self.attn(x, inside=inside, **context)
        return inside.asking(x) + self.drop_path1(self.norm1(out))  # type: ignore[no-any-return]

    def mlp_half(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop_path2(self.norm2(self.mlp(x)))  # type: ignore[no-any-return]


class OpenAttention:
    """An attention that a reduction can look at. Comes before a family's own class."""

    def heads(self, x: torch.Tensor, bias: torch.Tensor | None, **context: Any) -> Heads:
        """(B, n, D) and a bias to queries, keys and values, (B, heads, n, head_dim) each."""
        return heads_of(self, x, bias)

    def forward(self: Any, x: torch.Tensor, *args: Any, inside: Inside | None = None, **context: Any) -> torch.Tensor:
        """Run the attention: as the plain class does, or shown to a reduction."""
        if inside is None:
            return super().forward(x, *args, **context)  # type: ignore[misc, no-any-return]
        return _project(self, inside.attend(self.heads(x, inside.bias, **context)), inside.asking(x))


def heads_of(attention: Any, x: torch.Tensor, bias: torch.Tensor | None, turn: Turn | None = None) -> Heads:
    """(B, n, D) to queries, keys and values, (B, heads, n, head_dim) each.

    Args:
        attention: The module.
        x: What goes into it.
        bias: For `Heads`.
        turn: What is done to queries and to keys by their place, if anything.
    """
    query, key, value = _projected(attention, x)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    if turn is not None:
        query, key = turn(query), turn(key)
    shared = query.shape[1] // key.shape[1]
    if shared > 1:  # several heads of queries to one of keys and values
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    dropout = attention.attn_drop.p if attention.training else 0.0
    return Heads(
        query, key, value, attention.scale, bias, fused=attention.fused_attn, dropout=dropout, drop=attention.attn_drop
    )


def _projected(attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(B, n, D) to (B, heads, n, head_dim) three times; of keys and values there may be fewer heads."""
    width = attention.proj.in_features // attention.num_heads
    if attention.qkv is None:
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        return tuple(part(x).unflatten(2, (-1, width)).transpose(1, 2) for part in parts)
    query_bias = getattr(attention, "q_bias", None)
    if query_bias is None:
        qkv = attention.qkv(x)
    else:
        bias = torch.cat([query_bias, attention.k_bias, attention.v_bias])
        if attention.qkv_bias_separate:
            qkv = attention.qkv(x) + bias
        else:
            qkv = F.linear(x, attention.qkv.weight, bias)
    qkv = qkv.reshape(x.shape[0], x.shape[1], 3, attention.num_heads, width).permute(2, 0, 3, 1, 4)
    return qkv.unbind(0)  # type: ignore[no-any-return]


def _project(attention: Any, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What the heads give, (B, heads, n, head_dim), to (B, n, D); `x` is what went into the attention."""
    out = out.transpose(1, 2).flatten(2)  # (B, n, heads * head_dim)
    norm, gate = getattr(attention, "norm", None), getattr(attention, "gate", None)  # newer timm has the gate
    if norm is not None:
        out = norm(out)
    if gate is not None:
        out = out * gate(x).sigmoid()
    projected: torch.Tensor = attention.proj_drop(attention.proj(out))
    return projected


def _scale(block: Any, half: int, x: torch.Tensor) -> torch.Tensor:
    """LayerScale, where there is any."""
    if hasattr(block, f"ls{half}"):
        return getattr(block, f"ls{half}")(x)  # type: ignore[no-any-return]
    gamma = getattr(block, f"gamma_{half}")
    return x if gamma is None else gamma * x


def block_cost(block: Any, width: int) -> BlockCost:
    """What a block with `attn` and `mlp` costs; `width` is D."""
    attention = block.attn
    inner = attention.proj.in_features
    keys = inner if attention.qkv is not None else attention.k_proj.out_features
    norms = norm_cost(block.norm1, width)
    for name, of in (("q_norm", inner), ("k_norm", keys), ("norm", inner)):
        norms += norm_cost(getattr(attention, name, nn.Identity()), of)
    hidden = getattr(block.mlp, "norm", nn.Identity())
    return BlockCost(
        attention=linears(attention) + norms,
        pair=2 * inner,
        mlp=linears(block.mlp)
        + norm_cost(block.norm2, width)
        + norm_cost(hidden, getattr(hidden, "weight", torch.empty(0)).numel()),
    )


def linears(module: nn.Module) -> int:
    """What all linear layers of a module cost for one token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def norm_cost(module: nn.Module, width: int) -> int:
    """What a norm over `width` elements costs, as fvcore counts a LayerNorm."""
    return 0 if isinstance(module, nn.Identity) else 5 * width

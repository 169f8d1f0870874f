"""timm's blocks and attentions with a reduction inside them, and what a block costs.

The blocks of ViT, EVA and BEiT differ in names more than in what they do: fused or separate projections, biases that
are parameters of their own, LayerScale as a module or as a parameter, norms and a gate that may be there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.eva import EvaBlockPostNorm
from timm.models.vision_transformer import ResPostBlock
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tntprune.backbones.base import BlockCost
from tntprune.backbones.blocks import Inside, OpenBlock, is_hooked
from tntprune.ops.attention import Heads

Turn = Callable[[torch.Tensor], torch.Tensor]


class PreNorm(OpenBlock):
    """A block with `norm1`, `attn`, `ls1`, `norm2`, `mlp` and `ls2`, whose norms come before attention and MLP."""

    def attention_half(self: Any, x: torch.Tensor, inside: Inside, **context: Any) -> torch.Tensor:
        out = self.drop_path1(self.ls1(self.attn(self.norm1(x), inside=inside, **context)))
        return (x if inside.queries is None else inside.asking(x)) + out  # type: ignore[no-any-return]

    def mlp_half(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))  # type: ignore[no-any-return]


class PreNormGamma(OpenBlock):
    """The same, with LayerScale as the parameters `gamma_1` and `gamma_2`, which may be None."""

    def attention_half(self: Any, x: torch.Tensor, inside: Inside, **context: Any) -> torch.Tensor:
        out = self.attn(self.norm1(x), inside=inside, **context)
        out = self.drop_path1(out if self.gamma_1 is None else self.gamma_1 * out)
        return (x if inside.queries is None else inside.asking(x)) + out  # type: ignore[no-any-return]

    def mlp_half(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = self.mlp(self.norm2(x))
        return x + self.drop_path2(out if self.gamma_2 is None else self.gamma_2 * out)  # type: ignore[no-any-return]


class PostNorm(OpenBlock):
    """A block with `norm1`, `attn`, `norm2` and `mlp`, whose norms come after attention and MLP."""

    def attention_half(self: Any, x: torch.Tensor, inside: Inside, **context: Any) -> torch.Tensor:
        out = self.drop_path1(self.norm1(self.attn(x, inside=inside, **context)))
        return (x if inside.queries is None else inside.asking(x)) + out  # type: ignore[no-any-return]

    def mlp_half(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop_path2(self.norm2(self.mlp(x)))  # type: ignore[no-any-return]


class OpenAttention:
    """An attention that a reduction can look at. Comes before a family's own class."""

    def heads(self, x: torch.Tensor, bias: torch.Tensor | None, queries: int | None = None, **context: Any) -> Heads:
        """Return (B, n, D) and a bias to queries, keys and values, (B, heads, n, head_dim) each; see `heads_of`."""
        return heads_of(self, x, bias, queries)

    def forward(self: Any, x: torch.Tensor, *args: Any, inside: Inside | None = None, **context: Any) -> torch.Tensor:
        """Run the attention: as the plain class does, or shown to a reduction."""
        if inside is None:
            return super().forward(x, *args, **context)  # type: ignore[misc, no-any-return]
        queries = inside.queries if inside.apart else None
        return _project(self, inside.attend(self.heads(x, inside.bias, queries, **context)), x, inside)


def heads_of(
    attention: Any, x: torch.Tensor, bias: torch.Tensor | None, queries: int | None = None, turn: Turn | None = None
) -> Heads:
    """Return (B, n, D) to queries, keys and values, (B, heads, n, head_dim) each.

    Args:
        attention: The module.
        x: What goes into it.
        bias: For `Heads`.
        queries: How many of the first tokens have a query; None for all.
        turn: What is done to queries and to keys by their place, if anything.
    """
    width = attention.proj.in_features // attention.num_heads
    asking = x if queries is None else x[:, :queries]
    if attention.qkv is None:
        parts = attention.q_proj(asking), attention.k_proj(x), attention.v_proj(x)
        query, key, value = (part.unflatten(2, (-1, width)).transpose(1, 2) for part in parts)
    elif queries is not None and splits(attention):
        query = _rows(attention, asking, 0, 1).unflatten(2, (-1, width)).transpose(1, 2)
        keys = _rows(attention, x, 1, 3).reshape(x.shape[0], x.shape[1], 2, attention.num_heads, width)
        key, value = keys.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        qkv = _qkv(attention, x) if getattr(attention, "q_bias", None) is not None else attention.qkv(x)
        qkv = qkv.reshape(x.shape[0], x.shape[1], 3, attention.num_heads, width)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query = query if queries is None else query[:, :, :queries]
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


def _qkv(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """Project (B, n, D) to queries, keys and values, whose biases are parameters of their own."""
    bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    if attention.qkv_bias_separate:
        return attention.qkv(x) + bias  # type: ignore[no-any-return]
    return F.linear(x, attention.qkv.weight, bias)


def splits(attention: Any) -> bool:
    """Return whether queries can be projected apart from keys and values: the fused layer is no more than its weights.

    Else it is called as a module, for all tokens: with an adapter on it, quantized, parametrized, or with a hook.
    """
    layer = attention.qkv
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__  # accelerate's hook, which may have to fetch the weight
        and not is_hooked(layer)
        and not is_traceable_wrapper_subclass(layer.weight)  # of quantizers, which may not be cut into rows
    )


def _rows(attention: Any, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Project (B, n, D) by some of the three parts of the fused layer, (B, n, (last - first) * heads * head_dim)."""
    weight, bias = attention.qkv.weight, attention.qkv.bias
    if getattr(attention, "q_bias", None) is not None:
        bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    part = slice(first * weight.shape[0] // 3, last * weight.shape[0] // 3)
    return F.linear(x, weight[part], None if bias is None else bias[part])


def _project(attention: Any, out: torch.Tensor, x: torch.Tensor, inside: Inside) -> torch.Tensor:
    """Return what the heads give, (B, heads, n, head_dim), to (B, n, D); `x` is what went into the attention."""
    out = out.transpose(1, 2).flatten(2)  # (B, n, heads * head_dim)
    norm, gate = getattr(attention, "norm", None), getattr(attention, "gate", None)  # newer timm has the gate
    if norm is not None:
        out = norm(out)
    if gate is not None:
        out = out * gate(inside.asking(x)).sigmoid()
    projected: torch.Tensor = attention.proj_drop(attention.proj(out))
    return projected


def projection(block: Any) -> tuple[nn.Linear, torch.Tensor | None] | None:
    """Return what `Backbone.projection` does, of a block of a reduced model."""
    if isinstance(block, PreNorm):
        return block.attn.proj, getattr(block.ls1, "gamma", None)  # type: ignore[attr-defined]
    return (block.attn.proj, block.gamma_1) if isinstance(block, PreNormGamma) else None  # type: ignore[attr-defined]


def block_cost(block: Any, width: int) -> BlockCost:
    """Return what a block with `attn` and `mlp` costs; `width` is D."""
    attention = block.attn
    inner = attention.proj.in_features
    keys = inner if attention.qkv is not None else attention.k_proj.out_features
    first, key_norm = norm_cost(block.norm1, width), norm_cost(getattr(attention, "k_norm", nn.Identity()), keys)
    norms = first + key_norm
    for name in ("q_norm", "norm"):
        norms += norm_cost(getattr(attention, name, nn.Identity()), inner)
    hidden = getattr(block.mlp, "norm", nn.Identity())
    if attention.qkv is None:
        looked_at = linears(attention.k_proj) + linears(attention.v_proj)
    else:
        looked_at = linears(attention.qkv) * 2 // 3 if splits(attention) else linears(attention.qkv)
    return BlockCost(
        attention=linears(attention) + norms,
        pair=2 * inner,
        key=looked_at + key_norm + first * (not isinstance(block, ResPostBlock | EvaBlockPostNorm)),
        mlp=linears(block.mlp)
        + norm_cost(block.norm2, width)
        + norm_cost(hidden, getattr(hidden, "weight", torch.empty(0)).numel()),
    )


def linears(module: nn.Module) -> int:
    """Return what all linear layers of a module cost for one token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def norm_cost(module: nn.Module, width: int) -> int:
    """Return what a norm over `width` elements costs, as fvcore counts a LayerNorm."""
    return 0 if isinstance(module, nn.Identity) else 5 * width

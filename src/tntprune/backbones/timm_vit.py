"""timm's VisionTransformer and VisionTransformerDistilled.

Plain, distilled and register tokens, no CLS token, every kind of pooling but "prr", LayerScale, q/k norm, pre-norm,
dynamic image sizes, any patch size. `Block` and `ResPostBlock` can be opened between attention and MLP; in a
`ParallelScalingBlock` the two are one, so that methods that look inside are refused. Other blocks are refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from timm.layers import Attention, PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import nn

from tntprune.attention import Heads, log_size
from tntprune.backbones.base import Answer, Backbone, BlockCost, Costs, Halves, Reduced
from tntprune.errors import UserError
from tntprune.methods.base import Layout
from tntprune.tokens import Tokens, start


class _ReducedTimm(Reduced):
    """forward and forward_features as timm has them, with the reduction in between."""

    def embed(self: Any, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        return self.norm_pre(self._pos_embed(self.patch_embed(images))), None

    def halves(self, number: int, places: Any) -> Halves:
        block: Any = self.blocks[number - 1]

        def open_(x: torch.Tensor, bias: torch.Tensor | None) -> Heads:
            return _heads(block.attn, x if isinstance(block, ResPostBlock) else block.norm1(x), bias)

        def close(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            if isinstance(block, ResPostBlock):
                return x + block.drop_path1(block.norm1(_project(block.attn, out, x)))  # type: ignore[no-any-return]
            gated = block.norm1(x) if getattr(block.attn, "gate", None) is not None else x
            return x + block.drop_path1(block.ls1(_project(block.attn, out, gated)))  # type: ignore[no-any-return]

        def mlp(x: torch.Tensor) -> torch.Tensor:
            if isinstance(block, ResPostBlock):
                return x + block.drop_path2(block.norm2(block.mlp(x)))  # type: ignore[no-any-return]
            return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))  # type: ignore[no-any-return]

        return Halves(open_, close, mlp)

    def tokens(self: Any, images: torch.Tensor, attn_mask: Any, is_causal: bool) -> Tokens:
        if attn_mask is not None or is_causal:
            raise UserError("a reduced model takes no attn_mask or is_causal: a mask for all tokens fits no longer")
        tokens: Tokens = self.walk(images)
        return replace(tokens, x=self.norm(tokens.x))

    def forward_features(self, x: torch.Tensor, attn_mask: Any = None, is_causal: bool = False) -> torch.Tensor:
        """Images to the tokens that are left, (B, prefix + n, D), normalised."""
        return self.tokens(x, attn_mask, is_causal).x

    def forward(self: Any, x: torch.Tensor, attn_mask: Any = None, is_causal: bool = False) -> torch.Tensor:
        """Images to logits, as the unpruned model; mean and map pooling weigh merged tokens by their size."""
        return self.classify(self.tokens(x, attn_mask, is_causal))  # type: ignore[no-any-return]

    def classify(self: Any, tokens: Tokens) -> torch.Tensor:
        """Normalised tokens to logits."""
        if tokens.size is None or self.global_pool in ("", "token"):
            out: torch.Tensor = self.forward_head(tokens.x)
            return out
        pooled = self.head_drop(self.fc_norm(self.pool_by_size(tokens)))
        logits: torch.Tensor = self.head(pooled)
        return logits

    def pool_by_size(self: Any, tokens: Tokens) -> torch.Tensor:
        """(B, n, D) to (B, D)."""
        x, size = tokens.patches, tokens.size
        assert size is not None
        if self.pool_include_prefix:
            x, size = tokens.x, torch.cat([size.new_ones(size.shape[0], tokens.prefix), size], 1)
        if self.attn_pool is not None:
            mask = log_size(size, 0, proportional=True).to(x.dtype)  # a token of size s counts like s equal tokens
            pooled: torch.Tensor = self.attn_pool(x, attn_mask=mask)
            return pooled
        mean = ((x * size[:, :, None]).sum(1) / size.sum(1, keepdim=True).clamp(min=1e-6)).to(x.dtype)
        if self.global_pool == "avg":
            return mean
        most = x.masked_fill((size <= 0)[:, :, None], -torch.inf).amax(1)
        return most if self.global_pool == "max" else 0.5 * (most + mean)


class ReducedVisionTransformer(_ReducedTimm, VisionTransformer):  # type: ignore[misc]
    """A VisionTransformer whose forward drops or merges tokens."""


class ReducedVisionTransformerDistilled(_ReducedTimm, VisionTransformerDistilled):  # type: ignore[misc]
    """A VisionTransformerDistilled whose forward drops or merges tokens."""


class TimmViT(Backbone):
    """The adapter."""

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
        if type(model.patch_embed) is not PatchEmbed:
            return f"embedding {type(model.patch_embed).__name__} (supported: PatchEmbed)"
        if model.global_pool == "prr":
            return "global_pool='prr' (supported: token, avg, avgmax, max, map)"
        if getattr(model.attn_pool, "pos_embed", None) is not None:
            return "attention pooling with a position embedding"
        if not isinstance(model.patch_drop, nn.Identity):
            return "patch_drop_rate above 0 (create the model without it: tokens would be dropped twice)"
        return None

    def layout(self, model: Any) -> Layout:
        attention = getattr(model.blocks[0], "attn", model.blocks[0])
        return Layout(
            family="timm VisionTransformer",
            embed_dim=model.embed_dim,
            depth=len(model.blocks),
            prefix=model.num_prefix_tokens,
            grid=tuple(model.patch_embed.grid_size),
            cls=bool(model.has_class_token),
            distilled=isinstance(model, VisionTransformerDistilled),
            heads=attention.num_heads,
            attn_dim=attention.num_heads * attention.head_dim,
            pool=model.global_pool,
            opens=all(hasattr(block, "attn") for block in model.blocks),
        )

    def costs(self, model: Any) -> Costs:
        shape = self.layout(model)
        tokens, width = shape.patches + shape.prefix, shape.embed_dim
        conv = model.patch_embed.proj
        embed = shape.patches * (conv.weight.numel() + _norm(model.patch_embed.norm, width))
        head = _linears(model.head) + _linears(getattr(model, "head_dist", nn.Identity())) + _norm(model.fc_norm, width)
        pool = 0
        if model.attn_pool is not None:
            latents = model.attn_pool.latent_len
            once = _linears(model.attn_pool) - _linears(model.attn_pool.kv) + _norm(model.attn_pool.norm, width)
            pool = _linears(model.attn_pool.kv) + 2 * latents * width + _norm(model.attn_pool.k_norm, width)
            head += latents * (once + _norm(model.attn_pool.q_norm, width))
            head += pool * shape.prefix * bool(model.pool_include_prefix)
        return Costs(
            embed=embed + tokens * _norm(model.norm_pre, width),
            blocks=tuple(_block(block, width) for block in model.blocks),
            norm=_norm(model.norm, width),
            pool=pool,
            head=head,
        )

    def answer(self, model: Any, images: torch.Tensor) -> Answer:
        if isinstance(model, _ReducedTimm):
            tokens = model.tokens(images, None, False)
            logits = model.classify(tokens)
        else:
            tokens = start(model.forward_features(images), model.num_prefix_tokens)
            logits = model.forward_head(tokens.x)
        if not isinstance(model, VisionTransformerDistilled):
            return Answer(logits, logits, tokens)
        return Answer(logits, model.head(model.head_drop(tokens.x[:, 0])), tokens)


def _heads(attention: Any, x: torch.Tensor, bias: torch.Tensor | None) -> Heads:
    """(B, n, D) to queries, keys and values, (B, heads, n, head_dim) each."""
    shape = (x.shape[0], x.shape[1], 3, attention.num_heads, attention.head_dim)
    query, key, value = attention.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
    dropout = attention.attn_drop.p if attention.training else 0.0
    return Heads(
        attention.q_norm(query), attention.k_norm(key), value, attention.scale, bias,
        fused=attention.fused_attn, dropout=dropout,
    )  # fmt: skip


def _project(attention: Any, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What the heads give, (B, heads, n, head_dim), to (B, n, D); `x` is what went into the attention."""
    out = attention.norm(out.transpose(1, 2).flatten(2))  # (B, n, heads * head_dim)
    gate = getattr(attention, "gate", None)  # newer than timm 1.0.27
    if gate is not None:
        out = out * gate(x).sigmoid()
    projected: torch.Tensor = attention.proj_drop(attention.proj(out))
    return projected


def _block(block: Any, width: int) -> BlockCost:
    if isinstance(block, ParallelScalingBlock):
        norms = 2 * _norm(block.q_norm, width) + _norm(block.in_norm, width)
        return BlockCost(attention=_linears(block) + norms, pair=2 * width, mlp=0)
    attention = block.attn
    norms = _norm(attention.q_norm, attention.attn_dim) + _norm(attention.k_norm, attention.attn_dim)
    norms += _norm(attention.norm, attention.attn_dim)
    hidden = getattr(block.mlp, "norm", nn.Identity())
    return BlockCost(
        attention=_linears(attention) + norms + _norm(block.norm1, width),
        pair=2 * attention.attn_dim,
        mlp=_linears(block.mlp)
        + _norm(block.norm2, width)
        + _norm(hidden, getattr(hidden, "weight", torch.empty(0)).numel()),
    )


def _linears(module: nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def _norm(module: nn.Module, width: int) -> int:
    return 0 if isinstance(module, nn.Identity) else 5 * width  # as fvcore counts a LayerNorm


ADAPTER = TimmViT()

"""What timm's models have in common: the way from tokens to logits, their layout, and what they cost."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from timm.layers import PatchEmbed
from torch import nn

from tntprune.backbones.base import Answer, Backbone, BlockCost, Costs
from tntprune.backbones.classnames import projects
from tntprune.backbones.reduced import Reduced
from tntprune.backbones.timm.block import block_cost, linears, norm_cost, projection
from tntprune.backbones.timm.intermediates import Intermediates
from tntprune.errors import UserError
from tntprune.methods.base import Layout
from tntprune.ops.attention import log_size
from tntprune.ops.tokens import Tokens, start


class ReducedTimm(Intermediates, Reduced):
    """forward and forward_features as timm has them, with the reduction in between."""

    def tokens(
        self: Any, images: torch.Tensor, attn_mask: Any = None, is_causal: bool = False, narrow: bool = False
    ) -> Tokens:
        """Turn images into what is left of their tokens, normalised; `narrow` as for `walk`."""
        if isinstance(images, torch.fx.Proxy):  # whose mask is one too, though nobody gave any
            attn_mask, is_causal = None, False
        if attn_mask is not None or is_causal:
            raise UserError("a reduced model takes no attn_mask or is_causal: a mask for all tokens fits no longer")
        return self.final_tokens(images, narrow=narrow)  # type: ignore[no-any-return]

    def forward_features(self, x: torch.Tensor, attn_mask: Any = None, is_causal: bool = False) -> torch.Tensor:
        """Turn images into the tokens that are left, (B, prefix + n, D), normalised."""
        return self.tokens(x, attn_mask, is_causal).x

    def forward(self: Any, x: torch.Tensor, attn_mask: Any = None, is_causal: bool = False) -> torch.Tensor:
        """Turn images into logits, as the unpruned model; mean and map pooling weigh merged tokens by their size."""
        return self.classify(self.tokens(x, attn_mask, is_causal, reads_prefix(self)))  # type: ignore[no-any-return]

    def classify(self: Any, tokens: Tokens) -> torch.Tensor:
        """Normalised tokens to logits."""
        if tokens.size is None or self.global_pool in ("", "token"):
            out: torch.Tensor = self.forward_head(tokens.x)
            return out
        pooled = self.head_drop(self.fc_norm(self.pool_by_size(tokens)))
        logits: torch.Tensor = self.head(pooled)
        return logits

    def pool_by_size(self: Any, tokens: Tokens) -> torch.Tensor:
        """Map (B, n, D) to (B, D)."""
        x, size = tokens.patches, tokens.size
        assert size is not None
        if _pools_prefix(self):
            x, size = tokens.x, torch.cat([size.new_ones(size.shape[0], tokens.prefix), size], 1)
        if self.global_pool == "map":
            mask = log_size(size, 0, power=1).to(x.dtype)  # a token of size s counts like s equal tokens
            pooled: torch.Tensor = self.attn_pool(x, attn_mask=mask)
            return pooled
        mean = ((x * size[:, :, None]).sum(1) / size.sum(1, keepdim=True).clamp(min=1e-6)).to(x.dtype)
        if self.global_pool == "avg":
            return mean
        most = x.masked_fill((size <= 0)[:, :, None], -torch.inf).amax(1)
        return most if self.global_pool == "max" else 0.5 * (most + mean)


class Timm(Backbone):
    """What the adapters of timm's families share."""

    family: ClassVar[str]

    def obstacle(self, model: Any) -> str | None:
        if type(model.patch_embed) is not PatchEmbed:
            return f"embedding {type(model.patch_embed).__name__} (supported: PatchEmbed)"
        if getattr(getattr(model, "attn_pool", None), "pos_embed", None) is not None:
            return "attention pooling with a position embedding"
        if not isinstance(getattr(model, "patch_drop", None), (nn.Identity, type(None))):
            return "patch_drop_rate above 0 (create the model without it: tokens would be dropped twice)"
        return None

    def last_block_obstacle(self, model: Any) -> str | None:
        if not reads_prefix(model):
            own = (
                "forward_head or pool was replaced"
                if model.global_pool == "token"
                else f"global_pool={model.global_pool!r}"
            )
            return f"its head reads the patch tokens ({own})"
        return None if self.layout(model).opens else "its blocks cannot be opened"

    def classes(self, model: nn.Module) -> int:
        return 0 if projects(model) else super().classes(model)

    def layout(self, model: Any) -> Layout:
        block = model.blocks[0]
        attention = getattr(block, "attn", None)
        return Layout(
            family=self.family,
            embed_dim=model.embed_dim,
            depth=len(model.blocks),
            prefix=model.num_prefix_tokens,
            grid=tuple(model.patch_embed.grid_size),
            cls=model.cls_token is not None,
            distilled=hasattr(model, "head_dist"),
            heads=(attention or block).num_heads,
            attn_dim=model.embed_dim if attention is None else attention.proj.in_features,
            pool=model.global_pool,
            opens=all(hasattr(block, "attn") for block in model.blocks),
        )

    def projection(self, block: Any) -> tuple[nn.Linear, torch.Tensor | None] | None:
        return projection(block)

    def block_cost(self, block: Any, width: int) -> BlockCost:
        """Return what one block of width D costs."""
        return block_cost(block, width)

    def costs(self, model: Any) -> Costs:
        shape = self.layout(model)
        tokens, width = shape.patches + shape.prefix, shape.embed_dim
        embed = shape.patches * (model.patch_embed.proj.weight.numel() + norm_cost(model.patch_embed.norm, width))
        head = linears(model.head) + linears(getattr(model, "head_dist", nn.Identity()))
        head += norm_cost(model.fc_norm, width)
        pool, attention = 0, getattr(model, "attn_pool", None)
        if attention is not None:
            once = linears(attention) - linears(attention.kv) + norm_cost(attention.norm, width)
            pool = linears(attention.kv) + 2 * attention.latent_len * width + norm_cost(attention.k_norm, width)
            head += attention.latent_len * (once + norm_cost(attention.q_norm, width))
            head += pool * shape.prefix * _pools_prefix(model)
        return Costs(
            embed=embed + tokens * norm_cost(getattr(model, "norm_pre", nn.Identity()), width),
            blocks=tuple(self.block_cost(block, width) for block in model.blocks),
            norm=norm_cost(model.norm, width),
            pool=pool,
            head=head,
        )

    def answer(self, model: Any, images: torch.Tensor, narrow: bool = False) -> Answer:
        if isinstance(model, ReducedTimm):
            return self.judge(model, model.walk(images, narrow=narrow and reads_prefix(model)))
        tokens = start(model.forward_features(images), model.num_prefix_tokens)
        return self._answer(model, tokens, model.forward_head(tokens.x))

    def judge(self, model: Any, tokens: Tokens) -> Answer:
        tokens = model.final(tokens)
        return self._answer(model, tokens, model.classify(tokens))

    def _answer(self, model: Any, tokens: Tokens, logits: torch.Tensor) -> Answer:
        if not self.layout(model).distilled:
            return Answer(logits, logits, tokens)
        return Answer(logits, model.head(model.head_drop(tokens.x[:, 0])), tokens)


def reads_prefix(model: Any) -> bool:
    """Return whether the head reads nothing but prefix tokens: it is timm's own, and takes the CLS token."""
    if "forward_head" in model.__dict__ or "pool" in model.__dict__:  # somebody's own
        return False
    return model.global_pool == "token" and model.cls_token is not None and getattr(model, "attn_pool", None) is None


def _pools_prefix(model: Any) -> bool:
    """Return whether the head pools prefix tokens too: EVA's attention pooling always does, others say so."""
    return bool(getattr(model, "pool_include_prefix", getattr(model, "attn_pool", None) is not None))

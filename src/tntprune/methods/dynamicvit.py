"""DynamicViT: small predictors decide which tokens go, and learn it by masking them in attention.

Source: Rao et al., "DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification", NeurIPS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tntprune.methods.base import Layout, ScoringMethod
from tntprune.methods.checks import check, check_words, is_number
from tntprune.methods.config import Config, option
from tntprune.methods.layers import Affine
from tntprune.methods.steps import Place, Plan, Step, Turn, truncated
from tntprune.ops.attention import Heads, masked
from tntprune.ops.tokens import Tokens


@dataclass(frozen=True)
class DynamicViT(Config):
    """DynamicViT (Rao et al., NeurIPS 2021): a predictor at each location decides what goes.

    `keep` counts from all patches of the image, not from those that arrive: one value rho is rho, rho^2, rho^3, ... of
    them, and several values are those shares themselves. A predictor runs at every location whose share is below 1,
    also where no more is dropped than before, as in the authors' code; in training at every location.

    Args:
        objective: "both", cross-entropy to the labels and divergence from the unpruned model, as published; "ce" or
            "kl" for one of them. "kl" needs no labels.
        ce_weight: Of the cross-entropy.
        kl_weight: Of the divergence from the unpruned model's logits.
        ratio_weight: Of the squared difference between the share kept in training and the one wanted.
        token_weight: Of the squared difference between kept tokens and the unpruned model's.
        temperature: Of the Gumbel-softmax.
    """

    method = "dynamicvit"
    title = "DynamicViT"

    usual = 0.7

    at: int | Sequence[int] | None = option((3, 6, 9), "block or blocks at which tokens are removed")
    keep: float | Sequence[float] | None = option(None, "share of the patch tokens kept at each location (0.7)")
    objective: Literal["both", "ce", "kl"] = option("both", "train against labels, the unpruned model, or both")
    ce_weight: float = option(1.0, "weight of the cross-entropy")
    kl_weight: float = option(0.5, "weight of the KL divergence from the unpruned model's logits")
    ratio_weight: float = option(2.0, "weight of the loss on the kept share")
    token_weight: float = option(0.5, "weight of the token-distance loss (to the unpruned model's tokens)")
    temperature: float = option(1.0, "temperature of the softmax in training")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self, "objective")
        for name in ("ce_weight", "kl_weight", "ratio_weight", "token_weight"):
            value = getattr(self, name)
            check(is_number(value) and value >= 0, f"{name}={value}: expected 0 or more")
        warm = is_number(self.temperature) and self.temperature > 0
        check(warm, f"temperature={self.temperature}: expected above 0")

    @property
    def must_train(self) -> bool:
        return True

    def share(self, number: int, patches: int) -> float:
        """Return the share of all patches that is wanted at one location, which training aims at."""
        if self.tokens is not None:
            return min(1.0, float(self.amount(number)) / patches)
        amount: float = self.amount(number)
        return amount if len(self.given) > 1 else math.pow(amount, number + 1)

    def step(self, turn: Turn, count: int, patches: int) -> Step | None:
        if self.tokens is None:
            stay = min(count, truncated(patches, self.share(turn.number, patches)))
        else:
            stay = self.stay(turn, count)
        return Step(turn.place, count, stay, stay) if stay < patches else None


EPS = 1e-6


class Decisions(NamedTuple):
    """What has been decided on the way through a training pass: for each location a mask (B, N), 1 where kept."""

    masks: tuple[torch.Tensor, ...]


class Predictor(nn.Module):
    """From tokens to logits of keeping and dropping each (section 3.1 of the paper).

    Args:
        width: D, of the tokens.
        generator: For the initial weights.
    """

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        widths = (width, width), (width // 2 * 2, width // 2), (width // 2, width // 4), (width // 4, 2)
        self.layers = nn.ModuleList([Affine(a, b, generator) for a, b in widths])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Map (B, n, D) and (B, n), 1 for tokens that take part, None for all, to (B, n, 2) in fp32; 0 is keep."""
        norm = self.norm
        x = F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)
        x = F.gelu(self.layers[0](x))
        local, other = x.chunk(2, dim=-1)  # (B, n, D / 2) each
        if mask is None:
            whole = other.mean(1, keepdim=True)
        else:
            share = mask[:, :, None].to(x.dtype)
            whole = (other * share).sum(1, keepdim=True) / share.sum(1, keepdim=True).clamp(min=EPS)
        x = torch.cat([local, whole.expand_as(local)], -1)  # (B, n, D)
        for layer in self.layers[1:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x).float()  # type: ignore[no-any-return]


class DynamicSparsification(ScoringMethod):
    """In training all tokens stay and the dropped ones are masked; at test time they really go."""

    trains = True
    config: DynamicViT

    def __init__(self, config: DynamicViT, layout: Layout) -> None:
        super().__init__(config, layout)
        generator = torch.Generator().manual_seed(0)
        self.predictors = nn.ModuleDict({str(at): Predictor(layout.embed_dim, generator) for at in config.locations})
        self.ce = config.ce_weight if config.objective in ("both", "ce") else 0.0
        self.kl = config.kl_weight if config.objective in ("both", "kl") else 0.0
        self.needs_teacher = config.token_weight > 0

    @classmethod
    def obstacle(cls, layout: Layout, config: Config | None = None) -> str | None:
        if not layout.opens:
            return "it learns by masking the attention of blocks that do not show it"
        return None

    def plan(self, patches: int) -> Plan:
        """Return in training a step at every location, so that each predictor learns, whatever its share."""
        if not self.training:
            return super().plan(patches)
        plan = self.planned([Step(Place(at), patches, patches, patches) for at in self.config.locations])
        first = self.config.locations[0]
        return tuple(block._replace(sees="heads") if number > first else block for number, block in enumerate(plan))

    def attend(self, heads: Heads, tokens: Tokens) -> torch.Tensor:
        """In training, attention that sees kept tokens, and each token itself (the paper's equation 10)."""
        if not self.training or tokens.size is None:
            return heads.output()
        return masked(heads, tokens.size)

    def score(self, tokens: Tokens, heads: Heads | None) -> torch.Tensor:
        logits = self.predictors[str(tokens.block)](tokens.patches, None)
        return logits[:, :, 0] - logits[:, :, 1]  # type: ignore[no-any-return]

    def forward(self, tokens: Tokens, step: Step, heads: Heads | None = None) -> Tokens:
        """Mark the dropped tokens in training, and drop them at test time."""
        if not self.training:
            return super().forward(tokens, step, heads)
        logits = self.predictors[str(tokens.block)](tokens.patches, tokens.size)  # (B, N, 2)
        kept = F.gumbel_softmax(logits, self.config.temperature, hard=True)[:, :, 0]
        mask = kept if tokens.size is None else kept * tokens.size  # what is gone stays gone
        before = tokens.state.masks if isinstance(tokens.state, Decisions) else ()
        return replace(tokens, size=mask, state=Decisions((*before, mask)))

    def penalty(self, tokens: Tokens, teacher: Tokens | None) -> torch.Tensor | None:
        """Return the ratio loss and the distillation of tokens (the paper's equations 12 to 14)."""
        if not isinstance(tokens.state, Decisions):
            return None
        masks, config = tokens.state.masks, self.config
        wanted = [config.share(number, tokens.count) for number in range(len(masks))]
        ratio = torch.stack([(mask.mean(1) - share).square().mean() for mask, share in zip(masks, wanted, strict=True)])
        loss = config.ratio_weight * ratio.mean()
        if config.token_weight:
            assert teacher is not None
            off = (tokens.patches.float() - teacher.patches.float()).square().mean(2)  # (B, N)
            loss = loss + config.token_weight * (off * masks[-1]).sum() / masks[-1].sum().clamp(min=EPS)
        return loss

    def macs(self, step: Step) -> int:
        if step.place.block not in self.config.locations:
            return 0
        layers = self.predictors[str(step.place.block)].layers
        per_token = sum(layer.weight.numel() for layer in layers)  # type: ignore[union-attr]
        return step.entering * (per_token + 5 * self.layout.embed_dim)

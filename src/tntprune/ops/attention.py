"""What a method may read of a block's attention, and the attention itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Heads:
    """One block's attention, taken apart. Nothing but `output` is computed unless a method asks for it.

    Args:
        query: (B, heads, n, head_dim), prefix tokens included.
        key: The same.
        value: The same.
        scale: Of the logits.
        bias: (B, 1, 1, n), added to the logits of each key, or (B, heads, n, n) or less, of each pair; or None.
        attention: (B, heads, n, n), the attention map, where a method works on the whole of it; else None.
        fused: Whether the output may come from fused attention.
        dropout: Of the attention map, where attention is fused.
        drop: What is done to the attention map where it is not: the model's own dropout module; None for nothing.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    bias: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    fused: bool = True
    dropout: float = 0.0
    drop: Callable[[torch.Tensor], torch.Tensor] | None = None

    def first(self, count: int) -> Heads:
        """Return the heads for the queries of the first tokens alone; the keys are still all there."""
        bias = self.bias if self.bias is None or self.bias.shape[-2] == 1 else self.bias[..., :count, :]
        return replace(self, query=self.query[:, :, :count], bias=bias)

    def rows(self, first: int) -> torch.Tensor:
        """Return the attention of the first tokens, (B, heads, first, n) in fp32; each row sums to 1."""
        if self.attention is not None:
            return self.attention[:, :, :first].float()
        return self.logits(self.query[:, :, :first]).float().softmax(-1)

    def logits(self, query: torch.Tensor) -> torch.Tensor:
        """Map queries of the first m tokens, (B, heads, m, head_dim), to (B, heads, m, n), before the softmax."""
        logits = query * self.scale @ self.key.transpose(-2, -1)
        return logits if self.bias is None else logits + self.bias[..., : query.shape[2], :]

    def map(self) -> torch.Tensor:
        """Return the whole attention map, (B, heads, n, n), in fp32."""
        return self.logits(self.query).float().softmax(-1) if self.attention is None else self.attention

    def output(self) -> torch.Tensor:
        """Attention-weighted values, (B, heads, n, head_dim)."""
        if self.fused and self.attention is None:
            bias = None if self.bias is None else self.bias.to(self.query.dtype)
            return F.scaled_dot_product_attention(
                self.query, self.key, self.value, attn_mask=bias, dropout_p=self.dropout, scale=self.scale
            )
        attention = self.map() if self.drop is None else self.drop(self.map())
        return attention.to(self.value.dtype) @ self.value


def log_size(size: torch.Tensor, prefix: int, power: float | torch.Tensor) -> torch.Tensor:
    """Return a bias for attention from the sizes of tokens: 0 takes no part.

    Args:
        size: (B, n), how many patches each patch token stands for, 0 where there is none.
        prefix: How many prefix tokens stand before them; they count as one each.
        power: A token of size s counts like s ** power equal ones: 1 is proportional attention, 0 none.

    Returns:
        (B, 1, 1, prefix + n)
    """
    size = F.pad(size.float(), (prefix, 0), value=1.0)  # (B, prefix + n)
    least = -1e4  # exp of it is 0 in every precision, and a row of nothing else is no NaN
    there = size > 0
    bias = torch.where(there, size, 1.0).log() * power  # no log of 0, whose gradient is no number
    return torch.where(there, bias, least)[:, None, None, :]

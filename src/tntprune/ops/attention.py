"""What a method may read of a block's attention, and the attention itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

LEAST = -1e4  # exp of it is 0 in every precision, and a row of nothing else is no NaN
LOWEST = -3e4  # of a key's entry: fp16 ends at 65,504


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
        return self.asked(slice(count))

    def asked(self, rows: slice) -> Heads:
        """Return the heads for the queries of some tokens; the keys are still all there."""
        bias = self.bias if self.bias is None or self.bias.shape[-2] == 1 else self.bias[..., rows, :]
        return replace(self, query=self.query[:, :, rows], bias=bias)

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
            return attend(self.query, self.key, self.value, self.scale, self.bias, self.dropout)
        attention = self.map() if self.drop is None else self.drop(self.map())
        return attention.to(self.value.dtype) @ self.value


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return attention-weighted values, (B, heads, n, head_dim), from torch's fused attention.

    A bias of each key becomes a mask where that is faster, else a part of the keys (see `wants_mask` and `widened`).

    Args:
        query: (B, heads, n, head_dim).
        key: (B, heads, m, head_dim).
        value: The same.
        scale: Of the logits.
        bias: (B, 1, 1, m), added to the logits of each key, or (B, heads, n, m) or less, of each pair; or None.
        dropout: Of the attention map.
    """
    if bias is None or bias.shape[1:3] != (1, 1) or wants_mask(bias):
        mask = None if bias is None else bias.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    wide = widened(query, key, value, scale, bias)
    return F.scaled_dot_product_attention(*wide, dropout_p=dropout, scale=scale)[..., : value.shape[-1]]


def added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two terms of the attention's logits, each of which may be missing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def wants_mask(bias: torch.Tensor) -> bool:
    """Return whether fused attention is faster with a bias of each key as its mask than as a part of the keys.

    On CUDA FlashAttention takes no mask. On CPU it takes one, but not one that has a gradient: then the whole map would
    be built. `benchmarks/sizes.py` times both.
    """
    return bias.device.type != "cuda" and not bias.requires_grad


def widened(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values whose attention is that with a bias of each key.

    A query's new entries are 1, and a key's are bias / scale in two parts and then 0, so that the product adds the
    bias. The parts are a whole number, which bf16 holds up to 256, and the rest, of at most a half. Attention gives 0
    for the new entries of the values.

    Args:
        query: (B, heads, n, head_dim).
        key: (B, heads, m, head_dim).
        value: The same.
        scale: Of the logits, above 0.
        bias: (B, 1, 1, m).

    Returns:
        The three, with head_dim + 2 entries or up to 7 more: a multiple of 8, as kernels want it.
    """
    extra = 2 + -(query.shape[-1] + 2) % 8
    entry = (bias[:, :, 0, :, None] / scale).clamp(min=LOWEST)  # (B, 1, m, 1)
    whole = entry.round()  # no cast to a lower precision, which a compiler may leave out
    tail = F.pad(torch.cat([whole, entry - whole], -1), (0, extra - 2)).to(key.dtype)  # (B, 1, m, extra)
    key = torch.cat([key, tail.expand(-1, key.shape[1], -1, -1)], -1)
    return F.pad(query, (0, extra), value=1.0), key, F.pad(value, (0, extra))


class SizeLogs(NamedTuple):
    """What the sizes of tokens can add to the logits of their keys: the same as long as the sizes are.

    Args:
        size: (B, n), the sizes; 0 takes no part.
        log: (B, 1, 1, prefix + n), their logarithms; 0 for prefix tokens, and where the size is 0.
        absent: The same shape: 0, and `LEAST` where the size is 0.
    """

    size: torch.Tensor
    log: torch.Tensor
    absent: torch.Tensor

    def bias(self, power: float | torch.Tensor) -> torch.Tensor:
        """Return (B, 1, 1, prefix + n) for `Heads`: a token of size s counts like s ** power equal ones."""
        if isinstance(power, torch.Tensor):
            return torch.addcmul(self.absent, self.log, power)
        return torch.add(self.absent, self.log, alpha=power)


def size_logs(size: torch.Tensor, prefix: int) -> SizeLogs:
    """Return the logarithms of sizes (B, n) of patch tokens, behind prefix tokens that count as one each."""
    padded = F.pad(size.float(), (prefix, 0), value=1.0)[:, None, None]  # (B, 1, 1, prefix + n)
    there = padded > 0
    log = torch.where(there, padded, 1.0).log()  # no log of 0, whose gradient is no number
    return SizeLogs(size, log, torch.where(there, 0.0, LEAST))


def log_size(size: torch.Tensor, prefix: int, power: float | torch.Tensor) -> torch.Tensor:
    """Return a bias for attention from the sizes of tokens: 0 takes no part.

    Args:
        size: (B, n), how many patches each patch token stands for, 0 where there is none.
        prefix: How many prefix tokens stand before them; they count as one each.
        power: A token of size s counts like s ** power equal ones: 1 is proportional attention, 0 none.

    Returns:
        (B, 1, 1, prefix + n)
    """
    return size_logs(size, prefix).bias(power)

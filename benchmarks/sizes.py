"""Times the ways in which attention can count tokens by their size, in turns. Prints a table.

python benchmarks/sizes.py

Of one layer of ViT-Tiny and DeiT-S at half the tokens, at all of them, and of a large image, forward alone and with a backward pass that
reaches the sizes: without sizes, with a mask, and with the sizes as a part of the keys. `wants_mask` chooses by it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
import tyro

from tntprune.bench.backends import DTYPES
from tntprune.ops.attention import log_size, widened
from tntprune.system.clock import in_turns

HEADS = {"ViT-Tiny": 3, "DeiT-S": 6}
Heads = list[torch.Tensor]


def plain(heads: Heads, bias: torch.Tensor) -> torch.Tensor:
    """Attention that knows no sizes."""
    return F.scaled_dot_product_attention(*heads, scale=0.125)


def masked(heads: Heads, bias: torch.Tensor) -> torch.Tensor:
    """Attention with a mask."""
    return F.scaled_dot_product_attention(*heads, attn_mask=bias.to(heads[0].dtype), scale=0.125)


def wide(heads: Heads, bias: torch.Tensor) -> torch.Tensor:
    """Attention with the sizes as a part of the keys."""
    query, key, value = heads
    return F.scaled_dot_product_attention(*widened(query, key, value, 0.125, bias), scale=0.125)[..., :64]


def backward(way: Callable[[Heads, torch.Tensor], torch.Tensor], heads: Heads, bias: torch.Tensor) -> None:
    """Run one way and its backward pass."""
    torch.autograd.grad(way(heads, bias).sum(), [*heads, bias], allow_unused=True)


def main(rounds: int = 60, dtype: str = "fp32", device: str = "cpu") -> None:
    """Print a line per shape.

    Args:
        rounds: How often each is timed.
        dtype: Of queries, keys and values.
        device: Where.
    """
    print(
        f"{'model':9} {'batch':>5} {'tokens':>6} {'pass':>8} {'no sizes':>9} {'mask':>7} {'in keys':>7}  in keys / mask"
    )
    for model, count in HEADS.items():
        for batch in (1, 8):
            for tokens in (99, 198) if batch > 1 else (99, 198, 1025):
                heads = [torch.randn(batch, tokens, count, 64, device=device).transpose(1, 2) for _ in range(3)]
                heads = [one.to(DTYPES[dtype]) for one in heads]
                bias = log_size(torch.randint(1, 9, (batch, tokens - 1), device=device), 1, 1)
                for name in ("forward", "backward"):
                    calls = [partial(way, heads, bias) for way in (plain, masked, wide)]
                    if name == "backward":
                        _ = [one.requires_grad_() for one in (*heads, bias)]
                        calls = [partial(backward, way, heads, bias) for way in (plain, masked, wide)]
                    times = in_turns(calls, rounds, torch.device(device), progress=False)
                    ratio = median(b / a for a, b in zip(times[1].all, times[2].all, strict=True))
                    print(
                        f"{model:9} {batch:5} {tokens:6} {name:>8} {times[0].median:6.2f} ms "
                        f"{times[1].median:7.2f} {times[2].median:7.2f} {ratio:15.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    tyro.cli(main)

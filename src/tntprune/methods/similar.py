"""The similarity step: of the tokens that were kept, those that say what another one says go too.

Source: the paper's "Similarity-based Pruning by Random Partition" and its ablation table (sequential, merge).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tntprune.tokens import Tokens, merge, take


def halves(order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two groups: the first half of an order (rounded down) loses tokens to the rest."""
    return order[: len(order) // 2], order[len(order) // 2 :]


def remove_similar(tokens: Tokens, remove: int, order: torch.Tensor, fold: bool = False) -> Tokens:
    """Remove the tokens of one group that are most similar to a token of the other.

    Args:
        tokens: n patch tokens.
        remove: How many go, at most n // 2.
        order: (n,), the order whose first half, rounded down, is the group that loses tokens.
        fold: Merge each removed token into its match instead of dropping it.
    """
    first, second = halves(order)
    x = F.normalize(tokens.patches.float(), dim=-1)
    with torch.autocast(x.device.type, enabled=False):
        likeness = x[:, first] @ x[:, second].transpose(1, 2)  # (B, |first|, |second|), cosines
    closest, match = likeness.max(2)  # (B, |first|) each
    ranked = closest.argsort(dim=1, stable=True)  # the least similar come first
    stay, go = ranked[:, : len(first) - remove], ranked[:, len(first) - remove :]
    if fold:
        tokens = merge(tokens, first[go], second[match.gather(1, go)])
    return take(tokens, torch.cat([first[stay], second.expand(stay.shape[0], -1)], 1))

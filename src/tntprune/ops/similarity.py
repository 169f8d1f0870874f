"""The similarity step: of the tokens that were kept, those that say what another one says go too.

Source: the paper's "Similarity-based Pruning by Random Partition" and its ablation table (sequential, merge).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tntprune.ops.tokens import Tokens, merge, ranking, row_blocks, take


def halves(order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two groups: the first half of an order (rounded down) loses tokens to the rest."""
    return order[: len(order) // 2], order[len(order) // 2 :]


def nearest(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what in one group is most similar to each member of the other. In fp32, and no gradient goes through.

    Args:
        first: (B, a, d), those that look for a match.
        second: (B, b, d), those among which they look.

    Returns:
        (B, a), the cosine, and (B, a), where in `second` the match is.
    """
    return closest(F.normalize(first.detach().float(), dim=-1), F.normalize(second.detach().float(), dim=-1))


def closest(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `nearest` does, of features in fp32 whose length is 1."""
    second = second.transpose(1, 2)  # (B, d, b)
    with torch.autocast(first.device.type, enabled=False):
        found = [(first[:, rows] @ second).max(2) for rows in row_blocks(first.shape[1], second.shape[2])]
    if len(found) == 1:
        return found[0].values, found[0].indices
    return torch.cat([one.values for one in found], 1), torch.cat([one.indices for one in found], 1)


def remove_similar(tokens: Tokens, remove: int, order: torch.Tensor, fold: bool = False) -> Tokens:
    """Remove the tokens of one group that are most similar to a token of the other.

    Args:
        tokens: n patch tokens.
        remove: How many go, at most n // 2.
        order: (n,), the order whose first half, rounded down, is the group that loses tokens.
        fold: Merge each removed token into its match instead of dropping it.
    """
    first, second = halves(order)
    likeness, match = nearest(tokens.patches[:, first], tokens.patches[:, second])  # (B, |first|) each
    ranked = ranking(likeness)  # the least similar come first
    stay, go = ranked[:, : len(first) - remove], ranked[:, len(first) - remove :]
    if fold:
        return merge(tokens, first[stay], second, first[go], match.gather(1, go))
    return take(tokens, torch.cat([first[stay], second.expand(stay.shape[0], -1)], 1))

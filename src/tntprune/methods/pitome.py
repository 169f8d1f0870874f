"""PiToMe: tokens that resemble many others are merged, and those that stand alone are protected.

Source: Tran et al., "Accelerating Transformers with Spectrum-Preserving Token Merging", NeurIPS 2024, section 3. From
its description; no code was taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tntprune.methods.tome import Pairs, TokenMerging, ToMe
from tntprune.ops.similarity import closest
from tntprune.ops.tokens import Tokens, in_order, pick, ranking, row_blocks

MARGIN = 0.9  # before the first block; it falls evenly to 0 at the last, as published
SLOPE = 1.0  # the paper's alpha: weight of the tokens that resemble a token less than the margin


@dataclass(frozen=True)
class PiToMe(ToMe):
    """PiToMe (Tran et al., NeurIPS 2024): in each block tokens of large clusters are merged; rare ones are protected.

    The energy of a token is its mean likeness to all patch tokens, where likeness below a margin counts as less than
    nothing. To merge k tokens, the 2k of the highest energy are dealt in turn to A and B, and each of A is merged into
    the most similar one of B. All others are protected, and so are all prefix tokens, which do not count in the energy.

    The options are ToMe's, with the same meaning. The paper merges a share in each block: `keep`.
    """

    method = "pitome"
    title = "PiToMe"
    without = ("window",)


class EnergyMerging(TokenMerging):
    """The margin of a block is 0.9 (1 - its number / blocks): late tokens are more alike."""

    config: PiToMe

    def pairs(self, features: Tokens, gone: int, block: int) -> Pairs:
        return match_by_energy(features.x, gone, MARGIN * (1 - block / self.layout.depth))

    def comparisons(self, count: int, gone: int) -> int:
        return count**2 + gone**2  # for the energy, and of A with B


def match_by_energy(x: torch.Tensor, gone: int, margin: float) -> Pairs:
    """Pair tokens of the highest energy: the first, third and so on go, each to the most similar of the others.

    In fp32, and no gradient goes through.

    Args:
        x: (B, n, width), what is compared.
        gone: How many pairs, at most n // 2.
        margin: See `energy`.

    Returns:
        Positions as `merge` takes them: protected tokens, in their order (B, n - 2 gone); those that take others in
        (B, gone); those that go (B, gone); and where each of these goes (B, gone).
    """
    x = F.normalize(x.detach().float(), dim=-1)
    ranked = ranking(energy(x, margin), descending=True)  # (B, n)
    stay, candidates = in_order(ranked[:, 2 * gone :]), ranked[:, : 2 * gone]
    source, into = candidates[:, ::2], candidates[:, 1::2]  # (B, gone) each
    return stay, into, source, closest(pick(x, source), pick(x, into))[1]


def energy(x: torch.Tensor, margin: float) -> torch.Tensor:
    """Return each token's energy, equation 4 of the paper: the mean of f(cosine) over all tokens, (B, n).

    f(c) = c from the margin on, and exp(c - margin) - 1, below 0, under it. A token itself is among all, which adds the
    same to every token.

    Args:
        x: (B, n, width) in fp32, of length 1.
        margin: Cosine from which on tokens count as alike.
    """
    found = []
    with torch.autocast(x.device.type, enabled=False):
        for rows in row_blocks(x.shape[1], x.shape[1]):
            cosine = x[:, rows] @ x.transpose(1, 2)  # (B, rows, n)
            found.append(torch.where(cosine >= margin, cosine, SLOPE * ((cosine - margin).exp() - 1)).mean(2))
    return found[0] if len(found) == 1 else torch.cat(found, 1)

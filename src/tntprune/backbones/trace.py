"""What a reduced model kept in a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tntprune.ops.tokens import Tokens


@dataclass
class Trace:
    """What was kept in the last forward pass.

    Args:
        kept: For each block after which tokens went (0: before the first), (B, n) patch indices in the original
            grid, row by row, ascending.
            Where the number differs from image to image, and for tokens without a place in the grid, -1 comes first.
        carrier: For the same blocks, (B, N): for every patch of the original grid the index of the kept patch whose
            token carries it (its own where it was kept, another's where it was merged), or -1 where it was dropped.
        counts: (B,) patch tokens of each image that entered each block, and then its MLP, block after block; then those
            that are left.
    """

    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    carrier: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: list[torch.Tensor] = field(default_factory=list)
    ended: bool = False

    def begin(self) -> None:
        """Forget the last forward pass."""
        self.kept.clear()
        self.carrier.clear()
        self.counts.clear()
        self.ended = False

    def count(self, tokens: Tokens) -> None:
        """Note how many tokens go into half a block; not when a block is run again in a backward pass."""
        if self.ended:
            return
        size = tokens.size
        whole = torch.full(tokens.index.shape[:1], tokens.count, device=tokens.index.device)
        self.counts.append(whole if size is None else (size > 0).sum(1))

    def add(self, block: int, tokens: Tokens) -> None:
        """Note the tokens that are left after a block."""
        self.kept[block] = tokens.index.detach().sort(1).values
        if tokens.carrier is not None:
            place = tokens.index.gather(1, tokens.carrier.clamp(min=0))
            self.carrier[block] = torch.where(tokens.carrier >= 0, place, -1)

"""What a frozen model makes of images in memory: worked out once for a training, instead of once per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tntprune.ops.tokens import Tokens, start


@dataclass(frozen=True)
class Features:
    """What is the same in every epoch, of some images.

    Args:
        x: (n, prefix + N, D), the tokens as they leave a block up to which the reduction does nothing.
        block: The block's number; 0 is the embedding.
        prefix: How many prefix tokens there are.
        logits: (n, classes), the unpruned model's; of a model without classes its embeddings (n, D). None where
            nobody asks for them.
    """

    x: torch.Tensor
    block: int
    prefix: int
    logits: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Sequence[int]) -> Features:
        """Take those of some images."""
        return replace(self, x=self.x[index], logits=None if self.logits is None else self.logits[index])

    def to(self, device: torch.device, non_blocking: bool = False) -> Features:
        """Move them to a device."""
        logits = None if self.logits is None else self.logits.to(device, non_blocking=non_blocking)
        return replace(self, x=self.x.to(device, non_blocking=non_blocking), logits=logits)

    @property
    def tokens(self) -> Tokens:
        """The tokens that leave the block."""
        return replace(start(self.x, self.prefix), block=self.block)

"""Mixup and cutmix of the images of a batch."""

from __future__ import annotations

import torch
from timm.data import Mixup

from tntprune.data.augment import Augmentation
from tntprune.data.transforms import fixed_randomness
from tntprune.errors import UsageError

MIXING = 0x6D6978  # sets the choices of mixing apart from those of the images


class Mixer:
    """timm's mixup and cutmix, with choices that follow from the seed, the step and the part of its batch."""

    def __init__(self, augmentation: Augmentation, classes: int, smoothing: float, seed: int) -> None:
        self.seed = seed
        self.mixup = Mixup(
            augmentation.mixup, augmentation.cutmix, label_smoothing=smoothing, num_classes=max(1, classes)
        )

    def __call__(
        self, step: int, part: int, images: torch.Tensor, labels: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the images (B, C, H, W) of a part of a step's batch, in place, each with the one as far from the other
        end; return them and the shares of the classes (B, classes), or None where there are no labels (B,).
        """
        check_even(len(images))
        given = torch.zeros(len(images), dtype=torch.long) if labels is None else labels
        with fixed_randomness(self.seed, step, part, MIXING):
            mixed, shares = self.mixup(images, given)
        return mixed, None if labels is None else shares


def check_even(count: int) -> None:
    """Refuse an odd number of images, of which the middle one would be mixed with itself."""
    if count % 2:
        raise UsageError(
            f"mixup and cutmix of {count} images at a time: expected an even number in each part of a batch; "
            "change the batch size, or leave mixing out"
        )

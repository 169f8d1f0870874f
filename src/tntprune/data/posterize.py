"""timm's posterizing, where no bit of an image is left: black, as ever, and what today's Pillow refuses to do.

RandAugment's usual "rand-m9-mstd0.5-inc1" comes to that for one image in about a thousand.
"""

from __future__ import annotations

from typing import Any

from PIL import Image
from timm.data import auto_augment


def posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """The image with its first `bits` bits of each channel."""
    if bits < 1:
        return Image.new(image.mode, image.size)
    posterized: Image.Image = auto_augment.posterize(image, bits, **options)
    return posterized


def mend(transform: Any) -> Any:
    """timm's transform, with our `posterize` in its RandAugment, AutoAugment or AugMix."""
    for step in transform.transforms:
        for op in [*getattr(step, "ops", []), *(op for policy in getattr(step, "policy", []) for op in policy)]:
            if op.aug_fn is auto_augment.posterize:
                op.aug_fn = posterize
    return transform

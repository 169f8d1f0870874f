"""How training images are changed at random: crops, mirror images, RandAugment, erasing, mixing, repetition."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup, auto_augment

from tntprune.errors import UsageError
from tntprune.methods.checks import check, check_whole, is_number

MIXING = 0x6D6978  # sets the choices of mixing apart from those of the images


@dataclass(frozen=True)
class Augmentation:
    """What happens to training images; all of it is timm's, and 0, 1 or None turns it off.

    Args:
        crop: The smallest share of an image's area that a random crop takes, from above 0 to 1.
        hflip: Probability of a mirror image.
        auto_augment: timm's text for RandAugment, AutoAugment or AugMix, such as "rand-m9-mstd0.5-inc1"; or None.
        color_jitter: How far brightness, contrast and saturation go, as a share of themselves. timm leaves it out where
            there is an `auto_augment`, unless that is of the kind "3a".
        random_erasing: Probability that a rectangle becomes noise.
        mixup: The parameter of the beta distribution by which two images are blended.
        cutmix: The same for a rectangle of one image that is pasted into another. With both, each part of a batch gets
            one or the other.
        repeats: How many times an image comes in an epoch, each time augmented anew. An epoch stays as long, so that it
            has that many times fewer images in it.

    Raises:
        UsageError: a value is out of range. Whether timm knows the `auto_augment` is seen when it is built.
    """

    crop: float = 0.35
    hflip: float = 0.5
    auto_augment: str | None = None
    color_jitter: float = 0.0
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    repeats: int = 1

    def __post_init__(self) -> None:
        check(is_number(self.crop) and 0 < self.crop <= 1, f"crop={self.crop}: expected a share from above 0 to 1")
        for name, most, what in (
            ("hflip", 1, "probability"), ("random_erasing", 1, "probability"), ("color_jitter", 100, "number"),
        ):  # fmt: skip
            value = getattr(self, name)
            check(is_number(value) and 0 <= value <= most, f"{name}={value}: expected a {what} from 0 to {most}")
        for name in ("mixup", "cutmix"):  # other numbers overflow in the beta distribution
            value = getattr(self, name)
            good = is_number(value) and (value == 0 or 0.001 <= value <= 1000)
            check(good, f"{name}={value}: expected 0, or a number from 0.001 to 1000")
        check_whole("repeats", self.repeats, 1)
        text = self.auto_augment
        good = text is None or (isinstance(text, str) and bool(re.fullmatch(r"\w+(-[a-z]+\d*\.?\d+)*", text)))
        check(good, f"auto_augment={text!r}: expected timm's text, such as 'rand-m9-mstd0.5-inc1', or None")
        for part, number in re.findall(r"-([a-z]+)([\d.]+)", text or ""):
            most = 1000 if part == "mstd" else 100  # the number of operations per image among them
            check(float(number) <= most, f"auto_augment={text!r}: {part}{number} is too large; expected at most {most}")

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values by name."""
        return asdict(self)


LIGHT = Augmentation()
"""Crops and mirror images, enough for the few numbers that a frozen model's scorers are."""

AUTHORS = Augmentation(
    crop=0.08, auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.3, random_erasing=0.25, mixup=0.8, cutmix=1.0,
    repeats=3,
)  # fmt: skip
"""What the authors of TNT trained with, which is DeiT's recipe."""

PRESETS = {"light": LIGHT, "authors": AUTHORS}


@contextmanager
def fixed_randomness(*key: int) -> Iterator[None]:
    """Let Python's, numpy's and torch's random choices follow from the key inside, and go on as before outside."""
    state, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed = random.Random(repr(key)).getrandbits(63)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # timm's RandAugment and Mixup draw from it
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPU's, for good
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numbers)


def posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """Keep the first `bits` bits of each channel; of none, where Pillow fails and timm fails with it, black is left.

    RandAugment's usual "rand-m9-mstd0.5-inc1" comes to that for one image in about a thousand.
    """
    if bits < 1:
        return Image.new(image.mode, image.size)
    posterized: Image.Image = auto_augment.posterize(image, bits, **options)
    return posterized


def mend(transform: Any) -> Any:
    """Put our `posterize` into the RandAugment, AutoAugment or AugMix of a transform of timm's."""
    for step in transform.transforms:
        for op in [*getattr(step, "ops", []), *(op for policy in getattr(step, "policy", []) for op in policy)]:
            if op.aug_fn is auto_augment.posterize:
                op.aug_fn = posterize
    return transform


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

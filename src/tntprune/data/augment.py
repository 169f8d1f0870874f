"""The options of augmentation: crops, mirror images, RandAugment, erasing, mixing, repetition."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from tntprune.methods.checks import check, check_whole, is_number


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

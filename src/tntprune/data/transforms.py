"""The transform of a model's photos, for evaluation and for training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment, create_transform, resolve_model_data_config

from tntprune.backbones.base import find_backbone
from tntprune.data.augment import Augmentation
from tntprune.data.processor import Processor
from tntprune.errors import UsageError


def transform_for(model: Any, augment: Augmentation | None = None) -> Callable[[Any], torch.Tensor]:
    """Make the model's own transform of photos: its size, crop, interpolation, mean and standard deviation.

    Of timm's models it is timm's; of those of transformers the image processor that lies beside their weights. With
    `augment` it is for training: what is done to images one by one, instead of the centre crop.

    Raises:
        UserError: there is no processor beside a model of transformers, or its images do not fit the model.
        UsageError: timm does not know the `auto_augment`.
    """
    if hasattr(model, "from_pretrained"):
        processor = Processor(model)
        if augment is None:
            return processor
        config = processor.pixels()
    else:
        size = getattr(getattr(model, "patch_embed", None), "img_size", None)  # timm's default may be another one
        config = resolve_model_data_config(model, {"input_size": (model.in_chans, *size)} if size else {})
        if augment is None:
            return create_transform(**config)  # type: ignore[no-any-return]
    try:
        transform = create_transform(
            config["input_size"], is_training=True, interpolation=config["interpolation"], mean=config["mean"],
            std=config["std"], scale=(augment.crop, 1.0), hflip=augment.hflip, auto_augment=augment.auto_augment,
            color_jitter=augment.color_jitter or None, re_prob=augment.random_erasing, re_mode="pixel",
        )  # fmt: skip
    except (AssertionError, ValueError, KeyError, IndexError):  # what timm's parser of such texts raises
        raise UsageError(
            f"auto_augment={augment.auto_augment!r}: unknown to timm; expected text such as 'rand-m9-mstd0.5-inc1'"
        ) from None
    return mend(transform)  # type: ignore[no-any-return]


def normalization_of(model: Any) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and the standard deviation, of each channel, with which a model's photos are normalised."""
    told = Processor(model).pixels() if hasattr(model, "from_pretrained") else resolve_model_data_config(model)
    return told["mean"], told["std"]


def input_mode(model: Any) -> Literal["RGB", "L"]:
    """Say how images are read for a model."""
    channels = getattr(model, "in_chans", None)
    if channels is None and hasattr(model, "from_pretrained"):
        channels = find_backbone(model).input_size(model)[0]
    return "L" if channels == 1 else "RGB"


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

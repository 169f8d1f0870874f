from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from timm.data import auto_augment, create_transform

from conftest import make
from tntprune.data.augment import Augmentation
from tntprune.data.transforms import mend, posterize, transform_for

rng = np.random.default_rng(0)
IMAGE = Image.fromarray(rng.integers(0, 256, (16, 24, 3), dtype=np.uint8))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("bits", range(9))
def test_the_first_bits_are_kept(mode, bits):
    image = IMAGE.convert(mode)
    expected = np.asarray(image) & (0xFF << (8 - bits) & 0xFF)
    assert np.array_equal(np.asarray(posterize(image, bits, fillcolor=(1, 2, 3), resample=0)), expected)


@pytest.mark.parametrize("text", ["rand-m9-mstd0.5-inc1", "original", "v0", "3a", "augmix-m5", "rand-m0"])
def test_every_posterizing_of_a_transform_is_ours_and_timms_own_table_stays(text):
    ops: list = []
    for step in transform_for(make("plain"), Augmentation(auto_augment=text)).transforms:
        ops += getattr(step, "ops", [])
        ops += [op for policy in getattr(step, "policy", []) for op in policy]
    posterizing = [op for op in ops if op.name.startswith("Posterize")]
    assert len(ops) > 2 and all(op.aug_fn is posterize for op in posterizing)
    assert posterizing or text in ("3a",)
    assert not any(op.aug_fn is posterize for op in ops if op not in posterizing)
    assert auto_augment.NAME_TO_OP["Posterize"] is auto_augment.posterize


def test_the_strongest_randaugment_goes_through():
    transform = mend(create_transform(16, is_training=True, auto_augment="rand-m10-inc1", color_jitter=None))
    (step,) = [step for step in transform.transforms if hasattr(step, "ops")]
    for op in step.ops:
        op.prob = 1.0
        assert op(IMAGE).size == IMAGE.size

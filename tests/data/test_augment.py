from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import Compose

from conftest import make
from tntprune.backbones.digits_vit import build
from tntprune.data.augment import AUTHORS, LIGHT, PRESETS, Augmentation
from tntprune.data.loading import Photos
from tntprune.data.photo import Photo
from tntprune.data.transforms import fixed_randomness, transform_for
from tntprune.errors import UsageError

MODEL = make("plain")
NONE = Augmentation(crop=1.0, hflip=0.0)
rng = np.random.default_rng(0)
IMAGE = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8).repeat(2, 0).repeat(2, 1))


def draw(augmentation: Augmentation, count: int = 20, image: Image.Image = IMAGE, model=MODEL) -> list[torch.Tensor]:
    transform, found = transform_for(model, augmentation), []
    for key in range(count):
        with fixed_randomness(key):
            found.append(transform(image))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"crop": 0}, {"crop": 1.1}, {"crop": float("nan")}, {"crop": "0.5"}, {"hflip": -0.1}, {"hflip": 2},
        {"random_erasing": 1.5}, {"color_jitter": -1}, {"mixup": -0.1}, {"mixup": float("inf")}, {"cutmix": True},
        {"repeats": 0}, {"repeats": 1.5}, {"repeats": True}, {"auto_augment": ""}, {"auto_augment": 3},
        {"auto_augment": "rand-mx"}, {"auto_augment": "rand m9"},
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_by_name(options):
    with pytest.raises(UsageError, match=f"{next(iter(options))}=.*: expected"):
        Augmentation(**options)


@pytest.mark.parametrize("text", ["nonsense", "rand-m9-zz3", "randx-m9"])
def test_texts_that_timm_does_not_know_are_refused(text):
    augmentation = Augmentation(auto_augment=text)
    with pytest.raises(UsageError, match="unknown to timm; expected text such as") as caught:
        transform_for(MODEL, augmentation)
    assert "\n" not in str(caught.value)


def test_they_are_json_values_and_compare_by_value():
    assert Augmentation(**json.loads(json.dumps(AUTHORS.to_dict()))) == AUTHORS != LIGHT == Augmentation()
    assert PRESETS == {"light": LIGHT, "authors": AUTHORS}
    assert AUTHORS.mixes and not LIGHT.mixes
    assert Augmentation(mixup=0.1).mixes and Augmentation(cutmix=0.1).mixes


def test_the_authors_are_deits(monkeypatch):
    given = {}
    monkeypatch.setattr(
        "tntprune.data.transforms.create_transform", lambda size, **options: given.update(options) or Compose([])
    )
    transform_for(MODEL, AUTHORS)
    expected = {
        "is_training": True, "scale": (0.08, 1.0), "hflip": 0.5, "auto_augment": "rand-m9-mstd0.5-inc1",
        "color_jitter": 0.3, "re_prob": 0.25, "re_mode": "pixel",
    }  # fmt: skip
    assert expected.items() <= given.items()
    assert (AUTHORS.mixup, AUTHORS.cutmix, AUTHORS.repeats) == (0.8, 1.0, 3)


def test_the_light_ones_are_timms_crops_and_mirror_images_and_nothing_else():
    plain = create_transform(
        (3, 32, 32), is_training=True, scale=(0.35, 1.0), color_jitter=None, auto_augment=None, interpolation="bicubic"
    )
    for key, found in enumerate(draw(LIGHT)):
        with fixed_randomness(key):
            assert torch.equal(found, plain(IMAGE))


def test_with_everything_off_images_are_as_they_are():
    assert all(torch.equal(image, draw(NONE, 1)[0]) for image in draw(NONE, 5))


@pytest.mark.parametrize(
    "options",
    [
        {"crop": 0.2}, {"hflip": 0.5}, {"auto_augment": "rand-m9-mstd0.5-inc1"}, {"auto_augment": "3a"},
        {"color_jitter": 0.3}, {"random_erasing": 0.5},
    ],
    ids=lambda options: next(iter(options.items())).__str__(),
)  # fmt: skip
def test_each_of_them_changes_images_and_not_always_in_the_same_way(options):
    found = draw(replace(NONE, **options), 30)
    assert len({image.numpy().tobytes() for image in found}) > (2 if "hflip" not in options else 1)
    assert all(image.shape == (3, 32, 32) and image.isfinite().all() for image in found)


def test_a_mirror_image_is_one():
    assert torch.equal(draw(replace(NONE, hflip=1.0), 1)[0], draw(NONE, 1)[0].flip(2))


def test_erasing_leaves_noise_in_a_rectangle_and_the_rest_alone():
    before = draw(NONE, 1)[0]
    for after in draw(replace(NONE, random_erasing=1.0), 10):
        changed = (after != before).any(0)
        rows, columns = changed.any(1).nonzero().flatten(), changed.any(0).nonzero().flatten()
        box = after[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert changed.sum() == box[0].numel() and 0.01 < changed.float().mean() < 0.4
        assert box.flatten(1).std(1).min() > 0.3  # noise, each pixel for itself


def test_colour_jitter_is_left_out_beside_randaugment_as_timm_has_it():
    text = "rand-m9-mstd0.5-inc1"
    both, one = (draw(replace(NONE, auto_augment=text, color_jitter=j)) for j in (0.3, 0.0))
    assert all(torch.equal(a, b) for a, b in zip(both, one, strict=True))


def test_images_of_one_channel_get_all_of_it_too():
    found = draw(AUTHORS, 40, IMAGE.convert("L"), build())
    assert all(image.shape == found[0].shape and len(image) == 1 and image.isfinite().all() for image in found)


@given(seed=st.integers(0, 2**31), key=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)))
def test_all_of_it_follows_from_the_key_and_disturbs_no_generator(seed, key):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    image = ONE[(key[0], 0, key[2])][0]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    random.seed(seed + 1)
    np.random.seed(seed + 1)
    torch.manual_seed(seed + 1)
    assert torch.equal(image, ONE[(key[0], 0, key[2])][0])
    assert key[2] == 0 or not torch.equal(image, ONE[(key[0], 0)][0])  # each copy is another


ONE = Photos([Photo(Path("x"), 0, image=IMAGE)], transform_for(MODEL, AUTHORS), seed=1)

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tntprune.data.augment import AUTHORS, LIGHT, Augmentation
from tntprune.data.mixing import Mixer
from tntprune.errors import UsageError

CLASSES = 5


def images_of(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 8, 12, generator=torch.Generator().manual_seed(count))


def smooth(label: int, smoothing: float) -> torch.Tensor:
    row = torch.full((CLASSES,), smoothing / CLASSES)
    row[label] += 1 - smoothing
    return row


@settings(max_examples=60, deadline=None)
@given(
    half=st.integers(1, 4), mixup=st.sampled_from([0.0, 0.8]), cutmix=st.sampled_from([0.0, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1]), seed=st.integers(0, 99), step=st.integers(0, 10**7), data=st.data(),
)  # fmt: skip
def test_each_image_is_mixed_with_the_one_as_far_from_the_other_end(half, mixup, cutmix, smoothing, seed, step, data):
    augmentation = Augmentation(mixup=mixup, cutmix=cutmix)
    if not augmentation.mixes:
        return
    count = 2 * half
    before = images_of(count)
    labels = torch.tensor(data.draw(st.lists(st.integers(0, CLASSES - 1), min_size=count, max_size=count)))
    after, shares = Mixer(augmentation, CLASSES, smoothing, seed)(step, 0, before.clone(), labels)
    assert shares.shape == (count, CLASSES) and shares.dtype == torch.float32

    mine = torch.empty(count)  # share of the image itself, found from the pixels alone
    for i in range(count):
        here, there = before[i], before[count - 1 - i]
        own, other = after[i] == here, after[i] == there
        if bool((own | other).all()):  # pasted: each pixel is of one of the two, in one rectangle
            pasted = ~own.all(0)
            mine[i] = 1 - pasted.float().mean()
            rows, columns = pasted.any(1).nonzero().flatten(), pasted.any(0).nonzero().flatten()
            assert not len(rows) or pasted[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
            assert cutmix or not len(rows)
        else:  # blended: the same share everywhere
            share = ((after[i] - there) / (here - there)).median()
            assert torch.allclose(after[i], share * here + (1 - share) * there, atol=1e-4) and mixup
            mine[i] = share
        expected = mine[i] * smooth(labels[i], smoothing) + (1 - mine[i]) * smooth(labels[count - 1 - i], smoothing)
        assert torch.allclose(shares[i], expected, atol=1e-3)
    assert torch.allclose(shares.sum(1), torch.ones(count), atol=1e-5)
    assert mine.max() - mine.min() < 1e-3  # one share for all


def test_both_kinds_come_and_shares_differ_from_part_to_part_and_step_to_step():
    mixer, before = Mixer(AUTHORS, CLASSES, 0.1, 0), images_of(4)
    kinds, shares = set(), set()
    for step in range(10):
        for part in range(3):
            after, targets = mixer(step, part, before.clone(), torch.tensor([0, 1, 2, 3]))
            kinds.add(bool(((after == before) | (after == before.flip(0))).all()))
            shares.add(round(targets[0, 0].item(), 6))
    assert kinds == {True, False} and len(shares) > 20


@pytest.mark.parametrize("labelled", [True, False])
def test_choices_follow_from_seed_step_and_part_and_disturb_no_generator(labelled):
    labels = torch.tensor([0, 1, 2, 3]) if labelled else None

    def run(seed: int, step: int, part: int) -> torch.Tensor:
        return Mixer(AUTHORS, CLASSES, 0.0, seed)(step, part, images_of(4), labels)[0]

    np.random.seed(0)
    first = run(1, 2, 3)
    np.random.seed(1)
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert torch.equal(run(1, 2, 3), first)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert not any(torch.equal(run(*key), first) for key in ((2, 2, 3), (1, 3, 3), (1, 2, 4)))


def test_without_labels_the_images_are_mixed_in_the_same_way():
    mixer = Mixer(AUTHORS, CLASSES, 0.1, 7)
    for step in range(6):
        mixed, none = mixer(step, 0, images_of(4), None)
        assert none is None
        assert torch.equal(mixed, mixer(step, 0, images_of(4), torch.zeros(4, dtype=torch.long))[0])
        assert not torch.equal(mixed, images_of(4))


def test_a_model_without_classes_can_be_trained_on_mixed_images():
    mixed, none = Mixer(replace(LIGHT, mixup=1.0), 0, 0.0, 0)(0, 0, images_of(2), None)
    assert none is None and not torch.equal(mixed, images_of(2))


@pytest.mark.parametrize("count", [1, 3])
def test_odd_batches_are_refused(count):
    with pytest.raises(UsageError, match=f"of {count} images at a time: expected an even number") as caught:
        Mixer(AUTHORS, CLASSES, 0.1, 0)(0, 0, images_of(count), torch.zeros(count, dtype=torch.long))
    assert "\n" not in str(caught.value)

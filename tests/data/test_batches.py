from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DataLoader, TensorDataset

from conftest import make
from tntprune.data.augment import AUTHORS, LIGHT
from tntprune.data.batches import LoaderSource, PhotoSource, Share, TensorSource, chosen
from tntprune.data.folders import all_photos
from tntprune.data.loading import Photos
from tntprune.data.mixing import Mixer
from tntprune.data.photo import Photo
from tntprune.data.transforms import transform_for
from tntprune.errors import UserError


def refused(call, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


def same(found, expected) -> bool:
    found, expected = list(found), list(expected)
    return len(found) == len(expected) and all(
        torch.equal(a, c) and (b is d is None or torch.equal(b, d))
        for (a, b), (c, d) in zip(found, expected, strict=True)
    )


@given(count=st.integers(1, 60), batch=st.integers(1, 70), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_an_epoch_goes_through_all_images_once(count, batch, seed, epoch):
    per_epoch = max(1, count // batch)
    steps = [chosen(count, batch, seed, epoch * per_epoch + turn) for turn in range(per_epoch)]
    assert {number for number, _, _ in steps} == {epoch}
    assert {len(index) for _, index, _ in steps} == {min(batch, count)}
    seen = [position for _, index, _ in steps for position in index]
    assert len(set(seen)) == len(seen) and set(seen) <= set(range(count))
    assert len(seen) == (count - count % batch if count >= batch else count)  # the rest of a batch is left out


def test_the_order_follows_from_the_seed_and_differs_between_epochs():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    orders = [tuple(chosen(50, 50, seed, epoch)[1]) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16 and torch.equal(torch.get_rng_state(), before)
    assert orders == [tuple(chosen(50, 50, seed, epoch)[1]) for seed in range(4) for epoch in range(4)]


def test_what_an_epoch_leaves_out_changes():
    left_out = [set(range(10)) - {i for turn in range(2) for i in chosen(10, 4, 0, 2 * e + turn)[1]} for e in range(20)]
    assert all(len(images) == 2 for images in left_out) and set().union(*left_out) == set(range(10))


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 20), batch=st.integers(1, 25), labelled=st.booleans(), data=st.data())
def test_tensors_resume_with_the_batches_that_were_left(count, batch, labelled, data):
    images = torch.arange(float(count)).reshape(-1, 1, 1, 1)
    labels = torch.arange(count) * 10 if labelled else None
    source = TensorSource(images, labels, batch, seed=3)
    last = 3 * source.per_epoch
    whole = list(source.batches(0, last))
    assert len(whole) == last
    for x, y in whole:
        assert x.shape[1:] == (1, 1, 1) and (y is None if labels is None else torch.equal(y, x.flatten().long() * 10))
    first = data.draw(st.integers(0, last))
    again = TensorSource(images, labels, batch, seed=3)
    assert same(again.batches(first, last), whole[first:])


def test_tensors_of_another_shape_are_refused():
    images = torch.zeros(4, 3, 8, 8)
    for bad in (images[0], images[:0], torch.zeros(4), images[None]):
        refused(lambda bad=bad: TensorSource(bad, None, 2, 0), f"images of shape {tuple(bad.shape)}")
    for labels in (torch.zeros(3), torch.zeros(4, 1), torch.tensor(1)):
        refused(
            lambda labels=labels: TensorSource(images, labels, 2, 0), f"labels of shape {tuple(labels.shape)}", "(4,)"
        )


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(7):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    return tmp_path


def photo_source(folder, workers: int, labelled: bool = True, batch: int = 3) -> PhotoSource:
    found = [Photo(photo.path, 10 * i) for i, photo in enumerate(all_photos(folder))]
    photos = Photos(found, transform_for(make("plain"), LIGHT), seed=4)
    return PhotoSource(photos, batch, 4, workers, labelled)


def test_photos_resume_with_the_batches_that_were_left_whatever_the_workers(folder):
    source = photo_source(folder, 0)
    assert source.per_epoch == 2
    whole = list(source.batches(0, 6))
    assert [len(x) for x, _ in whole] == [3] * 6
    assert [y.tolist() for _, y in whole] == [[10 * i for i in chosen(7, 3, 4, step)[1]] for step in range(6)]
    for workers, first in ((0, 0), (0, 1), (0, 5), (1, 0), (1, 3), (1, 5)):
        torch.manual_seed(first)  # and whatever the state of the generators
        assert same(photo_source(folder, workers).batches(first, 6), whole[first:])
    assert same(source.batches(3, 3), [])


def test_photos_are_augmented_anew_in_each_epoch(folder):
    seen: dict[int, list[torch.Tensor]] = {}
    for images, labels in photo_source(folder, 0, batch=7).batches(0, 3):
        for image, label in zip(images, labels.tolist(), strict=True):
            seen.setdefault(label, []).append(image)
    assert len(seen) == 7
    for versions in seen.values():
        assert not torch.equal(versions[0], versions[1]) and not torch.equal(versions[1], versions[2])


def test_photos_without_labels_give_none(folder):
    assert all(labels is None for _, labels in photo_source(folder, 0, labelled=False).batches(0, 2))


def test_fewer_photos_than_a_batch_are_one_batch(folder):
    source = photo_source(folder, 0, batch=50)
    assert source.per_epoch == 1 and [len(x) for x, _ in source.batches(0, 2)] == [7, 7]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_photo_that_cannot_be_read_stops_by_name(folder, workers):
    (folder / "3.png").write_bytes(b"no image")
    refused(lambda: list(photo_source(folder, workers).batches(0, 4)), f"{folder / '3.png'}: not an image")


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 60), batch=st.integers(1, 12), parts=st.integers(1, 4), repeats=st.integers(1, 5),
    epoch=st.integers(0, 3),
)  # fmt: skip
def test_repeated_photos_come_as_from_timms_sampler(count, batch, parts, repeats, epoch):
    batch *= parts
    if count < batch:
        return
    per_epoch, share = count // batch, Share(parts, tuple(range(parts)))
    mine: list[list[int]] = [[] for _ in range(parts)]
    for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
        number, positions, copies = chosen(count, batch, 0, step, repeats)
        assert number == epoch and len(positions) == len(copies) == batch
        for part in share.mine:
            mine[part] += share.cut(positions, part)
    for part in share.mine:
        sampler = RepeatAugSampler(range(count), parts, part, num_repeats=repeats, selected_round=0)
        sampler.set_epoch(epoch)
        assert mine[part] == list(sampler)[: len(mine[part])]
        assert len(sampler) - batch < len(mine[part]) <= len(sampler)  # but for the last, smaller batch


@given(count=st.integers(1, 60), batch=st.integers(1, 70), repeats=st.integers(1, 5), seed=st.integers(0, 99))
def test_each_copy_of_a_photo_is_another_and_they_are_neighbours(count, batch, repeats, seed):
    steps = [chosen(count, batch, seed, step, repeats) for step in range(max(1, count // batch))]
    pairs = [pair for _, positions, copies in steps for pair in zip(positions, copies, strict=True)]
    assert len(set(pairs)) == len(pairs) == len(steps) * min(batch, count)
    assert {copy for _, copy in pairs} <= set(range(repeats))
    assert len({position for position, _ in pairs}) == -(-len(pairs) // repeats)
    starts = [i for i, (_, copy) in enumerate(pairs) if copy == 0]
    assert all(pairs[i + copy] == (pairs[i][0], copy) for i in starts for copy in range(min(repeats, len(pairs) - i)))


FULL = replace(AUTHORS, crop=0.5)


def full_source(folder, workers: int, batch: int = 6, augmentation=FULL, labelled: bool = True) -> PhotoSource:
    found = [Photo(photo.path, i) for i, photo in enumerate(all_photos(folder))]
    photos = Photos(found, transform_for(make("plain"), augmentation), seed=4)
    mixer = Mixer(augmentation, 7, 0.1, 4) if augmentation.mixes else None
    return PhotoSource(photos, batch, 4, workers, labelled, augmentation.repeats, mixer)


@pytest.mark.parametrize("labelled", [True, False])
def test_the_whole_recipe_gives_the_same_whatever_the_workers_the_process_and_the_resumption(folder, labelled):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    three = Share(3, (0, 1, 2))
    whole = list(full_source(folder, 0, labelled=labelled).batches(0, 4, three))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert all(len(x) == 2 and (y is None) == (not labelled) for x, y in whole)
    assert not labelled or all(y.shape == (2, 7) and torch.allclose(y.sum(1), torch.ones(2)) for _, y in whole)
    assert len({x.numpy().tobytes() for x, _ in whole}) == 12
    for workers, first, mine in ((0, 0, (0, 1, 2)), (1, 2, (0, 1, 2)), (0, 1, (1,)), (2, 0, (0, 2))):
        np.random.seed(first)
        expected = [whole[3 * step + part] for step in range(first, 4) for part in mine]
        assert same(full_source(folder, workers, labelled=labelled).batches(first, 4, Share(3, mine)), expected)


def test_in_an_epoch_of_repeated_photos_each_comes_in_several_versions(folder):
    source = full_source(folder, 0, augmentation=replace(FULL, mixup=0, cutmix=0))
    seen: dict[int, list[torch.Tensor]] = {}
    for images, labels in source.batches(0, 1):
        for image, label in zip(images, labels.tolist(), strict=True):
            seen.setdefault(label, []).append(image)
    assert sorted(map(len, seen.values())) == [3, 3]
    for versions in seen.values():
        assert len({image.numpy().tobytes() for image in versions}) == 3


def test_tensors_are_mixed_too_and_stay_as_they_were():
    images = torch.randn(6, 3, 4, 4)
    kept, labels = images.clone(), torch.arange(6)
    mixer = Mixer(AUTHORS, 6, 0.0, 0)
    source = TensorSource(images, labels, 4, 0, mixer)
    for step, (mixed, shares) in enumerate(source.batches(0, 5)):
        _, index, _ = chosen(6, 4, 0, step)
        assert same([(mixed, shares)], [mixer(step, 0, kept[index], labels[index])])
    assert torch.equal(images, kept)


@pytest.mark.parametrize(("batch", "parts"), [(3, 1), (6, 2), (50, 1)])
def test_parts_that_cannot_be_mixed_are_refused_before_anything_is_read(folder, batch, parts):
    (folder / "0.png").write_bytes(b"no image")
    source = full_source(folder, 0, batch)
    refused(lambda: next(source.batches(0, 1, Share(parts, (0,)))), "expected an even number")


@pytest.mark.parametrize(
    ("first", "last", "mine", "workers"), [(0, 2, (0,), 2), (1, 2, (0,), 1), (1, 1, (0,), 0), (0, 2, (0, 1, 2), 4)]
)
def test_no_more_workers_than_there_are_batches(folder, monkeypatch, first, last, mine, workers):
    made = []
    monkeypatch.setattr("tntprune.data.loading.DataLoader", lambda *args, **options: made.append(options) or iter(()))
    with suppress(ValueError):  # nothing comes of it
        list(full_source(folder, 4).batches(first, last, Share(3, mine)))
    assert [options["num_workers"] for options in made] == [workers]


IMAGES = torch.arange(6.0).reshape(6, 1, 1, 1)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("first", [0, 1, 3, 4, 7])
def test_a_loader_is_gone_through_again_and_again(labelled, first):
    parts = [IMAGES] + [torch.arange(6)] * labelled
    source = LoaderSource(DataLoader(TensorDataset(*parts), batch_size=2))
    assert source.per_epoch == 3
    found = list(source.batches(first, 7))
    assert [x.flatten().tolist() for x, _ in found] == [[[0, 1], [2, 3], [4, 5]][step % 3] for step in range(first, 7)]
    assert all(torch.equal(y, x.flatten().long()) if labelled else y is None for x, y in found)


@pytest.mark.parametrize(
    "item",
    [IMAGES, [IMAGES], (IMAGES,), (IMAGES, torch.arange(6)), [IMAGES, torch.arange(6), "more"]],
    ids=["tensor", "list", "tuple", "pair", "triple"],
)
def test_what_a_loader_may_give(item):
    ((images, labels),) = LoaderSource([item]).batches(0, 1)
    assert images is IMAGES
    assert labels is None or labels is item[1]


@pytest.mark.parametrize("item", [{"image": IMAGES}, [], "images", [[IMAGES]], (None, IMAGES)])
def test_what_a_loader_may_not_give(item):
    refused(lambda: list(LoaderSource([item]).batches(0, 1)), "the loader gives a", "(images, labels)")


def test_loaders_without_a_length_or_without_batches_are_refused():
    refused(lambda: LoaderSource(iter([IMAGES])), "list_iterator has no length")
    refused(lambda: LoaderSource(x for x in [IMAGES]), "generator has no length")
    refused(lambda: LoaderSource(3), "int has no length")
    refused(lambda: LoaderSource([]), "the loader is empty")
    refused(
        lambda: LoaderSource(DataLoader(TensorDataset(IMAGES), batch_size=7, drop_last=True)), "the loader is empty"
    )


class Once:
    """A loader that can be gone through once, like a stream."""

    def __init__(self) -> None:
        self.rest = iter([IMAGES, IMAGES])

    def __len__(self) -> int:
        return 2

    def __iter__(self):
        return self.rest


def test_a_loader_that_runs_dry_is_refused_and_not_waited_for():
    assert len(list(LoaderSource(Once()).batches(0, 2))) == 2
    refused(lambda: list(LoaderSource(Once()).batches(0, 4)), "gave nothing after 2 batches")

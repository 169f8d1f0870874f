from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import ImageNetInfo
from timm.models.vision_transformer import VisionTransformer
from torch.utils.data import DataLoader
from torchvision.transforms.functional import pil_to_tensor

from conftest import SMALL, make
from tntprune.backbones.digits_vit import build
from tntprune.backbones.models import load_model, shape_of
from tntprune.data.augment import AUTHORS, LIGHT
from tntprune.data.folders import all_photos, class_index, labelled_photos
from tntprune.data.images import BadImage
from tntprune.data.loading import Photos, Sent, collate, default_workers
from tntprune.data.photo import Photo
from tntprune.data.transforms import fixed_randomness, input_mode, transform_for
from tntprune.errors import UserError

WORDNET = ImageNetInfo("imagenet-1k").label_names()
IMAGENET = shape_of("test_vit")  # 1000 classes
SEVEN = make("plain")


@pytest.fixture
def folder(tmp_path):
    def fill(*names: str):
        for number, name in enumerate(names):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (number * 20 % 256, 100, 200)).save(path)
        return tmp_path

    return fill


def refused(call, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message


def test_wordnet_folders_get_the_model_class_and_are_not_numbered(folder):
    known = {"n01440764": 0, "n01443537": 1, "n02123045": 281, "n07753592": 954, "n15075141": 999}
    photos = labelled_photos(folder(*(f"{name}/x.png" for name in reversed(known))), IMAGENET)
    assert {photo.path.parent.name: photo.label for photo in photos} == known
    assert [photo.path for photo in photos] == sorted(photo.path for photo in photos)


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 999), min_size=1, max_size=30))
def test_any_subset_of_the_classes_keeps_its_indices(tmp_path_factory, chosen):
    names = sorted(WORDNET[i] for i in chosen)
    assert class_index(names, IMAGENET, tmp_path_factory.getbasetemp()) == {WORDNET[i]: i for i in chosen}


def test_all_thousand_are_a_bijection(tmp_path):
    assert sorted(class_index(sorted(WORDNET), IMAGENET, tmp_path).values()) == list(range(1000))


def test_a_larger_imagenet_has_its_own_indices(tmp_path):
    big = VisionTransformer(**{**SMALL, "embed_dim": 4, "depth": 1, "num_classes": 21843})
    index = class_index(["n01440764", "n02123045"], big, tmp_path)
    names = ImageNetInfo("imagenet-21k-goog").label_names()
    assert {names[i]: i for i in index.values()} == index != {"n01440764": 0, "n02123045": 281}


def test_plain_folders_are_numbered_by_name_where_there_is_one_for_each_class(folder):
    names = ["ant", "bee", "cat", "dog", "eel", "fly", "gnu"]
    photos = labelled_photos(folder(*(f"{name}/sub/{i}.png" for name in names for i in range(2))), SEVEN)
    assert {photo.path.parent.parent.name: photo.label for photo in photos} == dict(zip(names, range(7), strict=True))
    assert Counter(photo.label for photo in photos) == dict.fromkeys(range(7), 2)


@pytest.mark.parametrize("count", [1, 6, 8])
def test_plain_folders_of_another_number_are_refused(folder, count):
    path = folder(*(f"class{i}/x.png" for i in range(count)))
    refused(
        lambda: labelled_photos(path, SEVEN), str(path), "'class0'", f"{count} class folders", "the model has 7 classes"
    )


def test_a_class_folder_without_photos_is_missed(folder):
    path = folder(*(f"class{i}/x.png" for i in range(6)))
    (path / "class6").mkdir()
    refused(lambda: labelled_photos(path, SEVEN), "6 class folders", "the model has 7 classes")


def test_a_folder_of_splits_is_told_from_class_folders(folder):
    path = folder("train/ant/x.png", "val/ant/x.png")
    refused(lambda: labelled_photos(path, SEVEN), "train and val are not class folders", f"expected {path / 'val'}")


def test_an_unknown_class_is_refused_by_name(folder):
    path = folder("n01440764/x.png", "n99999999/x.png", "n02123045/x.png")
    refused(lambda: labelled_photos(path, IMAGENET), "1 of 3 folders", "'n99999999'", "WordNet ids of imagenet-1k")


def test_as_many_folders_as_classes_with_one_of_wordnet_and_the_rest_not_are_refused(tmp_path):
    names = ["n01440764", *(f"class{i}" for i in range(999))]
    refused(lambda: class_index(names, IMAGENET, tmp_path), "999 of 1000 folders")
    plain = [f"class{i:03}" for i in range(1000)]
    assert class_index(plain, IMAGENET, tmp_path) == {name: i for i, name in enumerate(plain)}


def test_a_loose_photo_is_refused(folder):
    path = folder("n01440764/x.png", "loose.png")
    refused(lambda: labelled_photos(path, IMAGENET), f"{path / 'loose.png'}: not in a class folder")


def test_without_labels_photos_may_lie_anywhere(folder):
    photos = all_photos(folder("b/x.png", "a.png"))
    assert [(photo.path.name, photo.label) for photo in photos] == [("a.png", -1), ("x.png", -1)]


def test_missing_and_empty_folders_are_refused(tmp_path):
    refused(lambda: labelled_photos(tmp_path / "missing", IMAGENET), "no such folder")
    refused(lambda: labelled_photos(tmp_path, IMAGENET), "no images in it")
    refused(lambda: all_photos(tmp_path), "no images in it")


def photos_of(path, seed=0, transform=pil_to_tensor, mode="RGB") -> Photos:
    return Photos([Photo(p.path, i) for i, p in enumerate(all_photos(path))], transform, mode, seed)


def test_items_are_the_image_its_label_and_its_place(folder):
    photos = photos_of(folder("a.png", "b.png"))
    assert len(photos) == 2
    image, label, position = photos[1]
    assert (label, position) == (1, 1) and image.shape == (3, 30, 40)
    assert image[:, 0, 0].tolist() == [20, 100, 200]
    assert photos_of(folder("a.png"), mode="L")[0][0].shape == (1, 30, 40)


def test_collate_keeps_what_can_be_read_and_tells_the_rest(folder):
    path = folder("a.png", "b.png", "c.png", "d.png")
    (path / "b.png").write_bytes(b"no image")
    (path / "d.png").write_bytes(b"")
    batch = next(iter(DataLoader(photos_of(path), batch_size=4, collate_fn=collate)))
    assert batch.images.shape == (2, 3, 30, 40)
    assert batch.labels.tolist() == batch.positions.tolist() == [0, 2]
    assert [line.split(": ")[0] for line in batch.bad] == [str(path / "b.png"), str(path / "d.png")]
    assert not any("\n" in line for line in batch.bad)


def test_collate_of_bad_images_alone_is_an_empty_batch():
    batch = collate([BadImage("x: bad"), BadImage("y: bad")])
    assert len(batch.images) == len(batch.labels) == len(batch.positions) == 0
    assert batch.labels.dtype == torch.long and batch.bad == ["x: bad", "y: bad"]


def test_a_bad_image_survives_the_way_out_of_a_worker(folder):
    path = folder("a.png", "b.png")
    (path / "a.png").write_bytes(b"no image")
    batch = next(iter(DataLoader(photos_of(path), batch_size=2, num_workers=1, collate_fn=collate)))
    assert len(batch.images) == 1 and str(path / "a.png") in batch.bad[0]


@pytest.fixture
def noisy(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        Image.fromarray(rng.integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    return tmp_path


def test_items_depend_on_seed_epoch_and_position_alone(noisy):
    augment = transform_for(SEVEN, LIGHT)
    photos = photos_of(noisy, seed=5, transform=augment)
    torch.manual_seed(1)
    random.seed(1)
    first = {key: photos[key][0] for key in ((0, 0), (0, 1), (1, 0), (7, 2))}
    torch.manual_seed(2)
    random.seed(2)
    again = photos_of(noisy, seed=5, transform=augment)
    for key in reversed(first):  # in another order, and from another state of the generators
        assert torch.equal(again[key][0], first[key])
    assert torch.equal(photos[0][0], first[0, 0])  # a position alone is epoch 0
    copies = [photos[0, 0, copy][0] for copy in range(3)]
    assert torch.equal(copies[0], first[0, 0]) and not torch.equal(copies[1], copies[2])
    sent = Sent(photos.photos[1], 1, 1, 0)  # a photo that comes along with its key
    assert torch.equal(photos[sent][0], photos[1, 1][0]) and photos[sent][1:] == photos[1, 1][1:]
    assert not torch.equal(first[0, 0], first[1, 0])
    assert not torch.equal(photos_of(noisy, seed=6, transform=augment)[0, 0][0], first[0, 0])


def test_reading_leaves_the_generators_alone(noisy):
    photos = photos_of(noisy, transform=transform_for(SEVEN, LIGHT))
    before = torch.get_rng_state(), random.getstate()
    assert photos[0][0].shape == (3, 32, 32)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def draws() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(1).item()


def start() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@given(key=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_fixed_randomness_follows_from_the_key_and_is_undone(key):
    start()
    expected = [draws() for _ in range(2)]
    start()
    found = [draws()]
    with fixed_randomness(*key):
        inside = draws()
        with fixed_randomness(*key, 1):
            assert draws() != inside
        then = draws()
    found.append(draws())
    assert found == expected
    with fixed_randomness(*key):
        assert (draws(), draws()) == (inside, then)


def test_fixed_randomness_is_undone_after_an_error():
    start()
    expected = draws()
    start()
    with pytest.raises(KeyError), fixed_randomness(1):
        draws()
        raise KeyError
    assert draws() == expected


def test_keys_are_not_mixed_up():
    with fixed_randomness(1, 23):
        first = draws()
    with fixed_randomness(12, 3):
        assert draws() != first


def test_fixed_randomness_does_not_seed_the_accelerator(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with fixed_randomness(1):
        draws()
    assert seeded == []


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (SEVEN, (3, 32, 32)),
        (make("non_square"), (3, 24, 40)),
        (make("dynamic"), (3, 32, 32)),
        (shape_of("test_vit"), (3, 160, 160)),
        (timm.create_model("test_vit", img_size=96), (3, 96, 96)),
        (shape_of("vit16"), (3, 224, 224)),
    ],
    ids=["small", "non-square", "dynamic", "timm", "timm-96", "vit16"],
)
@pytest.mark.parametrize("augment", [None, LIGHT, replace(AUTHORS, repeats=1)], ids=["none", "light", "authors"])
def test_the_transform_makes_images_of_the_model_own_size(model, size, augment):
    image = transform_for(model, augment)(Image.new("RGB", (300, 200), (255, 0, 0)))
    assert image.shape == size and image.dtype == torch.float32 and image.isfinite().all()


def test_the_transform_has_the_model_mean_and_deviation():
    image = transform_for(shape_of("vit_tiny_patch16_224"))(Image.new("RGB", (300, 200), (255, 0, 127)))
    assert torch.allclose(image[:, 0, 0], torch.tensor([1.0, -1.0, 2 * 127 / 255 - 1]), atol=1e-6)


def test_images_are_grey_for_a_model_of_one_channel():
    assert input_mode(build()) == "L"
    assert input_mode(SEVEN) == input_mode(IMAGENET) == "RGB"
    assert input_mode(torch.nn.Linear(1, 1)) == "RGB"


def test_there_is_always_a_worker(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for processors, workers in ((None, 1), (1, 1), (2, 1), (4, 2), (64, 8)):
        monkeypatch.setattr("os.cpu_count", lambda count=processors: count)
        assert default_workers() == workers
    for together, workers in ((1, 8), (2, 8), (8, 4), (64, 1)):  # processes on this machine
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(together))
        assert default_workers() == workers


@pytest.mark.realdata
def test_the_real_subset_has_the_labels_of_its_names(data):
    photos = labelled_photos(data / "imagenet-val-1300", IMAGENET)
    assert len(photos) == 1300 and len({photo.label for photo in photos}) == 725
    assert all(WORDNET[photo.label] == photo.path.parent.name for photo in photos)
    refused(lambda: labelled_photos(data / "calibration-1000", IMAGENET), "'images'")


@pytest.mark.realdata
def test_real_photos_are_recognised(data):
    model = load_model("vit_tiny_patch16_224", data / "vit_tiny_patch16_224.safetensors")
    found = labelled_photos(data / "calibration-1000" / "images", model)[::50]
    batch = collate([Photos(found, transform_for(model))[i] for i in range(len(found))])
    with torch.inference_mode():
        right = (model(batch.images).argmax(1) == batch.labels).sum().item()
    assert not batch.bad and right >= 0.7 * len(found)  # 88.8 % on all of them

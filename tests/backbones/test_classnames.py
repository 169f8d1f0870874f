"""A model that was trained on somebody's own photos knows the names of its classes."""

from __future__ import annotations

import pytest
import timm
import torch
from PIL import Image

import hf_models
from tntprune.backbones.base import find_backbone
from tntprune.backbones.classnames import class_names, name_classes, saved_names
from tntprune.backbones.models import drop_classifier_, load_model, shape_of
from tntprune.data.folders import class_index, classes_of, labelled_photos
from tntprune.errors import UserError
from tntprune.serialization.checkpoint import save_weights
from tntprune.system.storage import write

NAMES = ["apple", "n01440764", "pear"]


@pytest.fixture
def saved(tmp_path):
    """Weights of a model with three classes of its own."""
    model = timm.create_model("test_vit", num_classes=3)
    name_classes(model, NAMES)
    return save_weights(model, tmp_path / "run")


def test_the_names_are_kept_with_the_weights(saved, tmp_path):
    assert saved_names(saved) == NAMES
    assert class_names(load_model("test_vit", saved)) == NAMES == class_names(shape_of("test_vit", weights=saved))
    assert class_names(timm.create_model("test_vit")) == [] == class_names(torch.nn.Identity())
    other = save_weights(timm.create_model("test_vit", num_classes=3), tmp_path / "other")
    assert saved_names(other) == [] and class_names(load_model("test_vit", other)) == []
    write(tmp_path / "old.pth", b"")
    assert saved_names(tmp_path / "old.pth") == []


def test_some_of_the_classes_keep_their_numbers(saved, tmp_path):
    for name in ("pear", "apple"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "a.png")
    found = labelled_photos(tmp_path / "photos", load_model("test_vit", saved))
    assert {photo.path.parent.name: photo.label for photo in found} == {"apple": 0, "pear": 2}


def test_a_class_that_it_was_not_trained_on_is_refused_and_not_numbered(saved):
    model = load_model("test_vit", saved)
    with pytest.raises(UserError) as caught:
        class_index(["apple", "n01440764", "plum"], model, "photos")
    assert str(caught.value) == (
        "photos: 1 of 3 folders are no class of the model, 'plum' for one; expected some of those that it was trained "
        "on, such as 'apple'"
    )


def test_other_photos_with_as_many_classes_are_numbered_as_before(saved):
    model = load_model("test_vit", saved)
    assert class_index(["a", "b", "c"], model, "photos") == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("vit_base_patch32_clip_224.openai", 0),
        ("vit_pe_core_tiny_patch16_384.fb", 0),
        ("eva02_base_patch16_clip_224.merged2b", 0),
        ("vit_base_patch32_clip_224.laion2b_ft_in12k_in1k", 1000),
        ("vit_tiny_patch16_224", 1000),
    ],
)
def test_a_projection_of_clip_is_no_classifier(name, classes):
    with torch.device("meta"):
        model = timm.create_model(name)
        assert find_backbone(model).classes(model) == classes_of(model) == classes
        head = model.head
        assert (drop_classifier_(model).head is head) == (classes == 0)
        assert find_backbone(model).classes(model) == 0
        if classes == 0:
            model.reset_classifier(10)
            assert find_backbone(model).classes(model) == classes_of(model) == 10


def test_of_a_classifier_of_transformers_the_encoder_is_left():
    assert find_backbone(drop_classifier_(hf_models.make("vit_classifier"))).names == ["ViT"]

"""`tntprune.evaluate`: what it takes, and what it gives of models with and without classes."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch.utils.data import DataLoader, TensorDataset

import hf_models
import tntprune
from conftest import SMALL, make, photos_for
from hf_models import transformers
from tntprune import TNT, AViT, Random, UserError, embed, evaluate, reduce_
from tntprune.analysis.retrieval import search
from tntprune.backbones.attach import base_of
from tntprune.backbones.base import find_backbone
from tntprune.cli.main import main
from tntprune.data.folders import labelled_photos
from tntprune.data.transforms import transform_for
from tntprune.sweep.sweep_photos import Listing

COUNT = 12
LABELS = torch.arange(COUNT) % 7
QUIET = {"progress": False}


def described(model):
    model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    return model


def headless(config=None):
    torch.manual_seed(0)
    model = described(VisionTransformer(**{**SMALL, "num_classes": 0}).eval())
    return model if config is None else reduce_(model, config)


def classifier(config=None):
    model = described(make("plain"))
    return model if config is None else reduce_(model, config)


@pytest.fixture
def flat(tmp_path):
    """Photos without labels, all in one folder."""
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 40, 48, 3), dtype=np.uint8)
    folder = tmp_path / "flat"
    folder.mkdir()
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(folder / f"{number:02}.png")
    return folder


@pytest.fixture
def classes(flat, tmp_path):
    """The same photos in a folder for each of seven classes."""
    folder = tmp_path / "classes"
    for number, path in enumerate(sorted(flat.iterdir())):
        place = folder / f"class{number % 7}"
        place.mkdir(parents=True, exist_ok=True)
        (place / path.name).write_bytes(path.read_bytes())
    return folder


def cosine(model, images):
    """By hand, image by image."""
    backbone = find_backbone(model)
    with torch.no_grad():
        found = [
            F.cosine_similarity(backbone.answer(model, one).logits, backbone.answer(base_of(model), one).logits).item()
            for one in images.split(1)
        ]
    return sum(found) / len(found)


# What it takes


def test_every_kind_of_data_gives_the_same_figures(classes):
    model = classifier(Random(at=2, keep=0.3))
    photos = labelled_photos(classes, model)
    transform = transform_for(model)
    images = torch.stack([transform(photo.read("RGB")) for photo in photos])
    labels = torch.tensor([photo.label for photo in photos])
    pairs = TensorDataset(images, labels)
    expected = evaluate(model, str(classes), workers=0, **QUIET)
    assert expected.images == COUNT and expected.agreement < 100 and expected.top1 is not None
    for data, more in (
        (classes, {"workers": 1}),
        (photos, {"workers": 0}),
        (images, {"labels": labels}),
        ((images, labels), {}),
        ((images.double(), labels), {}),
        (pairs, {"batch_size": 5}),
        (DataLoader(pairs, batch_size=7), {}),
        ([{"pixel_values": images, "labels": labels}], {}),
    ):
        found = evaluate(model, data, **more, **QUIET)
        for name in ("images", "top1", "top5", "agreement", "macs", "tokens", "cosine"):
            assert getattr(found, name) == getattr(expected, name), (type(data), name)


def test_it_is_public_and_gives_a_frozen_dataclass():
    assert tntprune.evaluate is evaluate and callable(tntprune.evaluate) and "evaluate" in tntprune.__all__
    found = evaluate(classifier(), photos_for(classifier(), 4), **QUIET)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.images = 5


def test_without_labels_a_classifier_gives_agreement_alone(flat):
    model = classifier(Random(at=2, keep=0.3))
    found = evaluate(model, flat, workers=0, compare=True, **QUIET)
    assert (found.top1, found.top5, found.cosine, found.images) == (None, None, None, COUNT)
    assert 0 <= found.agreement <= 100
    told = json.loads(json.dumps(found.to_dict()))
    assert list(told) == ["images", "skipped", "agreement", "macs", "images_per_s", "tokens", "base", "speedup"]
    assert list(told["base"]) == ["macs", "images_per_s"]


@pytest.mark.parametrize("config", [Random(at=2, keep=0.3), TNT(at=2, keep=0.3)])
def test_without_classes_it_gives_the_mean_cosine(flat, classes, config):
    model = headless(config)
    images = torch.stack([transform_for(model)(Image.open(path)) for path in sorted(flat.iterdir())])
    expected = cosine(model, images)
    assert expected < 0.9999
    for data in (flat, classes, images, DataLoader(TensorDataset(images, LABELS), batch_size=5)):
        found = evaluate(model, data, batch_size=5, **QUIET)
        assert found.cosine == pytest.approx(expected, abs=1e-5)
        assert (found.top1, found.agreement, found.images) == (None, None, COUNT)
    assert evaluate(headless(), flat, **QUIET).cosine == 1
    assert evaluate(headless(Random(at=2, keep=1.0)), flat, **QUIET).cosine == pytest.approx(1, abs=1e-12)


def test_without_classes_it_searches_among_the_images(flat, classes):
    model = headless(Random(at=2, keep=0.3))
    photos = sorted(classes.glob("*/*.png"))
    images = torch.stack([transform_for(model)(Image.open(path)) for path in photos])
    labels = torch.tensor([int(path.parent.name[-1]) for path in photos])
    expected = search(embed(model, images, **QUIET), embed(base_of(model), images, **QUIET), labels)
    assert 0 < expected.recall5 < 100 and expected.knn is not None and expected.recall10 is not None
    for data, more in ((classes, {"workers": 0}), (images, {"labels": labels}), ([(images, labels)], {})):
        found = evaluate(model, data, batch_size=5, **more, **QUIET)
        assert [getattr(found, name) for name in expected._fields] == list(expected), type(data)
        assert found.top1 is None and list(found.to_dict())[2:8] == ["cosine", *expected._fields]
    unlabelled = evaluate(model, flat, workers=0, **QUIET)
    assert unlabelled.recall5 is not None and unlabelled.knn is unlabelled.knn_unpruned is None
    plain = evaluate(headless(), classes, workers=0, **QUIET)
    assert (plain.recall1, plain.recall10) == (100, 100) and plain.knn == plain.knn_unpruned == expected.knn_unpruned
    few = evaluate(model, images[:4], **QUIET)
    assert few.recall1 is not None and few.recall5 is few.recall10 is None


def test_a_model_with_variable_counts_and_no_classes():
    model = headless(AViT())
    with pytest.warns(UserWarning, match="never calibrated"):
        found = evaluate(model, photos_for(model, 4), **QUIET)
    assert -1 <= found.cosine <= 1 and len(found.tokens) == SMALL["depth"]


@pytest.mark.parametrize("kind", ["vit_classifier", "deit_teacher", "clip", "clip_vision", "siglip", "dinov2"])
def test_models_of_transformers(kind):
    model, images = reduce_(hf_models.make(kind), Random(at=2, keep=0.3)), hf_models.photos_for(kind, COUNT)
    if kind in hf_models.CLASSIFIERS:
        found = evaluate(model, images, LABELS, **QUIET)
        logits = hf_models.run(model, images)
        base = hf_models.run(base_of(model), images)
        assert found.top1 == pytest.approx(100 * (logits.argmax(1) == LABELS).float().mean().item(), abs=1e-4)
        same = (logits.argmax(1) == base.argmax(1)).float().mean().item()
        assert found.agreement == pytest.approx(100 * same, abs=1e-4)
    else:
        found = evaluate(model, images, **QUIET)
        assert found.cosine == pytest.approx(cosine(model, images), abs=1e-5) and found.agreement is None


# Photos and the image processor of transformers


@pytest.fixture
def clip(tmp_path):
    """A CLIP in a folder, with a processor of its own."""
    folder = tmp_path / "clip"
    hf_models.make("clip").save_pretrained(folder)
    transformers.CLIPImageProcessor(
        size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3],
        image_std=[0.4, 0.5, 0.6], resample=2,
    ).save_pretrained(folder)  # fmt: skip
    return transformers.CLIPModel.from_pretrained(folder).eval()


def test_photos_are_prepared_by_the_models_own_processor(clip, flat):
    processor = transformers.AutoImageProcessor.from_pretrained(clip.name_or_path)
    images = [Image.open(path) for path in sorted(flat.iterdir())]
    expected = processor(images=images, return_tensors="pt")["pixel_values"]
    own = torch.stack([transform_for(clip)(image) for image in images])
    assert own.shape == (COUNT, 3, 32, 32) and torch.equal(own, expected)
    reduce_(clip, Random(at=2, keep=0.3))
    found = evaluate(clip, flat, workers=1, **QUIET)
    assert found.cosine == pytest.approx(evaluate(clip, expected, **QUIET).cosine, abs=1e-6)


def test_clip_learns_from_a_folder_of_photos(clip, flat):
    reduce_(clip, TNT(at=2, keep=0.5))
    before = {name: value.clone() for name, value in clip.vision_model.reduction.state_dict().items()}
    tntprune.calibrate_(clip, flat, epochs=2, batch_size=4, workers=1, progress=False)
    after = clip.vision_model.reduction.state_dict()
    assert not torch.equal(before["scorers.2.layers.0.weight"], after["scorers.2.layers.0.weight"])


def test_training_pictures_are_normalised_as_the_processor_does(clip, flat):
    from tntprune.data.augment import LIGHT
    from tntprune.data.processor import Processor

    made = Processor(clip).pixels()
    assert made["input_size"] == (3, 32, 32) and made["interpolation"] == "bilinear"
    assert made["mean"] == pytest.approx((0.1, 0.2, 0.3), abs=1e-5)
    assert made["std"] == pytest.approx((0.4, 0.5, 0.6), abs=1e-5)
    white = transform_for(clip, LIGHT)(Image.new("RGB", (50, 40), "white"))
    assert white.shape == (3, 32, 32)
    torch.testing.assert_close(white[:, 3, 4], torch.tensor([2.25, 1.6, 0.7 / 0.6]), atol=1e-4, rtol=1e-4)


def test_a_processor_that_is_missing_or_does_not_fit_is_told_in_a_line(clip, flat, tmp_path):
    with pytest.raises(UserError, match="was not made by from_pretrained") as caught:
        evaluate(hf_models.make("clip"), flat, **QUIET)
    assert "\n" not in str(caught.value)
    transformers.CLIPImageProcessor().save_pretrained(clip.name_or_path)  # of 224 x 224
    with pytest.raises(UserError, match="its image processor makes images of 224 x 224: CLIPModel takes 32 x 32"):
        evaluate(clip, flat, **QUIET)
    hf_models.make("clip_vision").save_pretrained(tmp_path / "bare")
    bare = transformers.CLIPVisionModel.from_pretrained(tmp_path / "bare").eval()
    with pytest.raises(UserError, match="its image processor cannot be loaded") as caught:
        evaluate(bare, flat, **QUIET)
    assert "\n" not in str(caught.value)


def test_class_folders_of_a_model_of_transformers_are_its_labels(classes, tmp_path):
    model = hf_models.make("dinov2_classifier")
    model.config.id2label = {number: f"class{6 - number}" for number in range(7)}
    model.save_pretrained(tmp_path / "m")
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessor(size=size).save_pretrained(tmp_path / "m")
    again = transformers.Dinov2ForImageClassification.from_pretrained(tmp_path / "m").eval()
    labels = {photo.path.parent.name: photo.label for photo in labelled_photos(classes, again)}
    assert labels == {f"class{6 - number}": number for number in range(7)}
    assert evaluate(again, classes, workers=0, **QUIET).top1 is not None


# What it refuses


@pytest.mark.parametrize(
    ("data", "more", "told"),
    [
        (torch.zeros(4, 3, 32, 32), {"labels": torch.tensor([0, 1])}, r"labels of shape \(2,\) for 4 images"),
        (torch.zeros(2, 3, 32, 32), {"labels": torch.tensor([0, 9])}, "classes from 0 to 6"),
        (torch.zeros(2, 3, 64, 64), {}, "images of 64 x 64"),
        (torch.zeros(0, 3, 32, 32), {}, "one image or more"),
        ([torch.zeros(2, 3, 32, 32)], {"labels": torch.tensor([0, 1])}, "labels go with a tensor of images"),
        (torch.zeros(2, 3, 32, 32), {"limit": 1}, "limit=1 with Tensor"),
        (torch.zeros(2, 3, 32, 32), {"batch_size": 0}, "batch_size=0"),
        ([], {}, "no image could be read"),
        (5, {}, "int given; expected a folder"),
        ("nowhere", {}, "nowhere: no such folder"),
        (["a", "b"], {}, "the loader gives a str"),
    ],
)
def test_data_that_cannot_be_used_is_told_in_a_line(data, more, told):
    with pytest.raises(UserError, match=told) as caught:
        evaluate(classifier(), data, **more, **QUIET)
    assert "\n" not in str(caught.value)


def test_a_model_in_training_mode_and_labels_below_0_are_refused():
    with pytest.raises(UserError, match="training mode"):
        evaluate(classifier().train(), photos_for(classifier()), **QUIET)
    with pytest.raises(UserError, match=r"from -1 to 1, for 2 images; expected \(2,\), whole numbers from 0"):
        evaluate(headless(), photos_for(headless(), 2), torch.tensor([-1, 1]), **QUIET)
    with pytest.raises(UserError, match="not one vector per image"):
        evaluate(VisionTransformer(**{**SMALL, "global_pool": ""}).eval(), torch.zeros(2, 3, 32, 32), **QUIET)


def test_photos_in_the_folder_and_in_class_folders_are_refused(classes):
    first = next(classes.glob("*/*.png"))
    (classes / "loose.png").write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=r"loose\.png: not in a class folder"):
        evaluate(classifier(), classes, **QUIET)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("config", [None, Random(at=2, keep=0.5)])
def test_outputs_that_are_not_finite_do_not_count(config, value):
    for model in (classifier(config), headless(config)):
        model.norm.bias.data[3] = value
        with pytest.raises(UserError, match="the unpruned model's outputs for 4 of 4 images are NaN or infinite"):
            evaluate(model, photos_for(model, 4), **QUIET)


def test_one_image_that_is_not_finite_does_not_count():
    images = photos_for(classifier(), 4)
    images[2, 0, 0, 0] = math.nan
    with pytest.raises(UserError, match="outputs for 1 of 4 images"):
        evaluate(classifier(), images, **QUIET)


def test_minus_infinity_is_how_a_class_is_left_out():
    model = classifier()
    model.head.bias.data[3] = -math.inf
    assert evaluate(model, photos_for(model, 4), LABELS[:4], **QUIET).images == 4


# Limit


def test_limit_takes_the_photos_that_sweep_takes(classes, flat):
    model = classifier(Random(at=2, keep=0.3))
    listing = Listing(classes, model, 5)
    photos = listing.photos(model)
    found = evaluate(model, classes, limit=5, workers=0, **QUIET)
    expected = evaluate(model, photos, workers=0, **QUIET)
    assert (found.images, found.top1, found.agreement) == (5, expected.top1, expected.agreement)
    assert evaluate(model, flat, limit=100, workers=0, **QUIET).images == COUNT


# The command


@pytest.fixture
def known(monkeypatch):
    """The command's models are small ones of ours."""
    models = {"digits_vit": classifier, "vit16": headless}
    monkeypatch.setattr("tntprune.backbones.models.load_model", lambda name, *rest: models[name]())


def test_the_command_on_photos_without_labels(known, flat, capsys):
    given = ["eval", "digits_vit", "--data", str(flat), "--method", "random", "--at", "2", "--keep", "0.3"]
    assert main([*given, "--workers", "0"]) == 0
    out = capsys.readouterr().out
    assert "agrees with the unpruned model on" in out and "top-1" not in out and "nan" not in out
    assert main([*given, "--workers", "0", "--json", "--limit", "5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images"] == 5 and "top1" not in told and "cosine" not in told


def test_the_command_on_a_model_without_classes(known, flat, classes, capsys):
    for folder in (flat, classes):
        given = ["eval", "vit16", "--data", str(folder), "--method", "random", "--at", "2", "--keep", "0.3"]
        assert main([*given, "--workers", "0", "--compare"]) == 0
        out = capsys.readouterr().out
        assert "mean cosine of the embeddings to the unpruned model's: 0." in out and "agrees" not in out
        assert re.search(r"neighbours: [\d.]+ % at 1, [\d.]+ % at 5, [\d.]+ % at 10\n", out)
        assert ("label by the vote of 10 nearest neighbours: " in out) == (folder == classes)
        assert main([*given, "--workers", "0", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["cosine"] < 1


def test_limit_has_to_be_a_number_above_0(capsys):
    assert main(["eval", "digits_vit", "--data", "x", "--limit", "0"]) == 2
    assert "limit=0" in capsys.readouterr().err


def test_timms_own_headless_models():
    model = timm.create_model("test_vit", num_classes=0, img_size=32).eval()
    assert evaluate(reduce_(model, Random(at=2, keep=0.5)), torch.randn(3, 3, 32, 32), **QUIET).cosine < 1

"""`tntprune.embed`: the model's own output, in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch.utils.data import DataLoader, TensorDataset

import hf_models
import tntprune
from conftest import SMALL, make
from tntprune import ToMe, UsageError, UserError, embed, reduce_
from tntprune.backbones.base import find_backbone
from tntprune.data.transforms import transform_for

QUIET = {"progress": False}


def headless(**more):
    torch.manual_seed(0)
    model = VisionTransformer(**{**SMALL, "num_classes": 0, **more}).eval()
    model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    return model


@pytest.fixture
def folder(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 40, 48, 3), dtype=np.uint8)
    for name, picture in zip(("b/2", "a", "b/1", "c", "10"), pixels):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "photos" / f"{name}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize("reduced", [False, True])
def test_it_gives_what_the_model_gives(folder, reduced):
    model = reduce_(headless(), ToMe(at=2, keep=0.5)) if reduced else headless()
    names = ("10.png", "a.png", "b/1.png", "b/2.png", "c.png")
    images = torch.stack([transform_for(model)(Image.open(folder / name)) for name in names])
    with torch.no_grad():
        expected = model(images)
    loader = DataLoader(TensorDataset(images, torch.arange(5)), batch_size=2)
    for data in (str(folder), folder, images, images.double(), TensorDataset(images), loader):
        found = embed(model, data, batch_size=2, workers=0, **QUIET)
        assert (found.dtype, found.device.type, found.requires_grad) == (torch.float32, "cpu", False)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_towers_of_transformers():
    model = reduce_(hf_models.make("clip"), ToMe(at=2, keep=0.5))
    images = hf_models.photos_for("clip", 3)
    with torch.no_grad():
        expected = find_backbone(model).answer(model, images).logits
    torch.testing.assert_close(embed(model, images, **QUIET), expected, atol=1e-5, rtol=1e-4)


def test_half_precision_comes_as_fp32():
    found = embed(headless().bfloat16(), torch.randn(2, 3, 32, 32), **QUIET)
    assert found.dtype == torch.float32 and tntprune.embed is embed


@pytest.mark.parametrize(
    ("model", "data", "told"),
    [
        (lambda: make("plain"), torch.zeros(2, 3, 32, 32), "has 7 classes and gives logits; expected a model that"),
        (lambda: headless().train(), torch.zeros(2, 3, 32, 32), "training mode"),
        (lambda: headless(global_pool=""), torch.zeros(2, 3, 32, 32), r"gives \(2, 65, 32\), and not one vector"),
        (headless, torch.full((2, 3, 32, 32), torch.nan), "2 of 2 embeddings are NaN or infinite"),
        (headless, torch.zeros(2, 3, 64, 64), "images of 64 x 64"),
        (headless, [], "no images given"),
        (headless, "nowhere", "nowhere: no such folder"),
        (headless, 5, "int given"),
    ],
)
def test_what_cannot_be_embedded_is_told_in_a_line(model, data, told):
    with pytest.raises(UserError, match=told) as caught:
        embed(model(), data, **QUIET)
    assert "\n" not in str(caught.value)


def test_numbers_out_of_range(folder):
    for options in ({"batch_size": 0}, {"workers": -1}):
        with pytest.raises(UsageError, match=next(iter(options))):
            embed(headless(), folder, **options, **QUIET)


def test_a_photo_that_cannot_be_read_is_named(folder):
    (folder / "b" / "1.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"b/1\.png: not an image"):
        embed(headless(), folder, workers=0, **QUIET)

"""Models without classes learn to keep their embedding; all models refuse images that they do not take."""

from __future__ import annotations

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch.utils.data import DataLoader

import hf_models
import tntprune
from conftest import SMALL, make, photos_for
from tntprune import TNT, DynamicViT, UserError, calibrate_, reduce_
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.data.batches import TensorSource
from tntprune.training.calibrate import fit
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer

HEADLESS = {**SMALL, "num_classes": 0}
TIMM = {
    "dinov2": lambda: VisionTransformer(**HEADLESS, init_values=0.1),
    "dinov3": lambda: Eva(
        **HEADLESS, use_rot_pos_emb=True, rope_type="dinov3", rope_rotate_half=True, use_abs_pos_emb=False,
        num_reg_tokens=4, global_pool="avg", qkv_bias=False, init_values=0.1, dynamic_img_size=True,
    ),
    "siglip": lambda: VisionTransformer(**HEADLESS, class_token=False, global_pool="map"),
    "by name": lambda: timm.create_model("test_vit", num_classes=0, img_size=32),
}  # fmt: skip
HF = ("clip_vision", "clip_projection", "clip", "siglip_vision", "siglip_no_head", "vit", "dinov2")


def built(kind):
    torch.manual_seed(0)
    return TIMM[kind]().eval() if kind in TIMM else hf_models.make(kind)


def pictures(count, size=32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3))


def learned(model):
    return {name: value.detach().clone() for name, value in reduction_of(model).named_parameters()}


@pytest.mark.parametrize("kind", [*TIMM, *HF])
def test_the_loss_is_one_minus_the_cosine_of_the_embeddings(kind):
    model = reduce_(built(kind), TNT(at=2, keep=0.3))
    trainer = Trainer(model, Training(batch_size=4), 10)
    images = pictures(4)
    reduction_of(model).eval()  # tokens really go, so that it can be computed by hand
    loss = trainer.loss(images, None)
    with torch.no_grad():
        own = trainer.backbone.answer(model, images).logits
        teacher = trainer.backbone.answer(base_of(model), images).logits
    assert own.ndim == 2
    expected = 1 - torch.stack([F.cosine_similarity(a, b, dim=0) for a, b in zip(own, teacher)]).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5) and loss.item() > 1e-4


@pytest.mark.parametrize("kind", [*TIMM, *HF])
def test_scorers_learn_and_the_model_stays(kind):
    model = reduce_(built(kind), TNT(at=2, keep=0.5))
    before = learned(model)
    base = {name: value.clone() for name, value in base_of(model).state_dict().items()}
    calibrate_(model, pictures(4), epochs=2, batch_size=2, progress=False)
    after = learned(model)
    weights = [name for name in before if name.startswith("scorers") and name.endswith("weight")]
    assert weights and all(not torch.equal(before[name], after[name]) for name in weights)
    assert all(torch.equal(base[name], value) for name, value in base_of(model).state_dict().items())


def test_training_brings_the_embedding_nearer():
    torch.manual_seed(0)
    model = reduce_(VisionTransformer(**HEADLESS).eval(), TNT(at=2, keep=0.3, recipe="relative", noise_blocks=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    images, losses = pictures(16), []
    fit(
        model, TensorSource(images, None, 16, 0), Training(epochs=60, batch_size=16, lr=0.05),
        after=lambda step, loss, trainer: losses.append(loss), progress=False,
    )  # fmt: skip
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_a_method_trained_with_labels_is_refused_without_classes():
    model = reduce_(built("dinov2"), DynamicViT(at=2, keep=0.5))
    with pytest.raises(UserError, match="tells no classes apart"):
        calibrate_(model, pictures(4), progress=False)


def test_the_whole_model_learns_too_and_is_fine_tuned():
    model = reduce_(built("dinov2"), TNT(at=2, keep=0.5))
    before = base_of(model).blocks[0].attn.qkv.weight.clone()
    calibrate_(model, pictures(4), epochs=1, batch_size=2, backbone_lr=1e-3, progress=False)
    assert not torch.equal(before, base_of(model).blocks[0].attn.qkv.weight)
    calibrate_(model, pictures(4), epochs=1, batch_size=2, unfreeze="norms", progress=False)


# Images that a model does not take are refused before anything is learned


@pytest.mark.parametrize("as_loader", [False, True])
@pytest.mark.parametrize("kind", ["clip", "clip_vision", "siglip", "vit", "vit_classifier", "plain"])
def test_images_of_a_size_that_the_forward_pass_refuses(kind, as_loader):
    model = make(kind) if kind == "plain" else hf_models.make(kind)
    reduce_(model, TNT(at=2, keep=0.5))
    before, images = learned(model), pictures(4, 64)
    with pytest.raises(UserError, match=r"images of 64 x 64: .*takes (32 x 32|24 x 40); expected that size"):
        calibrate_(model, [images] if as_loader else images, progress=False)
    assert all(torch.equal(before[name], value) for name, value in learned(model).items())
    assert not reduction_of(model).calibrated


def test_a_model_that_takes_any_size_learns_from_it():
    model = reduce_(hf_models.make("dinov2"), TNT(at=2, keep=0.5))
    calibrate_(model, pictures(4, 64), epochs=1, batch_size=2, progress=False)
    with pytest.raises(UserError, match="smaller than one patch"):
        calibrate_(model, pictures(4, 2), epochs=1, batch_size=2, progress=False)


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (torch.zeros(0, 3, 32, 32), r"shape \(0, 3, 32, 32\); expected \(batch, 3, height, width\)"),
        (torch.zeros(4, 1, 32, 32), r"shape \(4, 1, 32, 32\); expected \(batch, 3"),
        (torch.zeros(3, 32, 32), r"shape \(3, 32, 32\)"),
        (torch.zeros(4, 3, 32, 32, dtype=torch.uint8), "images of torch.uint8; expected floating-point"),
    ],
)
def test_batches_that_are_no_images(images, told):
    model = reduce_(make("plain"), TNT(at=2, keep=0.5))
    with pytest.raises(UserError, match=told):
        calibrate_(model, [images], progress=False)


# What is not finite


def values(model):
    return torch.cat([value.flatten() for value in learned(model).values()])


@pytest.mark.parametrize("backbone_lr", [0.0, 1e-4])
@pytest.mark.parametrize("as_loader", [False, True])
def test_one_nan_among_the_images_is_named_and_nothing_is_lost(as_loader, backbone_lr, tmp_path):
    model = reduce_(make("plain"), TNT(at=2, keep=0.5))
    images = photos_for(model, 32)
    images[17, 1, 5, 6] = math.nan
    before = values(model)
    data = DataLoader(images, batch_size=8) if as_loader else images
    with pytest.raises(UserError, match=r"step [12345]: .*: 1 of (8|16) images hold NaN or infinity") as caught:
        calibrate_(model, data, progress=False, backbone_lr=backbone_lr)
    assert "--lr" not in str(caught.value) and "\n" not in str(caught.value)
    assert torch.equal(values(model), before)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    with pytest.warns(tntprune.errors.UserNote):
        tntprune.save(model, tmp_path)
    tntprune.load_(make("plain"), tmp_path)


def test_weights_that_give_nan_are_named():
    model = make("plain")
    model.blocks[4].mlp.fc1.weight.data[0, 0] = math.inf
    reduce_(model, TNT(at=2, keep=0.5))
    with pytest.raises(UserError, match="nor are the unpruned model's own answers"):
        calibrate_(model, photos_for(model, 4), progress=False)


def test_a_rate_that_is_too_large_is_named_and_the_scorers_are_as_before():
    model = reduce_(make("plain"), TNT(at=2, keep=0.5))
    before = values(model)
    with pytest.raises(UserError, match=r"step \d+: the loss or a gradient is not finite; try a smaller lr \(--lr\)"):
        calibrate_(model, photos_for(model, 8), lr=1000, epochs=50, batch_size=2, progress=False)
    assert torch.equal(values(model), before)


def test_values_that_are_not_finite_are_not_saved(tmp_path):
    model = reduce_(make("plain"), TNT(at=2, keep=0.5))
    reduction_of(model).scorers["2"].layers[0].weight.data[0, 0] = math.nan
    with pytest.raises(UserError, match="holds NaN or infinity"):
        tntprune.save(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    plain = make("plain")
    plain.norm.weight.data[0] = math.inf
    with pytest.raises(UserError, match=r"norm\.weight holds NaN or infinity"):
        tntprune.serialization.checkpoint.save_weights(plain, tmp_path / "run")


# Under torch.inference_mode


def test_what_was_reduced_under_inference_mode_learns():
    model = make("plain")
    with torch.inference_mode():
        reduce_(model, TNT(at=2, keep=0.5))
        images = photos_for(model, 4) + 0
    before = values(model)
    assert images.is_inference()
    calibrate_(model, images, epochs=1, batch_size=2, progress=False)
    calibrate_(model, [images], epochs=1, batch_size=2, backbone_lr=1e-4, progress=False)
    assert not torch.equal(values(model), before)


def test_a_model_that_was_made_under_inference_mode_is_refused():
    with torch.inference_mode():
        model = make("plain")
    reduce_(model, TNT(at=2, keep=0.5))
    with pytest.raises(UserError, match=r"made under torch\.inference_mode"):
        calibrate_(model, photos_for(model, 4), progress=False)

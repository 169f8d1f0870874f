"""ViT and DeiT: the same as timm's model of the same weights; heads; pipelines."""

from __future__ import annotations

import pytest
import torch
from test_hf import CONFIGS

import tntprune
from configs import stirred
from conftest import make as make_timm
from hf_models import from_timm, make, photos_for, run, transformers
from tntprune import TNT, Random, ToMe
from tntprune.backbones.attach import reduction_of
from tntprune.methods.learned import inherit
from tntprune.reduce import reduce_


@pytest.mark.parametrize("name", [*CONFIGS, "topk", "zerotprune", "avit", "evovit"])
def test_the_same_as_timms_model_of_the_same_weights(name):
    """Two adapters written for two libraries, one answer: the same patches, the same logits."""
    others = {
        "topk": tntprune.TopK(at=2, keep=0.5), "zerotprune": tntprune.ZeroTPrune(at=(1, 3), keep=0.8, similar=4),
        "avit": tntprune.AViT(gate_center=5.0), "evovit": tntprune.EvoViT(at=(2, 4), keep=0.5),
    }  # fmt: skip
    config = CONFIGS.get(name) or others[name]
    ours = make_timm("plain")
    theirs = from_timm(ours)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    stirred(ours, config)
    reduce_(theirs, config)
    inherit(reduction_of(theirs), reduction_of(ours).state_dict())
    with torch.inference_mode(), tntprune.record(ours) as first, tntprune.record(theirs) as second:
        torch.testing.assert_close(theirs(images).logits, ours(images), atol=1e-5, rtol=1e-4)
    assert first.kept.keys() == second.kept.keys()
    assert all(torch.equal(first.kept[block], second.kept[block]) for block in first.kept)
    assert tntprune.macs(theirs) == tntprune.macs(ours)


def test_a_distilled_models_two_heads():
    model, images = reduce_(make("deit_teacher"), Random(at=2, keep=0.5)), photos_for("deit_teacher")
    with torch.inference_mode():
        out = model(images)
    torch.testing.assert_close(out.logits, (out.cls_logits + out.distillation_logits) / 2)
    assert not torch.equal(out.cls_logits, out.distillation_logits)
    answer = tntprune.backbones.base.find_backbone(model).answer(model, images)
    torch.testing.assert_close(answer.ce_logits, out.cls_logits)
    torch.testing.assert_close(answer.logits, out.logits)


def test_the_pipeline_that_classifies_images(caplog):
    from PIL import Image

    model = make("deit_classifier")
    pipe = transformers.pipeline(
        "image-classification",
        model=reduce_(model, TNT(at=2, keep=0.5)),
        image_processor=transformers.ViTImageProcessor(size={"height": 32, "width": 32}),
    )
    assert "not supported" not in caplog.text
    found = pipe(Image.new("RGB", (50, 40), "red"), top_k=7)
    assert sorted(one["label"] for one in found) == [f"LABEL_{i}" for i in range(7)]


def test_the_full_grid():
    model, images = make("vit_classifier"), photos_for("vit_classifier")
    whole = tntprune.features(model, images)
    reduce_(model, Random(at=2, keep=1.0))
    assert torch.equal(tntprune.features(model, images), whole) and whole.shape == (3, 32, 6, 10)
    reduce_(model, ToMe(r=5))
    assert tntprune.features(model, images).shape == whole.shape


def test_training_on_images_of_a_size_that_the_forward_pass_refuses():
    model = reduce_(make("deit_classifier"), TNT(at=2, keep=0.5))
    with pytest.raises(tntprune.UserError, match="images of 24 x 44: DeiTForImageClassification takes 32 x 32"):
        tntprune.calibrate_(model, photos_for("deit_classifier", 4, (24, 44)), epochs=1, batch_size=2, progress=False)
    with pytest.raises(ValueError, match="doesn't match model"):  # as transformers has it, unless one says otherwise
        run(model, photos_for("deit_classifier", 2, (24, 44)))

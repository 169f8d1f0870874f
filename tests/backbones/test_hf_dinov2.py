"""DINOv2: the classifier's mean, register tokens, and maps for dense heads."""

from __future__ import annotations

import pytest
import torch

from hf_models import DINO, call, make, photos_for, transformers
from tntprune import TNT, Random, ToMe
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.base import tower_of
from tntprune.reduce import reduce_, restore_


@pytest.mark.parametrize("kind", ["dinov2_classifier", "registers_classifier"])
def test_the_classifier_reads_cls_and_the_mean_of_patches_by_size(kind):
    model, images = reduce_(make(kind), ToMe(r=9)), photos_for(kind)
    prefix = 4 if kind == "registers_classifier" else 1
    assert reduction_of(model).layout.prefix == prefix
    with torch.inference_mode():
        tokens, _ = tower_of(model).outputs(images)
        assert tokens.x.shape[1] == prefix + 64 - 4 * 9 and float(tokens.size.max()) > 1
        rows = []
        for x, size in zip(tokens.x, tokens.size):
            mean = sum(token * s for token, s in zip(x[prefix:], size)) / 64
            rows.append(model.classifier(torch.cat([x[0], mean])))
        torch.testing.assert_close(model(images).logits, torch.stack(rows), atol=1e-5, rtol=1e-4)


def test_a_backbone_gives_the_hidden_states_that_are_asked_for():
    model, images = reduce_(make("dinov2_backbone"), ToMe(r=5)), photos_for("dinov2_backbone")
    with torch.inference_mode():
        states = model(images, output_hidden_states=[2, -1]).hidden_states
    assert [state is not None for state in states] == [False, False, True, False, True]


@pytest.mark.parametrize("settings", [{}, {"apply_layernorm": False}, {"reshape_hidden_states": False}])
@pytest.mark.parametrize("registers", [False, True])
def test_a_backbone_gives_full_maps(registers, settings):
    config, build = transformers.Dinov2Config, transformers.Dinov2Backbone
    if registers:
        config, build = transformers.Dinov2WithRegistersConfig, transformers.Dinov2WithRegistersBackbone
    torch.manual_seed(0)
    model = build(config(**DINO, out_features=["stem", "stage2", "stage4"], **settings)).eval()
    images = photos_for("dinov2", size=(24, 48))
    with torch.inference_mode():
        before = model(images)
        reduce_(model, Random(at=2, keep=1.0))
        same = model(images, output_hidden_states=True)
        assert type(same) is type(before) and len(same.hidden_states) == 5
        assert all(torch.equal(a, b) for a, b in zip(same.feature_maps, before.feature_maps, strict=True))
        reduce_(model, TNT(at=2, keep=0.5))
        after = model(images)
        assert [x.shape for x in after.feature_maps] == [x.shape for x in before.feature_maps]
        # what stage 2 computed was whole: tokens go after it
        assert all(torch.equal(a, b) for a, b in zip(after.feature_maps[:2], before.feature_maps[:2], strict=True))
        assert not torch.equal(after.feature_maps[2], before.feature_maps[2])
        if settings.get("reshape_hidden_states", True):
            last = call(model, images, output_hidden_states=True).hidden_states[-1]
            prefix = reduction_of(model).layout.prefix
            assert len(after.feature_maps[2][0].flatten(1).T.unique(dim=0)) == last.shape[1] - prefix
        assert torch.equal(restore_(model)(images).feature_maps[2], before.feature_maps[2])

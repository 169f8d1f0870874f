"""Classifiers run in fp32 under autocast, whatever the library that they come from calls them."""

from __future__ import annotations

import pytest
import torch

import hf_models
from conftest import make, photos_for
from tntprune.backbones.base import find_backbone
from tntprune.system.precision import autocast, exact_head_


@pytest.mark.parametrize("kind", ["plain", "distilled", "hf vit_classifier", "hf deit_teacher", "hf beit_classifier"])
def test_logits_are_single_precision(kind):
    name = kind.removeprefix("hf ")
    ours = kind == name
    model, images = (make(name), None) if ours else (hf_models.make(name), hf_models.photos_for(name))
    images = photos_for(model) if images is None else images
    output = find_backbone(model).output
    with torch.inference_mode(), autocast(torch.device("cpu"), "bf16"):
        assert output(model, images).dtype == torch.bfloat16
        assert output(exact_head_(model), images).dtype == torch.float32

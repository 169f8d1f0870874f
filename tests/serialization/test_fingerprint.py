from __future__ import annotations

import json

import pytest
import timm
import torch

from conftest import make
from tntprune import TNT, reduce_, save
from tntprune.serialization.fingerprint import difference, full_name, identity
from tntprune.system.storage import read_metadata


def test_timm_names_and_norms_are_noted(model):
    found = identity(model)
    assert len(found["norms"]) == 4 and all(norm > 0 for norm in found["norms"].values())
    assert not any("head" in name or "pos_embed" in name for name in found["norms"])
    own = dict(model.named_parameters())
    assert all(abs(own[name].norm().item() - norm) < 1e-4 * norm for name, norm in found["norms"].items())


def test_the_reduction_is_no_part_of_it():
    model = make("plain")
    before = identity(model)
    assert identity(reduce_(model, TNT(at=3))) == before


def test_a_name_is_as_timm_writes_it():
    model = timm.create_model("vit_tiny_patch16_224")
    assert full_name(identity(model)) == "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert identity(model)["hub"] == "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert full_name(identity(make("plain"))) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_another_head_are_the_same_weights(dtype):
    model = make("plain")
    norms = identity(model)["norms"]
    assert difference(model, norms) is None
    torch.nn.init.zeros_(model.head.weight)
    assert difference(model.to(dtype), norms) is None


def test_other_weights_differ_and_it_is_told_where():
    model = make("plain")
    norms = identity(model)["norms"]
    name = list(norms)[2]
    with torch.no_grad():
        model.get_parameter(name).mul_(1.02)
    assert name in difference(model, norms)
    assert "has no" in difference(torch.nn.Linear(2, 2), norms)
    with torch.no_grad():
        model.get_parameter(next(iter(norms))).fill_(torch.nan)
    assert "nan" in difference(model, norms)


def test_a_saved_reduction_says_which_model_it_is_of(tmp_path):
    model = reduce_(make("plain"), TNT(at=3))
    assert json.loads(read_metadata(save(model, tmp_path))["model"]) == identity(model)

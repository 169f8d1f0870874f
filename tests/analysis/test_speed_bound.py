from __future__ import annotations

import pytest
import torch

import tntprune
from conftest import make, photos_for
from tntprune import TNT, EViT, EvoViT, Random, ToMe
from tntprune.analysis.speed_bound import Scattered, Slicing, beside
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.reduce import reduce_

CONFIGS = [TNT(at=(1, 3), keep=0.5, similar=4), ToMe(r=5), EViT(at=2, keep=0.5), EvoViT(at=2, keep=0.5)]


@pytest.mark.parametrize("kind", ["plain", "distilled", "no_cls"])
@pytest.mark.parametrize("how", [Slicing, Scattered])
def test_as_many_tokens_at_the_same_places_and_nothing_else(kind, how):
    model = make(kind)
    images = photos_for(model)
    for config in CONFIGS:
        if config.method in ("evit", "evovit") and kind == "no_cls":
            continue
        reduce_(model, config)
        twin = beside(model, how)
        with torch.inference_mode(), tntprune.record(model) as own, tntprune.record(twin) as other:
            before = model(images)
            twin(images)
            assert torch.equal(model(images), before)  # the model itself has not changed
        last = len(own.counts) - 2 if config.method == "evovit" else len(own.counts)  # it brings tokens back at the end
        for mine, its in zip(own.counts[:last], other.counts[:last]):
            assert torch.equal(mine, its)
        assert tntprune.macs(twin).macs <= tntprune.macs(model).macs
        assert tntprune.macs(twin).tokens == tntprune.macs(model).tokens
        assert sum(tntprune.macs(twin).reduction.values()) == 0


def test_the_bound_keeps_the_first_and_shares_every_weight():
    model = reduce_(make("distilled"), TNT(at=2, keep=0.5))
    twin = beside(model, Slicing)
    with torch.inference_mode(), tntprune.record(twin) as trace:
        twin(photos_for(model))
    assert trace.kept[2].tolist() == [list(range(32))] * 3
    own = {id(p) for p in model.parameters()} - {id(p) for p in reduction_of(model).parameters()}
    assert {id(p) for p in twin.parameters()} == own


@pytest.mark.parametrize("how", [Slicing, Scattered])
def test_another_image_size_and_a_shallow_model(how):
    model = make("dynamic")
    model.blocks = model.blocks[:2]
    reduce_(model, Random(at=0, keep=0.5), ToMe(at=2, r=3))
    twin = beside(model, how)
    for size in (None, (64, 64)):
        assert tntprune.macs(twin, size).mlp_tokens == tntprune.macs(model, size).mlp_tokens


def test_slicing_is_the_unpruned_model_where_nothing_goes():
    model = reduce_(make("plain"), TNT(at=2, keep=1.0))
    images = photos_for(model)
    with torch.inference_mode():
        assert torch.equal(beside(model, Slicing)(images), base_of(model)(images))


def test_a_model_without_reduction_is_refused():
    with pytest.raises(tntprune.UserError, match="is not reduced"):
        beside(make("plain"), Slicing)

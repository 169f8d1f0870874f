"""The full grid of a reduced model, against loops that look at every place."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import tntprune
from configs import CONFIGS, stirred
from conftest import SMALL, make, photos_for
from tntprune import AViT, Random, ToMe, UserError, features, record, reduce_
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.base import find_backbone
from tntprune.backbones.models import load_model
from tntprune.data.folders import all_photos
from tntprune.data.loading import Photos, collate
from tntprune.data.transforms import transform_for
from tntprune.ops.tokens import NOWHERE, Tokens, fill, nearest_kept

SIZES = ((32, 32), (48, 24), (20, 44))


class Dense(nn.Module):
    """What a user would write."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return features(self.model, images, return_prefix_tokens=True)


def filled(tokens, grid):
    """Place by place: the token that carries it, or the kept one that is nearest, the first of several."""
    rows, columns = grid
    out = torch.zeros(len(tokens.x), tokens.x.shape[2], rows, columns)
    for image in range(len(out)):
        at = {
            int(place): position
            for position, place in enumerate(tokens.index[image])
            if place >= 0 and (tokens.size is None or tokens.size[image, position] > 0)
        }
        for place in range(rows * columns) if at else ():
            y, x = divmod(place, columns)
            position = -1 if tokens.carrier is None else int(tokens.carrier[image, place])
            if position not in at.values():
                near = min(sorted(at), key=lambda p: (p // columns - y) ** 2 + (p % columns - x) ** 2)
                position = at[near]
            out[image, :, y, x] = tokens.x[image, tokens.prefix + position]
    return out


@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (6, 1), (5, 8), (9, 4)])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_the_nearest_place_is_what_a_search_finds(grid, share):
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(6, grid[0] * grid[1], generator=generator) < share
    kept[:, -1] |= ~kept.any(1)
    found = nearest_kept(kept, grid)
    for image in range(6):
        there = kept[image].nonzero()[:, 0].tolist()
        for place in range(kept.shape[1]):
            (y, x), columns = divmod(place, grid[1]), grid[1]
            distance = {p: (p // columns - y) ** 2 + (p % columns - x) ** 2 for p in there}
            assert int(found[image, place]) == min(there, key=lambda p: (distance[p], p))


def test_tokens_without_a_place_and_padding_fill_nothing():
    x = torch.arange(2.0 * 5).view(2, 5, 1)  # one prefix token, then four
    index = torch.tensor([[5, 0, NOWHERE, 2], [NOWHERE, NOWHERE, 3, NOWHERE]])
    size = torch.tensor([[1.0, 2.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    source = torch.tensor([[1, 1, 3, -1, 2, 0], [-1, -1, -1, 2, -1, -1]])
    tokens = Tokens(x, index, 1, size, source)
    found = fill(tokens, (2, 3))
    assert found[0, 0].tolist() == [[2, 2, 1], [2, 1, 1]]  # 2 is padding, 4 went to a token that has no place
    assert found[1].unique().tolist() == [8]
    assert torch.equal(found, filled(tokens, (2, 3)))
    nothing = replace(tokens, size=torch.zeros_like(size))
    assert fill(nothing, (2, 3)).abs().max() == 0 and torch.equal(fill(nothing, (2, 3)), filled(nothing, (2, 3)))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_place_gets_its_carrier_or_the_nearest_kept_token_at_any_size(name):
    model = stirred(make("dynamic"), CONFIGS[name])
    for size in SIZES:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            left = model.final(model.walk(images, follow=True))
            found, prefix = features(model, images, return_prefix_tokens=True)
            assert torch.equal(left.x, model.forward_features(images))
        grid = (size[0] // 4, size[1] // 4)
        assert found.shape == (2, 32, *grid) and torch.equal(prefix, left.x[:, : left.prefix])
        assert torch.equal(found, filled(left, grid))
        with record(model) as trace, torch.inference_mode():
            model(images)
        for block, carrier in trace.carrier.items():
            assert carrier.shape == (2, grid[0] * grid[1]), block


@pytest.mark.parametrize(
    "name", ["random-several", "tome", "evovit", "ats", "avit", "evit", "tnt-merging-inside", "mctf"]
)
def test_it_does_not_depend_on_the_batch(name):
    model = stirred(make("dynamic"), CONFIGS[name])
    images = torch.randn(4, 3, 24, 48, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole, alone = features(model, images), torch.cat([features(model, one) for one in images.split(1)])
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-4)


def test_an_unpruned_model_gives_its_own_grid(model):
    images = photos_for(model)
    with torch.inference_mode():
        expected = model.forward_intermediates(images, norm=True)[1][-1]
        assert torch.equal(features(model, images), expected)
        reduce_(model, Random(at=2, keep=1.0))
        assert torch.equal(features(model, images), expected)


def test_with_everything_kept_intermediates_are_timms_bit_for_bit(model):
    images = photos_for(model)
    calls = [
        {}, {"indices": 2, "norm": True, "intermediates_only": True}, {"indices": [1, -1], "output_fmt": "NLC"},
        {"indices": [0], "stop_early": True}, {"return_prefix_tokens": True},
    ]  # fmt: skip
    if isinstance(model, VisionTransformer):
        calls += [{"output_dict": True}, {"output_dict": True, "return_prefix_tokens": True, "norm": True}]
    if not model.num_prefix_tokens:
        calls = [call for call in calls if isinstance(model, VisionTransformer) or "return_prefix_tokens" not in call]
    with torch.inference_mode():
        expected = [model.forward_intermediates(images, **call) for call in calls]
        reduce_(model, Random(at=2, keep=1.0))
        for call, before in zip(calls, expected):
            after = model.forward_intermediates(images, **call)
            same = torch.utils._pytree.tree_map(torch.equal, before, after)
            assert all(torch.utils._pytree.tree_leaves(same)), call


@pytest.mark.parametrize("name", ["random-several", "tnt-merging", "tome", "evit", "evovit", "zerotprune", "avit"])
def test_intermediates_are_what_each_block_computed(name):
    model = stirred(make("plain"), CONFIGS[name])
    images, made, left = photos_for(model), {}, {}
    with torch.inference_mode():
        model.walk(images, visit=lambda n, t: left.update({n: t}), made=lambda n, t: made.update({n: t}))
        out, grids = model.forward_intermediates(images, norm=True)
        for number in range(1, 7):
            tokens = reduction_of(model).unfold(left[6] if number == 6 else made[number])
            assert torch.equal(grids[number - 1], filled(model.final(tokens), (8, 8)))
        assert torch.equal(grids[-1], features(model, images))
        assert torch.equal(out, model.forward_features(images))
        assert torch.equal(model.get_intermediate_layers(images, 1, reshape=True, norm=True)[0], grids[-1])
    if name == "random-several":
        assert made[1].count == 64 and left[1].count == made[3].count == 51 and left[3].count == 25
    if name == "evovit":  # the representative's tokens come back, each with what makes it differ
        assert all(len(grid[0].flatten(1).unique(dim=1)[0]) == 64 for grid in grids)


def test_what_a_block_computed_is_that_of_the_unpruned_model_until_tokens_go():
    model = make("plain")
    images = photos_for(model)
    with torch.inference_mode():
        base = model.forward_intermediates(images, intermediates_only=True)
        reduce_(model, Random(at=3, keep=0.5))
        found = model.forward_intermediates(images, intermediates_only=True)
    assert [torch.equal(a, b) for a, b in zip(base, found)] == [True] * 3 + [False] * 3


def test_what_cannot_be_right_is_refused():
    model = reduce_(make("plain"), Random(at=1, keep=0.5))
    images = photos_for(model)
    with pytest.raises(UserError, match="attn_mask"):
        model.forward_intermediates(images, attn_mask=torch.ones(65, 65))
    with pytest.raises(UserError, match="'NHWC': expected 'NCHW' or 'NLC'"):
        model.forward_intermediates(images, output_fmt="NHWC")
    with pytest.raises(UserError, match=r"before tntprune\.reduce_"):
        timm.models._features.FeatureGetterNet(model, (1, 2))
    with pytest.raises(UserError, match="images of 48 x 24: the model takes 32 x 32"):
        features(model, torch.randn(1, 3, 48, 24))
    with pytest.raises(UserError, match="no whole number of patches of 4 x 4"):
        features(reduce_(make("dynamic"), Random(at=1)), torch.randn(1, 3, 30, 32))
    with pytest.raises(UserError, match="Linear is not supported"):
        features(nn.Linear(2, 2), torch.randn(1, 3, 4, 4))


def test_timms_features_only_works_on_the_model_inside():
    net = timm.create_model("test_vit", features_only=True, img_size=64, out_indices=(1, 3)).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match=r"FeatureGetterNet wraps a model; expected .* its \.model"):
        reduce_(net, Random(at=1))
    with torch.inference_mode():
        before = net(images)
        reduce_(net.model, Random(at=3, keep=0.5))
        after = net(images)
    assert [grid.shape for grid in after] == [grid.shape for grid in before]
    assert torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])


def test_an_image_of_which_nothing_is_left_is_zero():
    model = reduce_(make("plain"), AViT(gate_scale=0.0, gate_center=-9.0))  # all halt after the first block
    with torch.inference_mode():
        found = features(model, photos_for(model))
    assert found.shape == (3, 32, 8, 8) and found.abs().max() == 0


@pytest.mark.parametrize("name", ["tome", "avit"])
def test_padded_sizes_and_gradients(name):
    model = stirred(VisionTransformer(**SMALL, dynamic_img_size=True, dynamic_img_pad=True).eval(), CONFIGS[name])
    images = torch.randn(2, 3, 30, 17, requires_grad=True)
    grid = features(model, images)
    assert grid.shape == (2, 32, 8, 5)
    grid.square().sum().backward()
    assert images.grad.isfinite().all() and images.grad.abs().sum() > 0


def dense(name):
    """Of fewer blocks, for compiling and exporting take a time that grows with them; `tome` acts at each of them."""
    with patch.dict(SMALL, depth=2 if name == "tome" else 5):
        return Dense(make("dynamic") if name is None else stirred(make("dynamic"), CONFIGS[name]))


@pytest.mark.parametrize("name", [None, "tnt-similar", "tome", "ats"])
def test_export_gives_what_eager_gives(name):
    model = dense(name)
    images = torch.randn(2, 3, 48, 24, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(images)
        program = torch.export.export(model, (images,)).module()
        for found, wanted in zip(program(images), expected):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        None, "evit", "tome",
        *(pytest.param(name, marks=pytest.mark.wide) for name in ("tnt-several-merge", "ats", "avit", "evovit")),
    ],
)  # fmt: skip
def test_one_graph_at_another_size(name):
    torch._dynamo.reset()
    model = dense(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    images = torch.randn(2, 3, 48, 24, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(images)  # first, so that the adapter of a model that nobody has reduced is imported
        for found, wanted in zip(compiled(images), expected):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_another_input_size_is_as_if_the_model_had_been_made_so(name):
    model, size = reduce_(make("plain"), CONFIGS[name]), (48, 24)
    before, names = tntprune.macs(model), {key: value.clone() for key, value in model.state_dict().items()}
    expected = tntprune.macs(reduce_(VisionTransformer(**{**SMALL, "img_size": size}), CONFIGS[name]))
    assert tntprune.macs(model, img_size=size) == expected != before
    with pytest.raises(UserError, match="expected rows and columns in multiples"):
        tntprune.macs(model, img_size=(50, 24))
    assert tntprune.macs(model) == before
    assert all(torch.equal(names[key], value) for key, value in model.state_dict().items())
    model.set_input_size(size)
    assert tntprune.macs(model) == expected
    with torch.inference_mode():
        assert features(model, torch.randn(1, 3, *size)).shape == (1, 32, 12, 6)
        assert model(torch.randn(1, 3, *size)).isfinite().all()


def test_the_grid_is_the_images(model):
    images = photos_for(model)
    backbone = find_backbone(model)
    assert backbone.grid(model, images) == backbone.layout(model).grid
    assert backbone.grid(reduce_(model, Random(at=1)), images) == backbone.layout(model).grid


@pytest.mark.realdata
def test_filling_from_the_nearest_is_better_than_zeros_or_another_place(data, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    likeness = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "dense.py"))["likeness"]
    model = load_model("vit_tiny_patch16_224", data / "vit_tiny_patch16_224.safetensors")
    photos = all_photos(data / "calibration-1000" / "images")[::100]
    images = collate([Photos(photos, transform_for(model))[i] for i in range(len(photos))]).images
    with torch.inference_mode():
        batches = [(images, features(model, images))]
    for keep in (0.7, 0.5):
        dropping = likeness(reduce_(model, Random(at=3, keep=keep)), batches)
        assert dropping["stayed"] > dropping["dropped"] + 0.2
        assert dropping["dropped"] > dropping["shuffled"] + 0.1 > dropping["zeros"] + 0.1
        merging = likeness(reduce_(model, ToMe(at=3, keep=keep)), batches)
        assert merging["stayed"] > merging["merged"] > dropping["dropped"] + 0.05

"""The relative position bias goes with the tokens: held against loops over pairs, and against timm's own blocks."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from timm.models.beit import Beit

from conftest import SMALL, make, photos_for
from reference import first_half, in_halves
from tntprune import TNT, Random, ToMe, UserError, macs, record, reduce_
from tntprune.backbones.base import find_backbone
from tntprune.backbones.models import shape_of
from tntprune.ops.attention import log_size
from tntprune.ops.tokens import NOWHERE

OPTIONS = {
    "own": {"use_rel_pos_bias": True},
    "shared": {"use_shared_rel_pos_bias": True, "qkv_bias": False, "global_pool": "token"},
    "both": {"use_rel_pos_bias": True, "use_shared_rel_pos_bias": True, "init_values": 0.1, "swiglu_mlp": True},
    "none": {"scale_mlp": True},
    "bias apart": {"use_rel_pos_bias": True},
}
GRID = (6, 10)


@pytest.fixture(params=OPTIONS)
def beit(request):
    torch.manual_seed(0)
    model = Beit(**{**SMALL, "img_size": (24, 40)}, **OPTIONS[request.param])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (1.0 if "table" in name else 0.1))
    for block in model.blocks:
        block.attn.qkv_bias_separate = "apart" in request.param
    return model.eval()


def bias_of(model, number, places):
    """(heads, 1 + n, 1 + n) for the CLS token and the tokens at these places, pair by pair; None without tables."""
    tables = [m.relative_position_bias_table for m in (model.blocks[number - 1].attn, model.rel_pos_bias) if m]
    tables = [table for table in tables if table is not None]
    height, width = GRID
    pairs = (2 * height - 1) * (2 * width - 1)
    rows = []
    for i in ["cls", *places]:
        for j in ["cls", *places]:
            if NOWHERE in (i, j):
                rows.append(None)
            elif "cls" in (i, j):
                rows.append(pairs + (2 if i == j else 0 if i == "cls" else 1))
            else:
                down, right = i // width - j // width, i % width - j % width
                rows.append((down + height - 1) * (2 * width - 1) + right + width - 1)
    total = [sum(torch.zeros(4) if row is None else table[row] for table in tables) for row in rows]
    return torch.stack(total, 1).unflatten(1, [len(places) + 1] * 2) if tables else None


def plain(model, number):
    """timm's block without a table of its own, so that it takes any bias."""
    block = copy.deepcopy(model.blocks[number - 1])
    block.attn.relative_position_bias_table = None
    return block


def test_halves_of_every_kind_are_the_block_bit_for_bit(beit):
    images = photos_for(beit)
    with torch.inference_mode():
        expected = beit.forward_features(images)
        reduce_(beit, Random(at=2))
        x, places = beit.embed(images)
        for number in range(1, 7):
            halved = in_halves(beit, number, x, places)
            assert torch.equal(halved, beit.run(number, x, places))
            x = halved
        assert torch.equal(beit.norm(x), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_any_tokens_have_the_bias_of_their_pairs(beit, fused):
    for block in beit.blocks:
        block.attn.fused_attn = fused
    reduce_(beit, Random(at=2))
    index = torch.tensor([[3, 59, 0, 17, 9], [NOWHERE, 50, 8, 2, 1], [33, 34, 43, 44, NOWHERE]])
    x = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(0))
    size = torch.tensor([[1.0, 2, 3, 1, 1], [4, 1, 1, 1, 0], [1, 1, 1, 5, 1]])
    bias = log_size(size, 1, power=1)
    with torch.inference_mode():
        _, places = beit.embed(photos_for(beit))
        if places is not None:
            places = beit.placed(places, index)
        for number in (1, 4):
            found, block = beit.run(number, x, places), plain(beit, number)
            heads = first_half(beit, number, x, places, bias)[1]
            weighed = in_halves(beit, number, x, places, bias)
            torch.testing.assert_close(heads.rows(2), heads.map()[:, :, :2])
            for i in range(3):
                own, only = bias_of(beit, number, index[i].tolist()), slice(i, i + 1)
                alone = block(x[only], shared_rel_pos_bias=None if own is None else own[None])
                torch.testing.assert_close(found[only], alone, atol=1e-5, rtol=1e-5)
                both = bias[only] if own is None else own[None] + bias[only]
                alone = block(x[only], shared_rel_pos_bias=both)  # what a token of many patches adds comes on top
                torch.testing.assert_close(weighed[only], alone, atol=1e-5, rtol=1e-5)


def test_pruned_is_a_loop_over_images_with_the_bias_of_what_is_left(beit):
    images = photos_for(beit)
    reduce_(beit, Random(at=(1, 3), keep=(0.8, 0.5)))
    with torch.inference_mode():
        with record(beit) as trace:
            found = beit(images)
        for i, image in enumerate(images):
            x, there = beit.embed(image[None])[0], list(range(60))
            for number in range(1, 7):
                own = bias_of(beit, number, there)
                x = plain(beit, number)(x, shared_rel_pos_bias=None if own is None else own[None])
                if number in trace.kept:
                    kept = trace.kept[number][i].tolist()
                    x, there = x[:, [0, *(there.index(place) + 1 for place in kept)]], kept
            torch.testing.assert_close(found[i : i + 1], beit.forward_head(beit.norm(x)), atol=1e-5, rtol=1e-4)


def test_the_bias_survives_export():
    model = reduce_(make("beit"), ToMe(at=2, keep=0.5))
    images = photos_for(model)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(model, (images,), dynamic_shapes=(batch,)).module()
    with torch.inference_mode():
        torch.testing.assert_close(program(images[:2]), model(images[:2]), atol=1e-5, rtol=1e-4)


def test_tables_learn(beit):
    """The gradient reaches the entries of the pairs that are left, and only those."""
    reduce_(beit, Random(at=0, tokens=2))
    with record(beit) as trace:
        beit(photos_for(beit)[:1]).sum().backward()
    ((first, second),) = trace.kept[0].tolist()
    step = (second // 10 - first // 10) * 19 + second % 10 - first % 10
    middle = 5 * 19 + 9
    for name, parameter in beit.named_parameters():
        if "table" in name:
            touched = parameter.grad.abs().sum(1).nonzero().flatten().tolist()
            assert set(touched) <= {middle, middle + step, middle - step, 209, 210, 211} and middle in touched


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "beitv2_large_patch16_224", "beit_base_patch16_384"])
def test_real_models_have_a_layout_and_costs(name):
    model = shape_of(name)
    layout = find_backbone(model).layout(model)
    assert (layout.family, layout.prefix, layout.cls) == ("timm Beit", 1, True)
    found = macs(reduce_(model, TNT(at=3, keep=0.5)))
    assert found.tokens[3:] == [layout.patches // 2] * (layout.depth - 3) and 0.5 < found.macs / found.base_macs < 0.7


def test_a_window_that_is_not_the_grid_is_refused(beit):
    beit.blocks[2].attn.window_size = (5, 10)
    with pytest.raises(UserError, match=re.escape("bias over 5 x 10 of 6 x 10 patches is not supported")):
        reduce_(beit, Random(at=2))


def test_another_block_is_refused_by_name():
    model = make("beit")
    model.blocks[1] = make("post_norm").blocks[1]
    with pytest.raises(UserError, match=r"block ResPostBlock \(supported: Block\)"):
        reduce_(model, Random(at=2))

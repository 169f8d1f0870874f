"""Rope goes with the tokens: held against a loop over images, in which timm's own blocks get each token's own rope."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import timm
import torch
from timm.models.eva import Eva
from torch import nn

import tntprune
from conftest import SMALL, make, photos_for
from reference import first_half, in_halves
from tntprune import TNT, EViT, Random, ToMe, UserError, macs, record, reduce_
from tntprune.backbones.base import find_backbone
from tntprune.backbones.models import shape_of
from tntprune.ops.tokens import NOWHERE

ROPE = {**SMALL, "use_rot_pos_emb": True}
OPTIONS = {
    "no rope": {"use_rot_pos_emb": False},
    "dinov3, bias apart": {"rope_type": "dinov3", "rope_rotate_half": True, "num_reg_tokens": 2},
    "gated, grouped": {"gated_attn": True, "attn_type": "rope", "qkv_fused": False, "num_kv_heads": 2, "qk_norm": True},
    "post norm": {"use_post_norm": True, "scale_attn_inner": True},
    "multimodal": {"rope_type": "mrope", "attn_type": "rope", "rope_mrope_section": (1, 2, 1)},
    "mixed": {"rope_type": "mixed", "no_embed_class": True, "num_reg_tokens": 3, "swiglu_mlp": True},
    "perception encoder": {
        "attn_type": "rope", "use_pre_transformer_norm": True, "ref_feat_shape": (6, 6), "rope_grid_offset": 1.0,
        "rope_grid_indexing": "xy", "global_pool": "map", "attn_pool_num_heads": 8,
    },
    "scale on attention only": {"init_values": 0.1, "attn_only_layer_scale": True, "global_pool": "avgmax"},
}  # fmt: skip


def build(**options):
    gated = options.pop("gated_attn", False)
    if missing := set(options) - set(inspect.signature(Eva).parameters):
        pytest.skip(f"this timm is older than {', '.join(sorted(missing))}")
    torch.manual_seed(0)
    model = Eva(**{**ROPE, **options})
    for block in model.blocks:
        if gated:  # Eva itself never asks its blocks for a gate
            if not hasattr(block.attn, "gate"):
                pytest.skip("this timm is older than the gate")
            block.attn.gate = nn.Linear(32, 32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.fixture(params=OPTIONS)
def eva(request):
    model = build(**OPTIONS[request.param])
    for block in model.blocks:
        block.attn.qkv_bias_separate = "apart" in request.param
    return model


def rope_at(rope, block, kept):
    """Of what `_pos_embed` gives, one block's for the tokens of one image; a token without a place is not turned."""
    if rope is None:
        return None
    own = rope[block] if rope.ndim == 4 else rope
    still = torch.cat([torch.zeros(own.shape[-1] // 2), torch.ones(own.shape[-1] // 2)]).expand_as(own[..., 0, :])
    return torch.stack([still if place == NOWHERE else own[..., place, :] for place in kept.tolist()], -2)


def test_halves_of_every_kind_are_the_block_bit_for_bit(eva):
    images, expected = photos_for(eva), None
    with torch.inference_mode():
        expected = eva.forward_features(images)
        reduce_(eva, Random(at=2))
        x, places = eva.embed(images)
        for number in range(1, 7):
            halved = in_halves(eva, number, x, places)
            assert torch.equal(halved, eva.run(number, x, places))
            x = halved
        assert torch.equal(eva.norm(x), expected)


def test_pruned_is_a_loop_over_images_with_each_tokens_own_rope(eva):
    images = photos_for(eva)
    reduce_(eva, Random(at=(1, 3), keep=(0.8, 0.5)))
    with torch.inference_mode():
        with record(eva) as trace:
            found = eva(images)
        for i, image in enumerate(images):
            x, rope = eva._pos_embed(eva.patch_embed(image[None]))
            x, there = eva.norm_pre(x), torch.arange(64)
            for number, block in enumerate(eva.blocks):
                x = block(x, rope=rope_at(rope, number, there))
                if number + 1 in trace.kept:
                    kept = trace.kept[number + 1][i]
                    rows = [there.tolist().index(place) for place in kept.tolist()]
                    prefix = list(range(eva.num_prefix_tokens))
                    x, there = x[:, prefix + [eva.num_prefix_tokens + row for row in rows]], kept
            torch.testing.assert_close(found[i : i + 1], eva.forward_head(eva.norm(x)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eva02", "dinov3", "rope_mixed"])
def test_any_order_and_tokens_without_a_place(kind):
    model = reduce_(make(kind), Random(at=2))
    generator = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randperm(64, generator=generator)[:20] for _ in range(3)])
    index[0, 4], index[2, 0], index[2, 19] = NOWHERE, NOWHERE, NOWHERE
    x = torch.randn(3, model.num_prefix_tokens + 20, 32, generator=generator)
    with torch.inference_mode():
        _, rope = model._pos_embed(model.patch_embed(photos_for(model)))
        _, everywhere = model.embed(photos_for(model))
        places = model.placed(everywhere, index)
        for number, block in enumerate(model.blocks):
            found = model.run(number + 1, x, places)
            assert torch.equal(in_halves(model, number + 1, x, places), found)
            for i in range(3):
                alone = block(x[i : i + 1], rope=rope_at(rope, number, index[i]))
                torch.testing.assert_close(found[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_each_query_and_key_is_turned_by_hand():
    """DINOv3's layout: elements i and i + half are turned together, by an angle that its place gives."""
    model = reduce_(make("dinov3"), Random(at=2))
    block, index = model.blocks[2], torch.tensor([[5, 63, 0]])
    x = torch.randn(1, 5 + 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        heads = first_half(model, 3, x, model.placed(model.embed(photos_for(model))[1], index))[1]
        plain = block.attn.qkv(block.norm1(x)).reshape(8, 3, 4, 8)
    assert torch.equal(heads.key[0, :, :5], plain[:5, 1].transpose(0, 1))  # prefix tokens are not turned
    for row, place in enumerate(index[0].tolist()):
        centre = [2 * (place // 8 + 0.5) / 8 - 1, 2 * (place % 8 + 0.5) / 8 - 1]
        angles = [2 * torch.pi * c / 10000 ** (2 * i / 4) for c in centre for i in range(2)]
        for head in range(4):
            for which, turned in ((0, heads.query), (1, heads.key)):
                (a, b), after = plain[5 + row, which, head].chunk(2), turned[0, head, 5 + row]
                for i, angle in enumerate(angles):
                    sine, cosine = math.sin(angle), math.cos(angle)
                    torch.testing.assert_close(after[i], a[i] * cosine - b[i] * sine, atol=1e-5, rtol=0)
                    torch.testing.assert_close(after[i + 4], b[i] * cosine + a[i] * sine, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rope", ["cat", "dinov3", "mixed"])
def test_coordinates_that_training_changes_are_drawn_once_a_pass(rope):
    model = build(rope_type=rope, rope_rescale_coords=2.0, rope_jitter_coords=1.5).train()
    images = photos_for(model)
    torch.manual_seed(3)
    expected, other = model(images), model(images)
    reduce_(model, Random(at=2, keep=1.0))
    torch.manual_seed(3)
    assert torch.equal(model(images), expected) and not torch.equal(other, expected)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("eva02", TNT(at=3, keep=0.5, similar=5)),
        ("dinov3", EViT(at=2, keep=0.5)),
        ("rope_mixed", ToMe(at=2, keep=0.5)),
    ],
    ids=["eva02-tnt", "dinov3-evit", "rope_mixed-tome"],
)
def test_rope_survives_export(kind, config):
    model = reduce_(make(kind), config)
    images = photos_for(model)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(model, (images,), dynamic_shapes=(batch,)).module()
    with torch.inference_mode():
        torch.testing.assert_close(program(images[:2]), model(images[:2]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "prefix", "patches"),
    [
        ("eva02_tiny_patch14_224", 1, 256),
        ("eva_giant_patch14_224", 1, 256),
        ("vit_small_patch16_dinov3", 5, 256),
        ("vit_7b_patch16_dinov3", 5, 256),
        ("vit_pe_core_tiny_patch16_384", 1, 576),
        ("vit_pe_spatial_base_patch16_512", 1, 1024),
        ("vit_small_patch16_rope_mixed_224", 1, 196),
        ("vit_medium_patch16_rope_reg1_gap_256", 1, 256),
    ],
)
def test_real_models_have_a_layout_and_costs(name, prefix, patches):
    model = shape_of(name)
    layout = find_backbone(model).layout(model)
    assert (layout.family, layout.prefix, layout.patches) == ("timm Eva", prefix, patches)
    found = macs(reduce_(model, TNT(at=3, keep=0.5)))
    assert found.tokens[3:] == [patches // 2] * (layout.depth - 3) and 0.5 < found.macs / found.base_macs < 0.7


def test_dinov3_takes_any_size():
    model = timm.create_model("vit_small_patch16_dinov3", num_classes=9).eval()
    reduce_(model, TNT(at=3, keep=0.5))
    with torch.inference_mode(), record(model) as trace:
        logits = model(torch.randn(1, 3, 256, 192))
    assert logits.shape == (1, 9) and logits.isfinite().all()
    assert trace.kept[3].shape == (1, 16 * 12 // 2)


def test_what_is_not_supported_is_refused_by_name():
    def refused(model, words):
        with pytest.raises(UserError, match=re.escape(words)):
            reduce_(model, Random(at=2))

    refused(Eva(**ROPE, patch_drop_rate=0.5), "patch_drop_rate above 0")
    model = Eva(**ROPE)
    model.blocks[1] = timm.models.vision_transformer.Block(32, 4)
    refused(model, "block Block (supported: EvaBlock, EvaBlockPostNorm)")
    model = Eva(**ROPE)
    model.blocks[1].attn = timm.layers.Attention(32, 4)
    refused(model, "attention Attention (supported: EvaAttention, AttentionRope)")
    model = Eva(**ROPE)
    model.rope = nn.Identity()
    refused(model, "position embedding Identity (supported: RotaryEmbeddingCat")
    model = tntprune.reduce_(make("eva02"), Random(at=2))
    with pytest.raises(UserError, match="takes no attn_mask"):
        model(photos_for(model), attn_mask=torch.zeros(65, 65))

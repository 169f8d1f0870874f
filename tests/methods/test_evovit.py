"""Evo-ViT against loops over images, tokens and heads, in which every placeholder is updated after every block."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import ResPostBlock, VisionTransformer

import tntprune
from conftest import SMALL, make, photos_for
from reference import act
from tntprune.backbones.attach import reduction_of
from tntprune.errors import UsageError, UserError
from tntprune.methods import EvoViT, Random, from_dict, to_dict
from tntprune.methods.base import Layout
from tntprune.methods.evovit import SlowFast
from tntprune.methods.steps import Place
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import start
from tntprune.reduce import reduce_
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer

KINDS = (
    "plain",
    "distilled",
    "registers",
    "avg_with_cls",
    "avgmax_include_prefix",
    "non_square",
    "qk_norm",
    "post_norm",
)


def cls_row(block, x):
    """What the first of the tokens (n, D) attends to, n numbers: the mean over the heads of a softmax for each."""
    attention, width = block.attn, block.attn.head_dim
    x = x if isinstance(block, ResPostBlock) else block.norm1(x)
    parts = attention.qkv(x).split(attention.num_heads * width, dim=1)
    row = torch.zeros(len(x))
    for head in range(attention.num_heads):
        query, key = (part[:, head * width : (head + 1) * width] for part in parts[:2])
        query, key = attention.q_norm(query), attention.k_norm(key)
        logits = torch.stack([query[0] @ k * attention.scale for k in key])
        row += torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum() / attention.num_heads
    return row


def loops(model, images, at, counts, mix):
    """Each image on its own: the tokens at the end in grid order, and what is informative after each division.

    Args:
        model: An unreduced model.
        images: (B, 3, H, W).
        at: Blocks after which the patches are divided.
        counts: How many become informative at each; all of them means that nothing is divided there.
        mix: Share of the old global attention.
    """
    prefix, outputs, chosen = model.num_prefix_tokens, [], []
    for x in model.norm_pre(model._pos_embed(model.patch_embed(images))):
        first = list(x[:prefix])
        token = dict(enumerate(x[prefix:]))  # of each place
        slow, fast, representative = list(token), [], None
        attention, informative = {}, {}
        for number, block in enumerate(model.blocks, 1):
            sequence = first + [token[place] for place in slow] + ([representative] if fast else [])
            sequence = torch.stack(sequence)
            row = cls_row(block, sequence)[prefix:]
            for place, share in zip(slow, row):
                attention[place] = share if number <= at[0] else mix * attention[place] + (1 - mix) * share
            out = block(sequence[None])[0]
            first = list(out[:prefix])
            for place, value in zip(slow, out[prefix:]):
                token[place] = value
            for place in fast:
                token[place] = token[place] + (out[-1] - representative)
            if fast:
                representative = out[-1]
            if number in at:
                stay = counts[at.index(number)]
                ranked = sorted(token, key=lambda place: -attention[place].item())
                slow, fast = ranked[:stay], ranked[stay:]
                if fast:
                    total = sum(attention[place] for place in fast)
                    representative = sum(attention[place] / total * token[place] for place in fast)
                informative[number] = sorted(slow)
        outputs.append(torch.stack(first + [token[place] for place in range(len(token))]))
        chosen.append(informative)
    return torch.stack(outputs), chosen


def layout_of(patches=8, prefix=1, depth=6, width=4):
    return Layout("", width, depth, prefix, (1, patches), True, heads=1, attn_dim=width)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_loops(kind):
    model = make(kind)
    images = photos_for(model)
    prefix, patches = model.num_prefix_tokens, model.patch_embed.num_patches
    counts = [math.floor(patches * 0.5), math.floor(patches * 0.6)]
    with torch.inference_mode():
        base = model(images)
        outputs, chosen = loops(model, images, (2, 4), counts, 0.5)
        expected, features = model.forward_head(model.norm(outputs)), model.norm(outputs)
    reduce_(model, EvoViT(at=(2, 4), keep=(0.5, 0.6)))
    with torch.inference_mode(), tntprune.record(model) as trace:
        logits = model(images)
        seen = model.forward_features(images)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(seen, features, atol=1e-5, rtol=1e-4)
    assert seen.shape[1] == prefix + patches and (logits - base).abs().max() > 1e-3
    assert list(trace.kept) == [2, 4, 6]
    for block in (2, 4):
        rows = [informative[block] for informative in chosen]
        assert trace.kept[block].tolist() == [[-1, *row] for row in rows]  # the representative has no place
        carried = [[c if p in row else -1 for p, c in enumerate(range(patches))] for row in rows]
        assert trace.carrier[block].tolist() == carried
        assert len({tuple(row) for row in rows}) > 1 and chosen[0][2] != chosen[0][4]
    assert any(set(one[4]) - set(one[2]) for one in chosen)  # placeholders have come back
    whole = torch.arange(patches).expand(len(images), -1)
    assert torch.equal(trace.kept[6], whole) and torch.equal(trace.carrier[6], whole)


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("at", "keep", "counts"),
    [
        ((1,), 0.5, [32]),
        ((5,), 0.1, [6]),
        ((1, 2, 3), (0.2, 0.9, 0.5), [12, 57, 32]),
        ((1, 3, 5), (0.5, 1.0, 0.4), [32, 64, 25]),  # all go through blocks 4 and 5
        ((2, 4), (1.0, 0.5), [64, 32]),  # mixing starts at block 2 all the same
        ((2, 4), (0.5, 1.0), [32, 64]),
    ],
)
def test_locations_and_rates(at, keep, counts, mix):
    model = make("plain")
    images = photos_for(model, 2)
    with torch.inference_mode():
        outputs, _ = loops(model, images, at, counts, mix)
        expected = model.norm(outputs)
    reduce_(model, EvoViT(at=at, keep=keep, mix=mix))
    with torch.inference_mode():
        torch.testing.assert_close(model.forward_features(images), expected, atol=1e-5, rtol=1e-4)


def test_the_gradients_of_loops():
    model = make("plain")
    images = photos_for(model, 2).requires_grad_()
    weight = model.blocks[1].attn.qkv.weight
    outputs, _ = loops(model, images, (2, 4), [32, 16], 0.5)
    wanted = torch.autograd.grad(model.forward_head(model.norm(outputs)).square().sum(), [images, weight])
    reduce_(model, EvoViT(at=(2, 4), keep=(0.5, 0.25))).reduction.train()
    found = torch.autograd.grad(model(images).square().sum(), [images, weight])
    model.set_grad_checkpointing(True)
    again = torch.autograd.grad(model(images).square().sum(), [images, weight])
    for one, other, third in zip(found, wanted, again):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(one, third)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    prefix=st.integers(1, 3),
    stays=st.lists(st.integers(1, 8), min_size=3, max_size=3),
    mix=st.floats(0, 1),
)
def test_nothing_is_lost_between_divisions(seed, prefix, stays, mix):
    """Blocks that add the same vector to every token must end with every token in its place, with all of it added."""
    layout = layout_of(prefix=prefix)
    method = SlowFast(EvoViT(at=(1, 2, 4), tokens=tuple(stays), mix=mix), layout).eval()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, prefix + 8, 4, generator=generator)
    plan, tokens, added = method.plan(8), start(x, prefix, follow=True), torch.zeros(4)
    for block in range(1, 7):
        heads = None
        if plan[block].sees:
            query, key = torch.randn(2, 2, 1, tokens.x.shape[1], 4, generator=generator)
            heads = Heads(query, key, key, 1.0)
        step = torch.randn(4, generator=generator)
        added += step
        tokens = tokens.__class__(**{**vars(tokens), "x": tokens.x + step})
        tokens = act(method, tokens, Place(block), plan, heads)
        if expected := plan[block].after:
            assert tokens.count == expected.leaving
            placed = [[i for i in row if i >= 0] for row in tokens.index.tolist()]
            assert all(len(set(row)) == expected.ranked for row in placed)
            assert (tokens.carrier >= 0).sum(1).tolist() == [expected.ranked] * 2
    torch.testing.assert_close(tokens.x, x + added, atol=1e-5, rtol=1e-5)
    assert torch.equal(tokens.index, torch.arange(8).expand(2, -1)) and torch.equal(tokens.carrier, tokens.index)


def test_attention_that_nothing_is_left_of_gives_no_nan():
    """In fp32 the softmax of far logits is 0, for all placeholders at once."""
    method = SlowFast(EvoViT(at=1, tokens=2), layout_of(patches=6)).eval()
    x = torch.randn(1, 7, 4, generator=torch.Generator().manual_seed(0))
    key = torch.full((1, 1, 7, 4), -100.0)
    key[:, :, :3] = 100.0
    heads = Heads(torch.full((1, 1, 7, 4), 9.0), key, key, 1.0)
    tokens = act(method, start(x, 1), Place(1), method.plan(6), heads)
    assert tokens.x.isfinite().all()
    assert tokens.index.tolist() == [[0, 1, -1]]
    tokens = act(method, tokens, Place(6), method.plan(6))
    torch.testing.assert_close(tokens.x, x)


@pytest.mark.parametrize("kind", ["plain", "registers", "avg_with_cls"])
def test_an_image_does_not_depend_on_its_batch(kind):
    model = reduce_(make(kind), EvoViT(at=(2, 4), keep=0.4))
    images = photos_for(model, 5)
    with torch.inference_mode():
        whole = model(images)
        torch.testing.assert_close(whole, torch.cat([model(image[None]) for image in images]), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(whole, model(images.flip(0)).flip(0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("amount", [{"keep": 1.0}, {"tokens": 63}, {"tokens": (64, 63)}])
def test_where_nothing_would_be_saved_it_is_the_base_bit_for_bit(amount):
    model = make("plain")
    images = photos_for(model)
    with torch.inference_mode():
        before = model(images)
    reduce_(model, EvoViT(at=(2, 4), **amount))
    assert reduction_of(model).steps(64) == ()
    with torch.inference_mode():
        assert torch.equal(model(images), before)


def test_only_blocks_that_count_are_opened():
    method = SlowFast(EvoViT(at=(2, 4), keep=0.5), layout_of())
    plan = method.plan(8)
    assert [bool(block.sees) for block in plan[1:]] == [False, True, True, True, False, False]
    late = SlowFast(EvoViT(at=(2, 4), keep=(0.5, 1.0)), layout_of())
    assert [number for number, block in enumerate(late.plan(8)) if block.sees] == [2]
    none = SlowFast(EvoViT(at=(2, 4), keep=1.0), layout_of())
    assert [number for number, block in enumerate(none.plan(8)) if block.sees] == []


@pytest.mark.parametrize(
    ("keep", "tokens", "own"),
    [
        # N = 64 patches, 1 prefix token, width 32: the rows of the blocks that are read, then the weighted mean
        ((0.5, 0.25), [64, 64, 33, 33, 17, 17], {2: 65 * 32 + 32 * 32, 4: 2 * 34 * 32 + 48 * 32, 6: 0}),
        ((1.0, 0.25), [64, 64, 64, 64, 17, 17], {4: 3 * 65 * 32 + 48 * 32, 6: 0}),
        ((0.5, 1.0), [64, 64, 33, 33, 64, 64], {2: 65 * 32 + 32 * 32, 4: 0}),
    ],
)
def test_macs(keep, tokens, own):
    model = reduce_(make("plain"), EvoViT(at=(2, 4), keep=keep))
    found = tntprune.macs(model)
    assert found.tokens == tokens and found.reduction == own
    with tntprune.record(model) as trace, torch.inference_mode():
        model(photos_for(model))
    assert [count.tolist() for count in trace.counts[:12:2]] == [[n] * 3 for n in tokens]


def test_macs_of_a_gap_count_every_block_that_is_read():
    model = reduce_(make("plain"), EvoViT(at=(1, 3, 5), keep=(0.5, 1.0, 0.25)))
    own = {1: 65 * 32 + 32 * 32, 3: 2 * 34 * 32, 5: 2 * 65 * 32 + 48 * 32, 6: 0}
    assert tntprune.macs(model).reduction == own


def test_export_and_compile_give_what_eager_gives():
    torch._dynamo.reset()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionTransformer(**{**SMALL, "depth": 4}).eval()  # shallow, which is faster
    reduce_(model, EvoViT(at=(1, 3), keep=0.5))
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (photos_for(model, 3),), dynamic_shapes=({0: batch},)).module()
    for count in (1, 4):
        images = photos_for(model, count)
        with torch.inference_mode():
            torch.testing.assert_close(program(images), model(images), atol=1e-6, rtol=1e-5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-4)


def test_half_precision():
    model = reduce_(make("plain"), EvoViT(at=(2, 4), keep=0.5))
    images = photos_for(model)
    with torch.inference_mode():
        exact = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(images).float() - exact).abs().mean() < 0.1 * exact.abs().mean() + 0.05
        assert model.to(torch.bfloat16)(images.bfloat16()).isfinite().all()


def test_dynamic_image_sizes():
    model = reduce_(make("dynamic"), EvoViT(at=(2, 4), keep=0.5))
    for height, width in ((24, 44), (48, 32)):
        images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            assert model.forward_features(images).shape[1] == height * width // 16 + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix": 1.5}, "mix=1.5: expected a share from 0 to 1"),
        ({"mix": True}, "mix=True: expected a share from 0 to 1"),
        ({"at": 0}, "at=0: no block has been seen"),
        ({"at": None}, "at=None: expected at least one block"),
        ({"keep": (0.5, 0.5, 0.5)}, "3 values for 2 location"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        EvoViT(**options)


def test_models_and_companions_that_it_refuses():
    with pytest.raises(UserError, match="evovit cannot be applied here: it ranks tokens by the CLS"):
        reduce_(make("no_cls"), EvoViT(at=2))
    with pytest.raises(UsageError, match="evovit needs the whole model to itself"):
        reduce_(make("plain"), Random(at=1), EvoViT(at=2))
    with pytest.raises(UsageError, match="at=6: the model has 6 blocks"):
        reduce_(make("plain"), EvoViT(at=6))
    with pytest.raises(UsageError, match="tokens=65 after block 2: only 64"):
        reduce_(make("plain"), EvoViT(at=2, tokens=65))
    with pytest.raises(UserError, match="nothing to train on a frozen model"):
        Trainer(reduce_(make("plain"), EvoViT(at=2)), Training(), 1)
    assert from_dict(to_dict(EvoViT(mix=0.3))) == EvoViT(mix=0.3)

"""EViT against loops: the fused token, its counts, distilled models, annealing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_topk import attended

from conftest import make, photos_for
from reference import act, first_half, steps_of
from tntprune import EViT, UsageError, record, reduce_
from tntprune.backbones.attach import reduction_of
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import Place
from tntprune.ops.tokens import start


def reference(model, image, config):
    """EViT for one image with loops where it decides; returns the logits and, after each location, the kept places."""
    prefix = model.num_prefix_tokens
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]
    places, seen = list(range(len(x) - prefix)), {}
    for number, block in enumerate(model.blocks, 1):
        score = attended(block, x, 1, prefix) if number in config.at else None
        x = x + block.ls1(block.attn(block.norm1(x[None])))[0]
        if score is not None and config.inside:
            x, places = fused(x, places, score, config, prefix)
        x = x + block.ls2(block.mlp(block.norm2(x)))
        if score is not None and not config.inside:
            x, places = fused(x, places, score, config, prefix)
        if score is not None:
            seen[number] = sorted(places)
    return model.forward_head(model.norm(x[None]))[0], seen


def fused(x, places, score, config, prefix):
    count = math.ceil(config.keep[0] * len(places) - 1e-9)
    order = sorted(range(len(places)), key=lambda j: score[j], reverse=True)
    best, rest = order[:count], order[count:]
    total = sum(score[j] for j in rest) if config.normalise else 1.0
    extra = sum(score[j] / total * x[prefix + j] for j in rest)
    tokens = [x[:prefix], x[[prefix + j for j in best]], *([extra[None]] if config.fuse else [])]
    return torch.cat(tokens), [places[j] for j in best] + ([-1] if config.fuse else [])


@pytest.mark.parametrize(
    "config",
    [
        EViT(at=(2, 4, 5), keep=0.7),
        EViT(at=(2, 4), keep=0.5, normalise=True),
        EViT(at=3, keep=0.4, inside=False),
        EViT(at=(2, 4), keep=0.6, fuse=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["plain", "distilled", "registers", "avg_with_cls", "non_square"])
def test_it_is_what_loops_give(kind, config):
    model = make(kind)
    images = photos_for(model, 2)
    with torch.inference_mode():
        expected = [reference(model, image, config) for image in images]
        reduce_(model, config)
        with record(model) as trace:
            logits = model(images)
    for block in config.at:
        assert trace.kept[block].tolist() == [seen[block] for _, seen in expected]
    torch.testing.assert_close(logits, torch.stack([logits for logits, _ in expected]), atol=1e-5, rtol=1e-5)


def test_prefix_tokens_are_never_ranked():
    """The public code takes a distillation token for a patch; here it stays where it is."""
    model = reduce_(make("distilled"), EViT(at=(2, 4), keep=0.3))
    shapes = []
    reduction_of(model).register_forward_hook(
        lambda module, args, out: shapes.append(torch.equal(args[0].x[:, :2], out.x[:, :2]))
    )
    with torch.inference_mode():
        model(photos_for(model))
    assert all(shapes)


@given(patches=st.integers(1, 400), keep=st.floats(0.01, 1.0))
def test_counts_round_up_and_the_fused_token_comes_on_top(patches, keep):
    config, count = EViT(at=(2, 4), keep=keep), patches
    for step in schedule([config], patches, 12):
        assert step.entering == count
        assert step.ranked == min(count - 1, max(1, math.ceil(keep * count - 1e-9)))
        assert step.leaving == step.ranked + 1 <= count
        count = step.leaving


def test_the_authors_counts():
    counts = [step.leaving for step in schedule([EViT(keep=0.7)], 196, 12)]
    assert counts == [139, 99, 71]  # ceil(.7 * 196) + 1, ceil(.7 * 139) + 1, ceil(.7 * 99) + 1


def test_annealing_falls_by_half_a_cosine_from_all_to_the_share():
    model = reduce_(make("plain"), EViT(at=(2, 4), keep=0.5, anneal=(0.2, 0.8)))
    method = reduction_of(model).train()
    seen = []
    for trained in (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0):
        method.trained = trained
        seen.append([step.leaving for step in steps_of(method.plan(64))])
    assert seen[0] == seen[1] == []
    assert seen[3][0] == math.ceil(64 * 0.75) + 1  # half way
    firsts = [counts[0] for counts in seen[2:]]
    assert firsts == sorted(firsts, reverse=True)
    assert seen[-2] == seen[-1] == [step.leaving for step in method.eval().steps(64)] == [33, 18]
    assert [step.place for step in method.steps(64)] == [Place(2, inside=True), Place(4, inside=True)]


def test_weights_of_the_fused_token_sum_to_one_only_if_asked():
    model = make("plain")
    sums = {}
    for normalise in (False, True):
        reduce_(model, EViT(at=2, keep=0.5, normalise=normalise))
        with torch.no_grad():
            x = torch.ones(1, 65, 32) + torch.randn(1, 65, 32, generator=torch.Generator().manual_seed(0)) * 1e-3
            heads = first_half(model, 2, x)[1]
            tokens = start(x, 1)
            out = act(reduction_of(model), tokens, Place(2, True), reduction_of(model).plan(64), heads)
        sums[normalise] = float(out.x[0, -1].mean())
    assert sums[True] == pytest.approx(1, abs=1e-2) and sums[False] < 0.75


@pytest.mark.parametrize("anneal", [(0.5,), (0.5, 0.5), (0.6, 0.2), (0, 1.2), ("a", 1)])
def test_a_wrong_anneal_is_refused(anneal):
    with pytest.raises(UsageError, match=r"anneal=.* expected two ascending shares"):
        EViT(anneal=anneal)

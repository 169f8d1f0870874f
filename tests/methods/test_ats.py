"""Adaptive Token Sampling against loops, and its padding, which must not be seen by anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tntprune
from conftest import make, photos_for
from reference import act, by_place, first_half
from tntprune.backbones.attach import reduction_of
from tntprune.errors import UsageError, UserError
from tntprune.methods import ATS
from tntprune.methods.ats import drawn, pad
from tntprune.methods.steps import Place
from tntprune.ops.tokens import start
from tntprune.reduce import reduce_


def drawn_by_loops(score, draws):
    """Which of the tokens of one image are drawn, as a set of positions."""
    ascending = sorted(range(len(score)), key=lambda i: (score[i], i))
    cumulative, total = [], 0.0
    for i in ascending:
        total += score[i] / sum(score)
        cumulative.append(total)
    found = set()
    for k in range(1, draws + 1):
        point, nearest = (2 * k - 1) / (2 * draws), 0
        for place, value in enumerate(cumulative):
            if abs(value - point) <= abs(cumulative[nearest] - point) + 2e-6:  # of two that are as near, the later
                nearest = place
        found.add(ascending[nearest])
    return found


def walk_by_loops(model, images):
    """For each image what leaves the last block, in the order of the grid, and the kept patches at each place."""
    method, prefix = reduction_of(model), model.num_prefix_tokens
    outs, kept = [], []
    for image in images:
        x, index, own = model.embed(image[None])[0], list(range(method.layout.patches)), {}
        for number in range(1, len(model.blocks) + 1):
            inner, heads = first_half(model, number, x)
            attention = (heads.query @ heads.key.transpose(-1, -2) * heads.scale).softmax(-1)
            step = by_place(method.steps(method.layout.patches)).get(Place(number, inside=True))
            if step is not None:
                score = []
                for i in range(prefix, x.shape[1]):
                    value = torch.cat([heads.value[0, h, i] for h in range(heads.value.shape[1])])
                    seen = sum(float(attention[0, h, 0, i]) for h in range(heads.value.shape[1]))
                    score.append(seen * sum(float(v) ** 2 for v in value) ** 0.5)
                stay = sorted(drawn_by_loops(score, step.ranked))
                inner = torch.cat([inner[:, :prefix], inner[:, [prefix + i for i in stay]]], 1)
                index = [index[i] for i in stay]
                own[number] = index
            x = model.opened(number).mlp_half(inner)
        outs.append(x[0])
        kept.append(own)
    return outs, kept


def sharpened(kind, config):
    """A reduced model that attends to some tokens far more than to others, and to other ones in each image."""
    model = make(kind)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(4)
    return reduce_(model, config)


CONFIGS = {
    "published": ATS(),
    "keep": ATS(at=(2, 4), keep=(0.8, 0.5)),
    "tokens": ATS(at=(1, 3, 6), tokens=20),
    "more-draws-than-tokens": ATS(at=(2, 3), tokens=80),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["plain", "distilled", "registers", "avg_with_cls", "non_square"])
@torch.inference_mode()
def test_a_whole_model_does_what_loops_say(kind, name):
    model = sharpened(kind, CONFIGS[name])
    images = photos_for(model, 3)
    with tntprune.record(model) as trace:
        ours = model.walk(images)
    expected, kept = walk_by_loops(model, images)
    assert any(len({len(own[block]) for own in kept}) > 1 for block in kept[0])  # images really differ
    for number, one in enumerate(kept):
        for block, own in one.items():
            row = trace.kept[block][number].tolist()
            assert row == [-1] * (len(row) - len(own)) + own
            carried = trace.carrier[block][number].tolist()
            assert carried == [i if i in own else -1 for i in range(len(carried))]
        there = ours.size[number] > 0
        assert there.tolist() == [True] * len(own) + [False] * (ours.count - len(own))  # padding last
        x = torch.cat([ours.x[number, : ours.prefix], ours.patches[number, there]])
        torch.testing.assert_close(x, expected[number], atol=1e-5, rtol=1e-5)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_draws_are_what_loops_say(data):
    rows = data.draw(st.integers(1, 3))
    n, draws = data.draw(st.integers(1, 15)), data.draw(st.integers(1, 20))
    score = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(1, 97), min_size=n, max_size=n), min_size=rows, max_size=rows)),
        dtype=torch.float32,
    )
    there = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=rows, max_size=rows))
    )
    there[:, 0] = True
    found = drawn(score, there, draws)
    for row, own, mine in zip(score, there, found):
        places = own.nonzero()[:, 0].tolist()
        expected = {places[i] for i in drawn_by_loops(row[own].tolist(), draws)}
        assert set(mine.nonzero()[:, 0].tolist()) == expected
        assert 1 <= len(expected) <= min(draws, len(places))


@pytest.mark.parametrize("n", [1, 2, 7, 64, 197, 1025])
def test_equal_scores_are_all_drawn_by_as_many_draws(n):
    everyone = torch.ones(2, n, dtype=torch.bool)
    assert drawn(torch.full((2, n), 0.37), everyone, n).all()
    assert drawn(torch.full((2, n), 0.37), everyone, 3 * n).all()
    half = drawn(torch.full((2, n), 0.37), everyone, (n + 1) // 2)
    assert half.sum(1).tolist() == [(n + 1) // 2] * 2


def test_one_token_with_all_the_attention_leaves_little_else():
    score = torch.full((1, 50), 1e-9)
    score[0, 17] = 1.0
    found = drawn(score, torch.ones(1, 50, dtype=torch.bool), 50)
    assert found[0, 17] and found.sum() == 2  # those draws that are nearer to 0 than to 1 take the one next to it
    assert drawn(score, torch.ones(1, 50, dtype=torch.bool), 1).nonzero().tolist() == [[0, 17]]  # half-way goes up


def test_padding_is_never_drawn_even_where_nothing_has_a_score():
    there = torch.tensor([[False, True, False, True], [True, False, False, False]])
    assert not drawn(torch.zeros(2, 4), there, 4)[~there].any()
    assert drawn(torch.zeros(2, 4), there, 4).any(1).all()
    assert not drawn(torch.tensor([[9.0, 1, 9, 1], [1, 9, 9, 9]]), there, 40)[~there].any()
    assert torch.equal(drawn(torch.tensor([[9.0, 1, 9, 1], [1, 9, 9, 9]]), there, 40), there)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["plain", "avgmax_include_prefix"])
@torch.inference_mode()
def test_an_image_alone_has_its_own_length_and_the_same_result(kind, name):
    model = sharpened(kind, CONFIGS[name])
    images = photos_for(model, 6)
    together = model.walk(images)
    alone = [model.walk(image[None]) for image in images]
    assert together.count == max(one.count for one in alone) > min(one.count for one in alone)
    assert all(one.size is None or (one.size == 1).all() for one in alone)
    assert (together.size > 0).sum(1).tolist() == [one.count for one in alone]
    logits = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "distilled", "avg_with_cls", "avgmax_include_prefix"])
@torch.inference_mode()
def test_nothing_sees_what_is_in_padding(kind):
    model = sharpened(kind, ATS(at=(2, 4), keep=(0.9, 0.7)))
    images = photos_for(model, 4)
    before = model(images)
    spoilt = []

    def spoil(module, args, out):
        if out.size is None:
            return
        padding = torch.cat([out.size.new_ones(len(out.x), out.prefix), out.size], 1) == 0
        spoilt.append(int(padding.sum()))
        out.x[padding] = 1e3 * torch.randn(int(padding.sum()), out.x.shape[2])

    reduction_of(model).register_forward_hook(spoil)
    torch.testing.assert_close(model(images), before, atol=1e-5, rtol=1e-5)
    assert len(spoilt) == 2 and min(spoilt) > 0  # what is spoilt stays in the sequence


@torch.inference_mode()
def test_a_compiled_graph_has_the_planned_length_and_says_the_same(monkeypatch):
    model = sharpened("plain", ATS(at=(2, 4), keep=(0.8, 0.6)))
    images = photos_for(model)
    expected = model(images)
    shorter = model.forward_features(images).shape[1]
    program = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(program(images), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(program(images.flip(0)), expected.flip(0), atol=1e-5, rtol=1e-5)  # other lengths
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert model.forward_features(images).shape[1] == 1 + 30 > shorter  # int(int(64 * .8) * .6)
    torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_tokens_that_were_merged_before_keep_their_size():
    model = sharpened("plain", ATS(at=2, tokens=20))
    method = reduction_of(model)
    tokens = start(model.embed(photos_for(model, 4))[0], 1)
    size = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) + 1
    size[:, 10:20] = 0  # padding that was there before
    tokens = replace(tokens, size=size, index=tokens.index.where(size > 0, -1))
    heads = first_half(model, 2, tokens.x, None, method.bias(tokens, 2))[1]
    out = act(method, tokens, Place(2, inside=True), method.plan(64), heads)
    there = out.index >= 0
    assert 0 < there.sum(1).min() < there.sum(1).max() == out.count
    for row, own, index in zip(size, out.size, out.index):
        assert torch.equal(own, torch.where(index >= 0, row[index], 0))
        assert not set(range(10, 20)) & set(index.tolist())


def test_padding_has_no_place_no_size_and_carries_nothing():
    tokens = start(torch.zeros(1, 5, 3), 1, follow=True)
    padded = pad(tokens, torch.tensor([[True, False, True, True]]))
    assert padded.index.tolist() == [[0, -1, 2, 3]] and padded.carrier.tolist() == [[0, -1, 2, 3]]
    assert padded.size.tolist() == [[1, 0, 1, 1]]


@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_finite_and_none_comes_from_padding(training):
    model = sharpened("avg_with_cls", ATS(at=(2, 4), keep=0.8)).train(training)
    images = photos_for(model).requires_grad_()
    (alone,) = torch.autograd.grad(model(images[:1]).square().sum(), images)
    model(images)[0].square().sum().backward()
    torch.testing.assert_close(images.grad, alone, atol=1e-5, rtol=1e-4)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["plain", "avg_with_cls", "avgmax_include_prefix"])
def test_half_precision_through_every_pooling(kind):
    model = sharpened(kind, ATS(at=(2, 4), keep=0.8)).to(torch.bfloat16)
    with torch.inference_mode():
        logits = model(photos_for(model).bfloat16())
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()


def test_steps_say_how_often_is_drawn_and_how_many_can_stay():
    def steps(config):
        return [
            (step.place.block, step.entering, step.ranked, step.leaving)
            for step in reduction_of(reduce_(make("plain"), config)).steps(64)
        ]

    assert steps(ATS()) == [(4, 64, 64, 64), (5, 64, 64, 64), (6, 64, 64, 64)]
    assert steps(ATS(at=(2, 3), keep=(1.0, 0.5))) == [(3, 64, 32, 32)]
    assert steps(ATS(at=(2, 3), tokens=(100, 10))) == [(2, 64, 100, 64), (3, 64, 10, 10)]


def test_costs():
    model = reduce_(make("distilled"), ATS(at=(2, 3), keep=0.5))
    assert tntprune.macs(model).reduction == {2: 2 * 66 * 32, 3: 2 * 34 * 32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": 0, "keep": 0.5}, "at=0: the model has 6 blocks; expected 1 to 6"),
        ({"at": 7}, "at=7: the model has 6 blocks; expected 1 to 6"),
        ({"at": 2, "keep": 0.0}, "keep=0.0: expected a share"),
        ({"at": 2, "tokens": 0}, "tokens=0: expected a whole number, 1 or larger"),
        ({"at": 2, "tokens": 9, "keep": 0.5}, "keep and tokens were both given"),
        ({"keep": (0.5, 0.5)}, "keep=0.5 0.5: 2 values for 3 location"),
        ({"tokens": (9, 9)}, "tokens=9 9: 2 values for 3 location"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        reduce_(make("plain"), ATS(**options))


def test_a_model_without_a_cls_token_is_refused():
    with pytest.raises(UserError, match="ats cannot be applied here: it ranks tokens by the CLS token's attention"):
        reduce_(make("no_cls"), ATS(at=2))

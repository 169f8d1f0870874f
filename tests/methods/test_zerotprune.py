"""Zero-TPrune against loops, what its stages may touch, and what it costs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import tntprune
from conftest import make, photos_for
from reference import by_place, first_half
from tntprune.backbones.attach import reduction_of
from tntprune.errors import UsageError, UserError
from tntprune.methods import ZeroTPrune
from tntprune.methods.steps import Place, Turn
from tntprune.methods.zerotprune import over_heads, votes, without_similar
from tntprune.ops.tokens import pick
from tntprune.reduce import reduce_


def by_loops(graphs, prefix, rounds, boost, limits):
    """The importance of the patch tokens of one image; graphs: heads x n x n, row i is what token i attends to."""
    n, heads = len(graphs[0]), []
    for graph in graphs:
        own = [math.sqrt(n) if boost and i == 0 else 1.0 for i in range(n)]
        own = [v / sum(own) for v in own]
        for _ in range(rounds):
            own = [sum(own[i] * graph[i][j] for i in range(n)) for j in range(n)]
        heads.append([v * n / sum(own) for v in own][prefix:])

    def takes_part(own):
        mean = sum(own) / len(own)
        return limits[0] <= sum((v / mean - 1) ** 2 for v in own) / len(own) <= limits[1]

    chosen = [own for own in heads if limits is None or takes_part(own)] or heads
    return [math.sqrt(sum(own[i] ** 2 for own in chosen) / len(chosen)) for i in range(n - prefix)]


def less_similar(feature, ranked, remove):
    """The positions that are left of `ranked`, the most important first; feature: one list for each token."""

    def cosine(a, b):
        dot = sum(p * q for p, q in zip(feature[a], feature[b]))
        return dot / math.sqrt(sum(p * p for p in feature[a])) / math.sqrt(sum(q * q for q in feature[b]))

    half = len(ranked) - len(ranked) // 2
    closest = {a: max(cosine(a, b) for b in ranked[:half]) for a in ranked[half:]}
    gone = sorted(closest, key=closest.get, reverse=True)[:remove]
    return [a for a in ranked if a not in gone]


def pruned_by_loops(graphs, feature, prefix, step, config, rounds, cls):
    """The positions of the patch tokens of one image that stay."""

    def best(among, rounds, count):
        nodes = [*range(prefix), *(prefix + i for i in among)]
        part = [[[graph[i][j] for j in nodes] for i in nodes] for graph in graphs]
        part = [[[v / sum(row) for v in row] for row in graph] for graph in part]
        score = by_loops(part, prefix, rounds, cls and config.start == "cls", config.variance)
        return [among[i] for i in sorted(range(len(among)), key=lambda i: -score[i])[:count]]

    everyone = list(range(step.entering))
    if config.stages == "is":
        return less_similar(feature, best(everyone, rounds, step.ranked), step.ranked - step.leaving)
    left = less_similar(feature, best(everyone, 1, step.entering), step.ranked - step.leaving)
    return best(left, rounds, step.leaving)


def walk_by_loops(model, images):
    """What leaves the last block, in the order of the grid, and the kept patches after each place, image by image."""
    method, prefix = reduction_of(model), model.num_prefix_tokens
    config, plan = method.config, by_place(method.steps(method.layout.patches))
    outs, kept = [], {place.block: [] for place in plan}
    for image in images:
        x = model.embed(image[None])[0]
        index = list(range(method.layout.patches))
        for number in range(1, len(model.blocks) + 1):
            inner, heads = first_half(model, number, x)
            graphs = (heads.query @ heads.key.transpose(-1, -2) * heads.scale).softmax(-1)
            x = model.opened(number).mlp_half(inner)
            step = plan.get(Place(number))
            if step is None:
                continue
            feature = x[0] if config.feature == "x" else torch.cat(list(heads.key[0]), 1)
            rounds = config.rounds(number, len(model.blocks))
            cls = method.layout.cls
            stay = pruned_by_loops(graphs[0].tolist(), feature[prefix:].tolist(), prefix, step, config, rounds, cls)
            stay.sort()
            x = torch.cat([x[:, :prefix], x[:, [prefix + i for i in stay]]], 1)
            index = [index[i] for i in stay]
            kept[number].append(index)
        outs.append(x)
    return torch.cat(outs), kept


def sharpened(kind, config):
    """A reduced model that attends to some tokens far more than to others."""
    model = make(kind)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(3)
    return reduce_(model, config)


CONFIGS = {
    "isi": ZeroTPrune(at=(1, 4), keep=0.7, similar=6, iterations=(3, 1), variance=(0.01, 0.7)),
    "isi-x": ZeroTPrune(at=2, keep=0.6, similar=9, iterations=3, feature="x"),
    "isi-within": ZeroTPrune(at=2, keep=0.6, similar=9, beyond=False, iterations=3, variance=(0.05, 0.2)),
    "is": ZeroTPrune(at=(1, 4), keep=(1.0, 0.7), similar=6, stages="is", iterations=(3, 2)),
    "is-uniform": ZeroTPrune(at=3, tokens=20, similar=7, stages="is", beyond=False, start="uniform", iterations=1),
    "no-similar": ZeroTPrune(at=2, keep=0.5, similar=0, iterations=2),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["plain", "distilled", "registers", "avg_with_cls", "no_cls", "non_square"])
@torch.inference_mode()
def test_a_whole_model_does_what_loops_say(kind, name):
    model = sharpened(kind, CONFIGS[name])
    images = photos_for(model, 2)
    with tntprune.record(model) as trace:
        ours = model.walk(images)
    expected, kept = walk_by_loops(model, images)
    assert {block: rows.tolist() for block, rows in trace.kept.items()} == kept
    order = torch.cat([torch.arange(ours.prefix).expand(2, -1), ours.index.argsort(1) + ours.prefix], 1)
    torch.testing.assert_close(pick(ours.x, order), expected, atol=1e-5, rtol=1e-5)


def graph(*shape, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, shape[-1], generator=generator) * sharpness).softmax(-1)


@pytest.mark.parametrize("limits", [None, (0.01, 0.7), (0.1, 0.4), (50.0, 60.0)], ids=str)
@pytest.mark.parametrize("boost", [False, True])
@pytest.mark.parametrize("rounds", [1, 2, 30])
def test_importance_is_what_loops_say(rounds, boost, limits):
    attention = torch.cat([graph(3, 2, 12, sharpness=s) for s in (0.2, 1.0, 2.5)], 1)  # heads that differ in variance
    ours = over_heads(votes(attention, rounds, boost)[..., 2:], limits)
    expected = [by_loops(one.tolist(), 2, rounds, boost, limits) for one in attention]
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_heads_outside_the_limits_have_no_say_and_all_have_one_if_none_is_inside():
    flat, mild, sharp = [1.0, 1.0, 1.0, 1.0], [1.5, 0.5, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0]  # variances 0, 0.125, 3
    score = torch.tensor([[flat, mild, sharp], [flat, flat, sharp]])
    ours = over_heads(score, (0.01, 0.7))
    torch.testing.assert_close(ours[0], torch.tensor(mild))
    torch.testing.assert_close(ours[1], torch.tensor([18 / 3, 2 / 3, 2 / 3, 2 / 3]).sqrt())
    torch.testing.assert_close(over_heads(10 * score, (0.01, 0.7)), 10 * ours)  # whatever the scale of the votes


def test_votes_go_to_those_who_are_attended_to():
    attention = torch.tensor([[0.0, 0.9, 0.1], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])[None, None]
    torch.testing.assert_close(votes(attention, 1, False)[0, 0], torch.tensor([0.5, 2.4, 0.1]))
    first = 3**0.5 / (3**0.5 + 2)  # the share of all votes that the CLS token has at first
    other = (1 - first) / 2
    expected = torch.tensor([0.5 * other, 0.9 * first + 1.5 * other, 0.1 * first]) * 3
    torch.testing.assert_close(votes(attention, 1, True)[0, 0], expected)


@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 20), st.booleans())
@settings(deadline=None, max_examples=25)
def test_no_vote_is_lost_or_made(seed, n, rounds, boost):
    found = votes(graph(1, 2, n, seed=seed), rounds, boost)
    torch.testing.assert_close(found.mean(-1), torch.ones(1, 2), atol=1e-5, rtol=0)
    assert (found >= 0).all()


def test_the_start_is_forgotten_after_many_rounds_but_not_after_one():
    attention = graph(1, 1, 9)
    torch.testing.assert_close(votes(attention, 80, True), votes(attention, 80, False), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(votes(attention, 1, True), votes(attention, 1, False), atol=1e-2)


def test_only_the_less_important_half_loses_tokens_and_first_those_most_like_the_other_half():
    angle = torch.tensor([[0.0, 90.0, 180.0, 5.0, 60.0, 45.0, 5.0]]).deg2rad()
    feature = torch.stack([angle.cos(), angle.sin()], 2) * torch.tensor([1, 9, 2, 1, 3, 1, 7])[:, None]
    ranked = torch.tensor([[3, 1, 2, 0, 4, 5, 6]])  # 4, 5 and 6 are the less important ones: 30, 40 and 0 degrees off
    assert without_similar(feature, ranked, 1).tolist() == [[3, 1, 2, 0, 5, 4]]
    assert without_similar(feature, ranked, 2).tolist() == [[3, 1, 2, 0, 5]]
    assert without_similar(feature, ranked, 3).tolist() == [[3, 1, 2, 0]]


@given(
    st.integers(1, 60),
    st.floats(0.01, 1),
    st.integers(0, 80),
    st.booleans(),
    st.sampled_from(["is", "isi"]),
)
@settings(deadline=None, max_examples=150)
def test_every_step_can_be_carried_out(count, keep, similar, beyond, order):
    config = ZeroTPrune(at=2, keep=keep, similar=similar, beyond=beyond, stages=order)
    step = config.step(Turn(Place(2), 0, 1), count, count)
    if step is None:
        assert keep == 1 or max(1, int(count * keep + 1e-9)) == count
        return
    assert count == step.entering >= step.ranked >= step.leaving >= 1 and step.leaving < count
    gone, compared = step.ranked - step.leaving, step.ranked if order == "is" else step.entering
    assert gone <= min(similar, compared // 2)
    assert beyond or step.leaving == max(1, int(count * keep + 1e-9))


def test_only_pruning_blocks_compute_a_map(monkeypatch):
    model = reduce_(make("plain"), ZeroTPrune(at=(2, 5), keep=0.8))
    fused, real = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **k: fused.append(q.shape[2]) or real(q, *a, **k)
    )
    model(photos_for(model))
    # blocks 1, 3, 4 and 6; int(64 * .8) - 10 patches stay after block 2, and int(41 * .8) - 10 after block 5
    assert fused == [1 + 64, 1 + 41, 1 + 41, 1 + 22]


def test_rounds_by_depth():
    assert [ZeroTPrune().rounds(block, 12) for block in (1, 3, 4, 6, 9, 10, 11)] == [50, 50, 5, 5, 5, 1, 1]
    config = ZeroTPrune(at=(1, 3), iterations=(7, 2))
    assert [config.rounds(block, 12) for block in (1, 3)] == [7, 2]
    assert ZeroTPrune(at=(1, 3), iterations=4).rounds(3, 12) == 4


@pytest.mark.parametrize(
    ("options", "cost"),
    [
        ({"stages": "is", "similar": 0}, 6 * 4 * 65**2),
        ({"stages": "is", "similar": 5}, 6 * 4 * 65**2 + 16 * 16 * 32),  # 32 patches in two halves
        ({"stages": "is", "similar": 5, "beyond": False}, 6 * 4 * 65**2 + 18 * 19 * 32),  # 37
        ({"stages": "isi", "similar": 0}, 6 * 4 * 65**2),
        ({"stages": "isi", "similar": 5}, 4 * 65**2 + 32 * 32 * 32 + 6 * 4 * 60**2),
        ({"stages": "isi", "similar": 5, "keep": 1.0}, 4 * 65**2 + 32 * 32 * 32),  # nothing is left to vote about
    ],
    ids=str,
)
def test_costs(options, cost):
    model = reduce_(make("plain"), ZeroTPrune(**{"at": 2, "keep": 0.5, "iterations": 6, **options}))
    (step,) = reduction_of(model).steps(64)
    assert reduction_of(model).macs(step) == cost
    assert tntprune.macs(model).reduction == {2: cost}


def test_without_a_cls_token_the_start_is_uniform():
    images = photos_for(make("no_cls"))
    cls, uniform = (
        sharpened("no_cls", ZeroTPrune(at=2, keep=0.5, start=start, iterations=1)) for start in ("cls", "uniform")
    )
    assert torch.equal(cls(images), uniform(images))
    cls, uniform = (
        sharpened("plain", ZeroTPrune(at=2, keep=0.5, start=start, iterations=1)) for start in ("cls", "uniform")
    )
    assert not torch.equal(cls(images), uniform(images))


def test_training_mode_prunes_as_well_and_has_finite_gradients():
    model = sharpened("distilled", CONFIGS["isi"]).train()
    model(photos_for(model)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": 0}, "at=0: no block has been seen"),
        ({"at": (0, 3)}, "at=0: no block has been seen"),
        ({"similar": -1}, "similar=-1: expected 0 or more"),
        ({"iterations": 0}, "iterations=0: expected a whole number from 1 to 1000"),
        ({"iterations": (1, 2)}, "iterations=1 2: 2 values for 5 location"),
        ({"variance": (0.7, 0.01)}, "expected two ascending limits"),
        ({"variance": 0.7}, "expected two ascending limits"),
        ({"stages": "si"}, "stages='si': expected 'isi' or 'is'"),
        ({"start": "random"}, "start='random': expected 'cls' or 'uniform'"),
        ({"feature": "query"}, "feature='query': expected 'key' or 'x'"),
        ({"beyond": 1}, "beyond=1: expected True or False"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        ZeroTPrune(**options)


def test_blocks_that_do_not_show_their_attention_are_refused():
    from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

    from conftest import SMALL

    with pytest.raises(UserError, match="zerotprune cannot be applied here: it reads the attention"):
        reduce_(VisionTransformer(**SMALL, block_fn=ParallelScalingBlock), ZeroTPrune(at=2))

"""TNT against loops, its recipes, and what its training touches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make, photos_for
from reference import act, noisy, score, without_similar
from tntprune.backbones.attach import reduction_of
from tntprune.errors import UsageError
from tntprune.methods import TNT
from tntprune.methods.steps import Place
from tntprune.ops.similarity import remove_similar
from tntprune.ops.tokens import order, start
from tntprune.reduce import reduce_

OPTIONS = [
    {"recipe": "paper"},
    {"recipe": "relative"},
    {"recipe": "relative", "scorer": "mlp", "hidden": 6},
    {"recipe": "paper", "scorer": "mlp"},
    {"recipe": "relative", "capacity": "one"},
    {"recipe": "relative", "capacity": 0.5, "noise_at": "all"},
    {"recipe": "relative", "capacity": 0.25, "beta": 0.3},
    {"recipe": "relative", "noise_scale": "one", "score_norm": False},
    {"recipe": "relative", "stream_norm": True},
    {"recipe": "paper", "noise_scale": "rms", "capacity": 1.0},
    {"recipe": "paper", "stream_norm": False, "score_norm": True, "beta": 2.0},
    {"recipe": "merge"},
    {"recipe": "merge", "beta": 0.0},
    {"recipe": "merge", "capacity": 0.5, "noise_at": "all"},
    {"recipe": "paper", "noise_scale": "image", "beta": 0.3},
]


def method_for(kind="plain", **options):
    model = make(kind)
    reduce_(model, TNT(at=2, keep=0.5, **options))
    method = reduction_of(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return method


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_the_training_step_is_what_loops_say(options, prefix):
    method = method_for(**options).train()
    x = torch.randn(2, prefix + 7, 32, generator=torch.Generator().manual_seed(1)) * 1.7
    torch.manual_seed(9)
    ours = method.add_noise(replace(start(x, prefix), block=2)).x
    torch.manual_seed(9)
    chosen = method.config.resolved
    if chosen.capacity == "one":
        capacity = 1.0
    elif chosen.capacity == "drawn":
        capacity = 7 * float(torch.empty(()).uniform_(0.1, 0.9))
    else:
        capacity = 7 * chosen.capacity
    eps = torch.cat([torch.zeros(2, prefix, 32), torch.randn(2, 7, 32)], 1)
    with torch.no_grad():
        naive = noisy(
            x, eps, method.scorers["2"], prefix, capacity=capacity, noise_scale=chosen.noise_scale,
            stream_norm=chosen.stream_norm, beta=chosen.beta, score_norm=chosen.score_norm,
        )  # fmt: skip
    torch.testing.assert_close(ours, naive, atol=1e-5, rtol=1e-5)


def test_the_paper_recipe_is_the_authors_code():
    """One allocator of the authors' listing (their appendix), written with torch as they have it."""
    method = method_for(recipe="paper").train()
    x = torch.randn(3, 1 + 9, 32)
    torch.manual_seed(4)
    ours = method.add_noise(replace(start(x, 1), block=2)).x
    torch.manual_seed(4)
    head = method.scorers["2"].layers[0]
    share = 1 - torch.softmax(F.linear(x[:, 1:], head.weight, head.bias).squeeze(-1), dim=-1)
    noise = torch.randn(3, 9, 32) * share[:, :, None]
    theirs = F.layer_norm(x, (32,), eps=1e-6) + 0.02 * torch.cat([torch.zeros(3, 1, 32), noise], 1)
    torch.testing.assert_close(ours, theirs)


def test_capacity_drawn_lies_between_a_tenth_and_nine_tenths_and_varies():
    method = method_for(capacity="drawn")
    tokens = start(torch.randn(1, 10, 32), 0)
    drawn = torch.stack([method.capacity(tokens) for _ in range(200)]) / 10
    assert 0.1 <= drawn.min() < 0.2 and 0.8 < drawn.max() <= 0.9


@pytest.mark.parametrize("noise_blocks", [None, 3, (1, 4), (0, 5)])  # None: those of recipes that drop
@pytest.mark.parametrize("kind", ["plain", "registers", "no_cls"])
def test_noise_is_added_after_the_noisy_blocks_only_and_nothing_is_dropped(kind, noise_blocks):
    model = make(kind)
    blocks = {None: (1, 2, 3, 4, 5), 3: (3,)}.get(noise_blocks, noise_blocks)
    config = TNT(at=blocks[0], keep=0.5, similar=3, noise_blocks=noise_blocks, noise_at="all", recipe="relative")
    reduce_(model, config)
    assert noisy_in_a_pass(model) == blocks


def test_one_noisy_block_is_drawn_for_each_pass():
    model = reduce_(make("plain"), TNT(at=2, noise_blocks=(1, 2, 5), prune_prob=0.0))
    seen = [noisy_in_a_pass(model) for _ in range(40)]
    assert all(len(blocks) == 1 for blocks in seen)
    assert {blocks[0] for blocks in seen} == {1, 2, 5}


def noisy_in_a_pass(model):
    """The blocks after which a training pass changes tokens; it must change no prefix token and drop none."""
    method = reduction_of(model).train()
    changed = []

    def spy(module, args, out):
        tokens = args[0]
        prefix = tokens.prefix
        assert torch.equal(tokens.x[:, :prefix], out.x[:, :prefix])
        assert tokens.count == out.count
        if not torch.equal(tokens.x, out.x):
            changed.append(args[1].place.block)

    handle = method.register_forward_hook(spy)
    model(photos_for(model))
    handle.remove()
    return tuple(changed)


def test_scores_are_fp32_whatever_the_precision_around_them():
    method = method_for()
    tokens = replace(start(torch.randn(2, 20, 32), 1), block=2)
    exact = method.score(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(method.score(tokens), exact)
    assert method.to(torch.bfloat16).score(tokens).dtype == torch.float32


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_the_best_by_naive_scores_are_kept(options):
    method = method_for(**options).eval()
    x = torch.randn(2, 2 + 64, 32, generator=torch.Generator().manual_seed(2))
    kept = act(method, start(x, 2), Place(2), method.plan(64))
    with torch.no_grad():
        for b in range(2):
            scores = [float(score(method.scorers["2"], token, method.config.resolved.score_norm)) for token in x[b, 2:]]
            best = sorted(range(64), key=lambda i: scores[i], reverse=True)[:32]
            assert set(kept.index[b].tolist()) == set(best)
            assert torch.equal(kept.x[b, 2:], x[b, 2 + kept.index[b]])


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 24), seed=st.integers(0, 10_000), fold=st.booleans(), data=st.data())
def test_the_similarity_step_is_what_loops_say(n, seed, fold, data):
    remove = data.draw(st.integers(1, n // 2))
    x = torch.randn(2, n, 6, generator=torch.Generator().manual_seed(seed))
    groups = order(n, seed)
    ours = remove_similar(start(x, 0), remove, groups, fold)
    for b in range(2):
        tokens, sizes = without_similar(x[b], remove, groups.tolist(), fold)
        assert set(ours.index[b].tolist()) == set(tokens)
        for position, place in enumerate(ours.index[b].tolist()):
            torch.testing.assert_close(ours.x[b, position], tokens[place], atol=1e-5, rtol=1e-5)
            if fold:
                assert ours.size[b, position] == sizes[place]


def test_the_sequential_partition_drops_from_the_worse_half():
    method = method_for(partition="sequential", similar=6).eval()
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(2))
    scores = method.score(replace(start(x, 0), block=2))
    kept = act(method, start(x, 0), Place(2), method.plan(64))
    for b in range(2):
        ranked = scores[b].argsort(descending=True)[:38].tolist()
        gone = set(ranked) - set(kept.index[b].tolist())
        assert len(gone) == 6 and gone <= set(ranked[19:])


def test_a_merged_token_counts_by_its_size_in_mean_and_map_pooling():
    """Two equal halves of an image: merging equal tokens must not change what pooling sees."""
    for kind in ("no_cls", "avg_with_cls", "map_pool", "avgmax_include_prefix"):
        model = make(kind)
        reduce_(model, TNT(at=2, keep=0.5))
        prefix = model.num_prefix_tokens
        x = torch.randn(2, prefix + 4, 32)
        double = torch.cat([x, x[:, prefix:], x[:, prefix : prefix + 1]], 1)  # sizes 3, 2, 2, 2
        size = torch.tensor([[3.0, 2.0, 2.0, 2.0]]).expand(2, -1)
        with torch.inference_mode():
            pooled = model.pool_by_size(replace(start(x, prefix), size=size))
            torch.testing.assert_close(pooled, model.pool(double), atol=1e-5, rtol=1e-4)


def test_locations_without_a_scorer_are_refused():
    with pytest.raises(UsageError, match="at=5: no scorer there, because noise is learned at blocks 1 2 3"):
        reduce_(make("plain"), TNT(at=5, noise_blocks=(1, 2, 3)))
    with pytest.raises(UsageError, match="noise_blocks: 6 given; the model has 6 blocks"):
        reduce_(make("plain"), TNT(at=3, noise_blocks=(3, 6)))


def test_the_first_weights_do_not_touch_the_global_generator():
    state = torch.get_rng_state()
    first, second = method_for("plain"), method_for("plain")
    make("plain")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    reduce_(make("plain"), TNT(at=2))
    assert torch.equal(state, torch.get_rng_state())

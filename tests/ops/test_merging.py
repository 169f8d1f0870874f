"""Who stays, who goes, and where to: against loops, and what must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import chosen, cosine, folded
from tntprune.ops.merging import choose, fold, standardised
from tntprune.ops.tokens import start, take


def case(n: int, seed: int, sized: bool = True, batch: int = 2, width: int = 5, prefix: int = 0):
    """Tokens of sizes 1 to 4, each carrying as many patches, with scores and weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, prefix + n, width, generator=generator)
    size = torch.randint(1, 5, (batch, n), generator=generator).float() if sized else None
    score = standardised(torch.randn(batch, n, generator=generator))
    weight = torch.rand(batch, n, generator=generator) + 0.2
    return replace(start(x, prefix, follow=True), size=size), score, weight


def sizes_of(tokens) -> torch.Tensor:
    return torch.ones_like(tokens.index, dtype=torch.float32) if tokens.size is None else tokens.size


any_case = given(n=st.integers(2, 20), seed=st.integers(0, 10_000), sized=st.booleans(), data=st.data())
weights = st.sampled_from([0.0, 0.03, 0.1, 1.0])
lifts = st.sampled_from([None, torch.tensor(0.0), torch.tensor(1.4)])


@settings(max_examples=60, deadline=None)
@any_case
def test_they_do_what_loops_say(n, seed, sized, data):
    count, relevance, crowding = data.draw(st.integers(1, n - 1)), data.draw(weights), data.draw(weights)
    tokens, score, weight = case(n, seed, sized)
    stay, go, target, likeness = choose(score, tokens.patches, tokens.size, count, relevance, crowding)
    share = (3 * (likeness - 1)).exp() if data.draw(st.booleans()) else None
    lift = data.draw(st.sampled_from([None, 0.0, 1.0, 1.7]))
    out = fold(tokens, stay, go, target, weight, share, None if lift is None else torch.tensor(lift))
    for b in range(2):
        size = sizes_of(tokens)[b]
        expected, into = chosen(score[b], tokens.x[b], size, count, relevance, crowding)
        assert stay[b].tolist() == expected
        assert dict(zip(go[b].tolist(), stay[b, target[b]].tolist())) == into
        for i, one, cos in zip(go[b].tolist(), target[b].tolist(), likeness[b].tolist()):
            assert cos == pytest.approx(cosine(tokens.x[b, i], tokens.x[b, expected[one]]), abs=1e-5)
        shares = {} if share is None else dict(zip(go[b].tolist(), share[b].tolist()))
        x, sizes = folded(tokens.x[b], size, weight[b], expected, into, shares, lift or 0.0)
        torch.testing.assert_close(out.x[b], x, atol=1e-4, rtol=1e-4)
        assert out.size[b].tolist() == pytest.approx(sizes) and out.index[b].tolist() == expected


@settings(max_examples=60, deadline=None)
@any_case
def test_what_must_always_hold(n, seed, sized, data):
    """In two steps, the second of which meets tokens that are merged already."""
    prefix, relevance = data.draw(st.integers(0, 3)), data.draw(weights)
    first, _, _ = case(n, seed, sized, prefix=prefix)
    now = first
    for turn in range(2):
        if now.count < 2:
            break
        count = data.draw(st.integers(1, now.count - 1))
        _, score, weight = case(now.count, seed + turn)
        stay, go, target, _ = choose(score, now.patches, now.size, count, relevance, 0.0)
        everyone = torch.cat([stay, go], 1).sort(1).values
        assert torch.equal(everyone, torch.arange(now.count).expand(2, -1))  # each stays or goes, and none does both
        assert stay.shape == (2, count) and 0 <= target.min() and target.max() < count
        assert torch.equal(stay[:, 0], score.argmax(1))  # the best always stays, and comes first
        assert (score.gather(1, stay).diff(dim=1) <= 0).all()
        before, now = now, fold(now, stay, go, target, weight, norm_correction=data.draw(lifts))
        assert torch.equal(now.x[:, :prefix], first.x[:, :prefix])
        assert torch.equal(now.size.sum(1), sizes_of(first).sum(1))
        assert torch.equal(now.index, before.index.gather(1, stay))
        for b in range(2):
            alone = [place for place in range(count) if place not in target[b]]  # bit for bit what it was
            assert torch.equal(now.patches[b, alone], before.patches[b, stay[b, alone]])
            for patch in range(n):  # who carries a patch is known
                was = before.carrier[b, patch]
                if was in stay[b]:
                    assert stay[b, now.carrier[b, patch]] == was
                else:
                    assert now.carrier[b, patch] == target[b, go[b].tolist().index(was)]


def test_a_copy_of_a_more_relevant_token_goes_before_an_unlike_one_of_the_same_score():
    x = torch.eye(4)[[0, 0, 1, 2]][None] + 0.0  # the second is the first once more
    score = torch.tensor([[1.5, -0.5, -0.5, -0.5]])
    stay, go, target, _ = choose(score, x, None, 3, 0.1, 0.03)
    assert stay.tolist() == [[0, 2, 3]] and go.tolist() == [[1]] and target.tolist() == [[0]]
    stay, go, _, _ = choose(score.flip(1), x.flip(1), None, 3, 0.1, 0.03)
    assert stay.tolist() == [[3, 0, 1]] and go.tolist() == [[2]]


def test_what_was_merged_before_stays_for_longer():
    x = torch.eye(3)[None]
    score = torch.tensor([[1.0, -0.5, -0.5]])
    assert choose(score, x, torch.tensor([[1.0, 1.0, 9.0]]), 2, 0.1, 0.03)[0].tolist() == [[0, 2]]
    assert choose(score, x, torch.tensor([[1.0, 9.0, 1.0]]), 2, 0.1, 0.03)[0].tolist() == [[0, 1]]
    assert choose(score, x, torch.tensor([[1.0, 1.0, 9.0]]), 2, 0.1, 0.0)[0].tolist() == [[0, 1]]


@pytest.mark.parametrize("x", [torch.eye(6), torch.ones(6, 4), torch.zeros(6, 4)], ids=["unlike", "equal", "nothing"])
def test_of_equal_tokens_with_equal_scores_the_first_stay(x):
    """Nothing divides by zero, and no tie is left to chance."""
    score = standardised(torch.full((2, 6), 3.0))
    assert torch.equal(score, torch.zeros(2, 6))
    stay, go, target, _ = choose(score, x.expand(2, -1, -1), None, 4, 0.1, 0.03)
    assert stay.tolist() == [[0, 1, 2, 3]] * 2 and go.tolist() == [[4, 5]] * 2 and target.tolist() == [[0, 0]] * 2
    out = fold(start(x.expand(2, -1, -1), 0), stay, go, target, torch.ones(2, 6))
    assert out.x.isfinite().all() and out.size.tolist() == [[3, 1, 1, 1]] * 2


def test_equal_weights_give_the_mean_of_the_patches_and_a_large_one_wins():
    tokens, _, _ = case(4, 0, sized=False)
    stay, go = torch.tensor([[2, 0], [1, 3]]), torch.tensor([[1, 3], [0, 2]])
    target = torch.tensor([[0, 0], [1, 0]])
    plain = fold(tokens, stay, go, target, torch.full((2, 4), 7.0))
    torch.testing.assert_close(plain.x[0, 0], tokens.x[0, [1, 2, 3]].mean(0))
    torch.testing.assert_close(plain.x[1], (tokens.x[1, [1, 3]] + tokens.x[1, [2, 0]]) / 2)
    assert torch.equal(plain.x[0, 1], tokens.x[0, 0])
    uneven = fold(tokens, stay, go, target, torch.tensor([[1.0, 1e6, 1.0, 1.0]] * 2))
    torch.testing.assert_close(uneven.x[0, 0], tokens.x[0, 1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(uneven.size, plain.size)  # a weight is no size


def test_with_a_lift_of_one_a_mean_is_as_long_as_what_it_is_of():
    tokens, _, _ = case(4, 0, sized=False)
    stay, go = torch.tensor([[2, 0], [1, 3]]), torch.tensor([[1, 3], [0, 2]])
    target = torch.tensor([[0, 0], [1, 0]])
    plain = fold(tokens, stay, go, target, torch.ones(2, 4))
    long = fold(tokens, stay, go, target, torch.ones(2, 4), norm_correction=torch.tensor(1.0))
    torch.testing.assert_close(long.x[0, 0].norm(), tokens.x[0, [1, 2, 3]].norm(dim=1).mean())
    torch.testing.assert_close(F.normalize(long.x, dim=2), F.normalize(plain.x, dim=2))
    opposite = replace(tokens, x=torch.stack([tokens.x[0, 0], -tokens.x[0, 0]]).expand(2, -1, -1))
    one, other, first = torch.tensor([[0]] * 2), torch.tensor([[1]] * 2), torch.tensor([[0]] * 2)
    opposite = replace(opposite, index=opposite.index[:, :2], carrier=None)
    assert (
        fold(opposite, one, other, first, torch.ones(2, 2), norm_correction=torch.tensor(2.0)).x.norm(dim=2).max() < 1
    )
    assert (long.x.norm(dim=2) >= plain.x.norm(dim=2)).all() and torch.equal(long.x[0, 1], tokens.x[0, 0])


def test_an_image_does_not_depend_on_its_batch():
    tokens, score, weight = case(17, 3, batch=5, prefix=1)

    def done(some):
        part = replace(tokens, x=tokens.x[some], index=tokens.index[some], size=tokens.size[some], carrier=None)
        found = choose(score[some], part.patches, part.size, 6, 0.1, 0.03)
        return found, fold(part, *found[:3], weight[some])

    found, whole = done(slice(None))
    for b in range(5):
        own, out = done(slice(b, b + 1))
        assert all(torch.equal(a[0], c[b]) for a, c in zip(own, found))
        torch.testing.assert_close(out.x[0], whole.x[b])


def test_scores_are_standardised_image_by_image():
    score = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.01], [1.0], [30.0]]) + 4
    out = standardised(score)
    torch.testing.assert_close(out.mean(1), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.std(1, correction=0), torch.ones(3), atol=1e-3, rtol=0)
    assert torch.equal(out.argsort(1), score.argsort(1))


def test_gradients_reach_tokens_and_weights_and_are_right():
    tokens, score, weight = case(7, 1, prefix=1)
    found = choose(score.requires_grad_(), tokens.patches.requires_grad_(), tokens.size, 3, 0.1, 0.03)
    assert not any(part.requires_grad for part in found)
    x, weight = tokens.x.double().requires_grad_(), weight.double().requires_grad_()
    goal = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    lift = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)

    def loss(x, weight, lift):
        return (fold(replace(tokens, x=x), *found[:3], weight, norm_correction=lift).x * goal).sum()

    learned = (x, weight, lift)
    for grad, given_ in zip(torch.autograd.grad(loss(*learned), learned), learned):
        assert (grad[:, tokens.prefix :] if grad.ndim == 3 else grad).abs().sum() > 0
        step = torch.randn(given_.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():  # weights are fp32 inside, so a difference is taken over no small way
            near = [loss(*(v + s * 1e-2 * step if v is given_ else v for v in learned)) for s in (1, -1)]
        assert float((grad * step).sum()) == pytest.approx(float(near[0] - near[1]) / 2e-2, rel=1e-2)


def test_half_precision_around_it_changes_neither_the_choice_nor_the_tokens():
    tokens, score, weight = case(30, 5, prefix=1)
    found = choose(score, tokens.patches, tokens.size, 12, 0.1, 0.03)
    out = fold(tokens, *found[:3], weight)
    with torch.autocast("cpu", torch.bfloat16):
        again = choose(score, tokens.patches, tokens.size, 12, 0.1, 0.03)
        assert all(torch.equal(a, b) for a, b in zip(found, again))
        assert torch.equal(fold(tokens, *again[:3], weight).x, out.x)
    half = fold(replace(tokens, x=tokens.x.bfloat16()), *found[:3], weight)
    assert half.x.dtype == torch.bfloat16 and half.size.dtype == torch.float32
    torch.testing.assert_close(half.x.float(), out.x, atol=0.05, rtol=0.05)


def test_what_was_not_followed_is_not_followed():
    tokens, score, weight = case(6, 0)
    found = choose(score, tokens.patches, tokens.size, 2, 0.1, 0.03)
    assert fold(replace(tokens, carrier=None), *found[:3], weight).carrier is None
    assert take(tokens, found[0]).count == 2

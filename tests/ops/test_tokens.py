from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tntprune.ops.tokens import merge, order, shuffled, start, take

sizes = st.integers(2, 40)


def tokens_of(batch: int, n: int, prefix: int, follow: bool = True, width: int = 5):
    x = torch.randn(batch, prefix + n, width, generator=torch.Generator().manual_seed(n))
    return start(x, prefix, follow)


@settings(max_examples=40, deadline=None)
@given(n=sizes, prefix=st.integers(0, 5), seed=st.integers(0, 1000), data=st.data())
def test_take_twice_composes_to_the_grid_and_leaves_the_prefix(n, prefix, seed, data):
    tokens = tokens_of(2, n, prefix)
    generator = torch.Generator().manual_seed(seed)
    now = tokens
    for _ in range(2):
        k = data.draw(st.integers(1, now.count))
        keep = torch.stack([torch.randperm(now.count, generator=generator)[:k] for _ in range(2)])
        now = take(now, keep)
        assert now.count == k
        assert torch.equal(now.x[:, :prefix], tokens.x[:, :prefix])
        for b in range(2):
            places = now.index[b]
            assert len(places.unique()) == k and 0 <= places.min() and places.max() < n
            assert torch.equal(now.patches[b], tokens.patches[b, places])
            for patch in range(n):
                where = now.carrier[b, patch].item()
                assert (where == -1) if patch not in places else places[where] == patch


@settings(max_examples=40, deadline=None)
@given(n=st.integers(4, 30), prefix=st.integers(0, 3), seed=st.integers(0, 1000), data=st.data())
def test_merging_conserves_size_and_the_weighted_sum(n, prefix, seed, data):
    tokens = tokens_of(2, n, prefix)
    generator = torch.Generator().manual_seed(seed)
    now = tokens
    for _ in range(2):  # the second time sizes differ
        r = data.draw(st.integers(1, max(1, now.count // 2 - 1)))
        if now.count < 4:
            break
        orders = torch.stack([torch.randperm(now.count, generator=generator) for _ in range(2)])
        stay = data.draw(st.integers(0, now.count - r - 1))
        into = torch.randperm(now.count, generator=generator)[: now.count - r - stay]
        rest = torch.stack([order[~torch.isin(order, into)] for order in orders])
        alone, source = rest.split([stay, r], 1)
        before = now
        now = merge(now, alone, into, source, torch.randint(len(into), (2, r), generator=generator))
        for b in range(2):  # what nobody joined is bit for bit what it was
            for new, old in enumerate([*alone[b].tolist(), *into.tolist()]):
                assert now.index[b, new] == before.index[b, old]
                if before.size is None and now.size[b, new] == 1:
                    assert torch.equal(now.patches[b, new], before.patches[b, old])
        assert torch.equal(now.size.sum(1), torch.full((2,), float(n)))
        total = (now.patches * now.size[:, :, None]).sum(1)
        assert torch.allclose(total, tokens.patches.sum(1), atol=1e-4)
        assert torch.equal(now.x[:, :prefix], tokens.x[:, :prefix])
        counted = torch.stack([(now.carrier == position).sum(1) for position in range(now.count)], 1)
        assert torch.equal(counted.float(), now.size)  # who carries a patch is known


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2000), seed=st.integers(0, 2**40))
def test_the_order_is_a_permutation_that_only_depends_on_count_and_seed(n, seed):
    first = order(n, seed)
    torch.manual_seed(seed % 2**31)
    assert torch.equal(first.sort().values, torch.arange(n))
    assert torch.equal(first, order(n, seed))
    assert len(shuffled(torch.arange(n), seed).unique()) == n


def test_the_order_looks_random():
    n, seeds = 196, 400
    ranks = torch.stack([order(n, seed).argsort() for seed in range(seeds)]).double()
    assert (ranks.mean(0) - (n - 1) / 2).abs().max() < 5 * n / 12**0.5 / seeds**0.5  # no place is favoured
    centred = ranks - ranks.mean(1, keepdim=True)
    for pairs in (centred[1:] * centred[:-1], (centred[:, 1:] * centred[:, :-1])):  # seeds and neighbours
        assert (pairs.mean() / centred.square().mean()).abs() < 0.02


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    order(100, 3)
    assert torch.equal(before, torch.get_rng_state())


def test_nothing_is_followed_unless_asked_for():
    tokens = tokens_of(2, 6, 1, follow=False)
    kept = take(tokens, torch.tensor([[0, 3], [5, 1]]))
    assert kept.carrier is None and kept.size is None

"""Windows: tokens are compared with those near them alone, by what loops say."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from math import ceil, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_models
import tntprune
from configs import run, stirred
from conftest import make, photos_for
from merging_reference import Token, best_matches
from reference import chosen
from tntprune import DTEM, MCTF, TNT, PiToMe, ToFu, ToMe, UsageError, load_, macs, record, reduce_, restore_, save
from tntprune.backbones.attach import reduction_of
from tntprune.methods import from_dict, to_dict
from tntprune.methods.tome import match
from tntprune.ops import tokens as tokens_module
from tntprune.ops.merging import choose, comparisons, fold, standardised
from tntprune.ops.tokens import append, start, take
from tntprune.ops.windows import Windows, closest_near, compared_near, cut, number_of_windows, windows_of

GRIDS = [(1, 9), (8, 8), (6, 11), (3, 7), (67, 120), (13, 1)]
TNT_WINDOWS, TOME_WINDOWS = TNT(at=(1, 2), keep=0.6, window=4), ToMe(keep=0.8, window=4)


def window_of_each(index, grid, number):
    """For one image the positions of its tokens in each window, by a walk over the grid in bands that turns back."""
    rows, columns = grid
    bands = min(rows, max(1, round(rows / sqrt(rows * columns / number))))
    walk, standing = [], {place: position for position, place in enumerate(index) if place >= 0}
    for band in range(bands):
        inside = [row for row in range(rows) if row * bands // rows == band]
        for column in reversed(range(columns)) if band % 2 else range(columns):
            walk += [standing[row * columns + column] for row in inside if row * columns + column in standing]
    walk += [position for position, place in enumerate(index) if place < 0]
    ends = [part * len(walk) // number for part in range(number + 1)]
    return [walk[a:b] for a, b in zip(ends, ends[1:])]


def some(grid, count, seed=0, batch=2, width=5):
    """Tokens of which some of the grid are gone, others in each image, in any order."""
    generator = torch.Generator().manual_seed(seed)
    total = grid[0] * grid[1]
    x = torch.randn(batch, total, width, generator=generator)
    left = torch.stack([torch.randperm(total, generator=generator)[:count] for _ in range(batch)])
    return take(start(x, 0, follow=True, grid=grid), left), generator


@given(n=st.integers(1, 60), data=st.data())
def test_parts_are_alike_and_hold_each_token_once(n, data):
    parts = data.draw(st.integers(1, n))
    own = cut(n, parts, torch.device("cpu"))
    assert own.place.shape == own.real.shape == (parts, ceil(n / parts))
    assert own.place[own.real].tolist() == list(range(n)) and int(own.place.max()) < n
    assert int(own.real.sum(1).max() - own.real.sum(1).min()) <= 1
    assert (own.real.int().diff(dim=1) <= 0).all()  # what fills up is at the end
    assert own.place.flatten()[own.slot].tolist() == list(range(n)) and own.real.flatten()[own.slot].all()


@pytest.mark.parametrize("window", [2, 3, 16])
@pytest.mark.parametrize("grid", GRIDS)
def test_windows_are_those_of_a_walk_over_the_grid(grid, window):
    total = grid[0] * grid[1]
    for count in {total, ceil(total / 2), ceil(total / 5)}:
        tokens, _ = some(grid, count)
        tokens = append(tokens, torch.zeros(2, 1, 5))  # one without a place
        number = number_of_windows(count + 1, window)
        found = windows_of(tokens, window, (99, 99))
        if number == 1:
            assert found is None
            continue
        assert found.number == number
        for index, order in zip(tokens.index.tolist(), found.order.tolist()):
            assert order == list(chain(*window_of_each(index, grid, number)))


def test_before_any_token_goes_windows_are_squares():
    found = windows_of(start(torch.zeros(1, 48, 3), 0, grid=(8, 6)), 2, (1, 1))
    order = found.order[0].view(-1, 4)
    rows, columns = order // 6, order % 6
    assert found.number == 12
    assert (rows.amax(1) - rows.amin(1)).tolist() == (columns.amax(1) - columns.amin(1)).tolist() == [1] * 12


def test_tokens_that_do_not_tell_their_grid_have_the_models_or_are_a_row():
    tokens = start(torch.zeros(1, 24, 3), 0)
    own, other = windows_of(tokens, 2, (4, 6)), windows_of(tokens, 2, (5, 6))
    assert own.order.tolist() == windows_of(replace(tokens, grid=(4, 6)), 2, (5, 6)).order.tolist()
    assert other.order.tolist() == [list(range(24))]


@pytest.mark.parametrize("blocks", [False, True])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), sized=st.booleans(), data=st.data())
def test_the_tokens_that_stay_are_those_that_loops_say(blocks, seed, sized, data):
    grid = data.draw(st.sampled_from(GRIDS[:4]))
    n = data.draw(st.integers(5, grid[0] * grid[1]))
    count, window = data.draw(st.integers(2, n - 1)), data.draw(st.integers(2, 4))
    tokens, generator = some(grid, n, seed)
    size = torch.randint(1, 5, (2, n), generator=generator).float() if sized else None
    score = standardised(torch.randn(2, n, generator=generator))
    windows = windows_of(tokens, window, grid, most=count)
    if windows is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "TABLE", 40 if blocks else 2**20)
        stay, go, target, likeness = choose(score, tokens.patches, size, count, 0.5, 0.3, windows)
        longest = ceil(n / windows.number)
        assert comparisons(n, count, window) == windows.number * longest**2 * (
            1 if not blocks or windows.number <= max(1, 40 // longest**2) else 2
        )
    for b in range(2):
        sizes = torch.ones(n) if size is None else size[b]
        parts = window_of_each(tokens.index[b].tolist(), grid, windows.number)
        expected, into = chosen_in(parts, score[b], tokens.x[b], sizes, count)
        assert sorted(stay[b].tolist()) == sorted(expected)
        assert dict(zip(go[b].tolist(), stay[b, target[b]].tolist())) == into
        alike = torch.cosine_similarity(tokens.x[b, go[b]], tokens.x[b, stay[b, target[b]]])
        torch.testing.assert_close(likeness[b], alike, atol=1e-5, rtol=0)
    weight = torch.ones(2, n)
    out = fold(replace(tokens, size=size), stay, go, target, weight)
    assert out.count == count and torch.equal(out.size.sum(1), size.sum(1) if sized else torch.full((2,), float(n)))


def chosen_in(parts, score, x, size, count):
    """What `reference.chosen` says of each window by itself, with all windows' tokens ranked together."""
    worth, first = {}, []
    for part in parts:
        ranked = sorted(part, key=lambda i: -float(score[i]))
        first.append(ranked[0])
        for place, i in enumerate(ranked):
            alike = [float(torch.cosine_similarity(x[i], x[j], dim=0)) for j in ranked[:place]]
            far = max(1e-4, 1 - max([0.0, *alike]))
            worth[i] = far * 2.718281828459045 ** (0.5 * float(score[i])) * float(size[i]) ** 0.3
    rest = sorted((i for i in worth if i not in first), key=lambda i: -worth[i])
    stay = {*first, *rest[: count - len(first)]}
    into = {}
    for part in parts:
        among = [i for i in part if i in stay]
        for i in part:
            if i not in stay:
                into[i] = max(among, key=lambda j: float(torch.cosine_similarity(x[i], x[j], dim=0)))
    return list(stay), into


def test_one_window_says_what_all_pairs_say():
    """In each window by itself the choice is the one of `reference.chosen`."""
    tokens, generator = some((8, 8), 40)
    score = standardised(torch.randn(2, 40, generator=generator))
    order = torch.arange(40).expand(2, -1)
    stay, go, target, _ = choose(score, tokens.patches, None, 17, 0.5, 0.0, Windows(order, 1))
    for b in range(2):
        expected, into = chosen(score[b], tokens.x[b], torch.ones(40), 17, 0.5, 0.0)
        assert stay[b].tolist() == expected and dict(zip(go[b].tolist(), stay[b, target[b]].tolist())) == into
    assert windows_of(tokens, 7, (8, 8)) is None and windows_of(tokens, None, (8, 8)) is None


def test_padding_never_stays_where_there_are_tokens_enough():
    tokens, generator = some((8, 8), 40)
    size = torch.ones(2, 40)
    size[1, 10:] = 0.0  # 30 of 40 are padding: whole windows of it
    index = torch.where(size > 0, tokens.index, -1)
    tokens = replace(tokens, size=size, index=index, carrier=None)
    score = standardised(torch.randn(2, 40, generator=generator))
    stay, go, target, likeness = choose(
        score, tokens.patches, size, 10, 0.5, 1.0, windows_of(tokens, 2, (8, 8), most=10)
    )
    assert sorted(stay[1].tolist()) == list(range(10)) and (likeness >= -1).all()
    out = fold(tokens, stay, go, target, torch.ones(2, 40), (1.5 * (likeness - 1)).exp(), torch.tensor(1.4))
    assert out.x.isfinite().all() and out.size[1].tolist() == [1.0] * 10


@pytest.mark.parametrize("table", [30, 2**20])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), odd=st.integers(0, 1), data=st.data())
def test_pairs_are_those_that_loops_say(table, seed, odd, data):
    grid = data.draw(st.sampled_from(GRIDS[:4]))
    n = data.draw(st.integers(5, grid[0] * grid[1]))
    gone, window = data.draw(st.integers(1, n // 2)), data.draw(st.integers(2, 4))
    tokens, _ = some(grid, n, seed)
    windows = windows_of(tokens, window, grid)
    if windows is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "TABLE", table)
        stay, into, source, target = match(tokens.patches, gone, odd, windows)
    for b in range(2):
        walk = list(chain(*window_of_each(tokens.index[b].tolist(), grid, windows.number)))
        groups, edges = (walk[odd::2], walk[1 - odd :: 2]), []
        parts = [
            [group[part * len(group) // windows.number : (part + 1) * len(group) // windows.number] for group in groups]
            for part in range(windows.number)
        ]
        for first, second in parts:
            made = [[Token(None, tokens.x[b, i], i, None) for i in group] for group in (first, second)]
            edges += [(likeness, a.place, second[best]) for likeness, a, best in best_matches(*made)]
        edges.sort(key=lambda edge: -edge[0])
        assert dict(zip(source[b].tolist(), into[b, target[b]].tolist())) == {a: to for _, a, to in edges[:gone]}
        assert into[b].tolist() == groups[1]
        assert stay[b].tolist() == [a for a in groups[0] if a not in source[b]]


def test_what_is_counted_is_what_is_computed(monkeypatch):
    products = []
    plain = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: products.append((a, b)) or plain(a, b))
    closest_near(torch.randn(1, 21, 4), torch.randn(1, 20, 4), 6)
    ((a, b),) = products
    assert compared_near(21, 20, 6) == a.shape[1] * a.shape[2] * b.shape[3] == 6 * 4 * 4


@pytest.mark.parametrize("kind", ["plain", "registers", "non_square", "dinov3"])
@pytest.mark.parametrize("config", [TNT_WINDOWS, TOME_WINDOWS, ToMe(r=9), ToFu(r=9)], ids=lambda config: config.method)
def test_a_window_that_holds_all_is_none_bit_for_bit(kind, config):
    model = stirred(make(kind), config.changed(window=None))
    reduction_of(model).warned = True
    images = photos_for(model)
    whole, learned = run(model, images), reduction_of(model).state_dict()
    found = []
    for window in (100, 3):
        reduce_(model, config.changed(window=window))
        reduction_of(model).load_state_dict(learned)
        found.append(run(model, images))
    assert torch.equal(found[0], whole) and not torch.equal(found[1], whole)


@pytest.mark.parametrize("config", [TNT(at=1, keep=0.5, window=3), ToMe(at=1, r=30, window=3)], ids=["tnt", "tome"])
@pytest.mark.parametrize("size", [(32, 32), (24, 44), (16, 64)])  # 16 x 64 has as many patches as the model's own
def test_patches_go_into_tokens_of_their_own_window_in_images_of_any_shape(config, size):
    model = stirred(make("dynamic"), config)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with record(model) as trace:
        run(model, images)
    grid = size[0] // 4, size[1] // 4
    total = grid[0] * grid[1]
    parts = window_of_each(list(range(total)), grid, number_of_windows(total, 3))
    own = {place: number for number, part in enumerate(parts) for place in part}
    near = 0 if config.method == "tnt" else 1  # ToMe's groups are cut one by one, which may differ by a token
    for carrier in trace.carrier[1].tolist():
        assert any(place != to for place, to in enumerate(carrier))
        assert all(abs(own[place] - own[to]) <= near for place, to in enumerate(carrier))


def test_macs_are_fewer_and_the_counts_are_the_same():
    model = make("plain")
    for config in (TNT_WINDOWS, TOME_WINDOWS):
        near, whole = (macs(reduce_(model, config.changed(window=window))) for window in (4, None))
        assert near.tokens == whole.tokens and sum(near.reduction.values()) < sum(whole.reduction.values())
        restore_(model)


def test_gradients_reach_what_is_learned():
    model = stirred(make("plain"), TNT(at=(1, 3), keep=0.5, window=3)).train()
    method = reduction_of(model)
    for seed in range(40):  # until a batch is drawn in which tokens go
        torch.manual_seed(seed)
        model(photos_for(model)).square().sum().backward()
    for name in ("merge_weights", "merge_gates", "norm_corrections"):
        for value in getattr(method, name).values():
            assert value.grad.isfinite().all() and value.grad.abs().sum() > 0
    assert all(value.grad.isfinite().all() for value in method.parameters())


def test_a_saved_reduction_keeps_its_window_and_may_be_given_another(tmp_path):
    model = stirred(make("plain"), TNT_WINDOWS)
    images = photos_for(model)
    expected = run(model, images)
    save(model, tmp_path / "run")
    torch.testing.assert_close(run(load_(make("plain"), tmp_path / "run"), images), expected, atol=0, rtol=0)
    assert reduction_of(load_(make("plain"), tmp_path / "run", window=None)).config.window is None


@pytest.mark.parametrize("config", [TNT_WINDOWS, TOME_WINDOWS], ids=lambda config: config.method)
@pytest.mark.parametrize("kind", ["registers", "siglip2_vision"])
def test_other_packages_models_take_windows(kind, config):
    model = hf_models.make(kind)
    images = hf_models.photos_for(kind)
    reduce_(model, config.changed(**({"at": (1, 2)} if config.at else {})))
    reduction_of(model).warned = True
    answer = tntprune.backbones.base.find_backbone(model).output
    with torch.inference_mode():
        whole = answer(model, images)
        alone = torch.cat([answer(model, image[None]) for image in images])
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-4)


def test_bad_windows_are_refused_in_one_line():
    for kind in (TNT, ToMe, ToFu, DTEM):
        for window in (1, 0, -3, 2.5, True, "8", 2**40):
            with pytest.raises(UsageError, match=r"window=.*: expected a"):
                kind(window=window)
    with pytest.raises(UsageError, match="window=8: nothing is merged; expected None, or how='merge'"):
        TNT(how="drop", window=8)
    for kind in (PiToMe, MCTF, tntprune.ATC):
        with pytest.raises(UsageError, match=f"window=8: {kind.method} compares all tokens; expected None, or ToMe"):
            kind(window=8)
        assert "window" not in to_dict(kind()) and from_dict(to_dict(kind())) == kind()
        with pytest.raises(UsageError, match="has no option 'window'; it has at"):
            kind().changed(window=8)

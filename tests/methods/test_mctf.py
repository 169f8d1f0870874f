"""MCTF against loops over images and tokens, written from the paper."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

from configs import first
from conftest import SMALL, make, photos_for
from reference import check_equal_tokens, check_whole, cosine, first_half
from tntprune import MCTF, ToMe, UsageError, UserError, macs, reduce_
from tntprune.backbones.attach import reduction_of
from tntprune.methods.base import Layout
from tntprune.methods.mctf import MultiCriteriaFusion, match
from tntprune.methods.steps import Place, Step
from tntprune.ops import tokens as ops
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import start


class Token:
    """One patch token: its vector, what is compared of it, the attention it receives, and what it stands for."""

    def __init__(self, x, feature, attention, place, patches, weight=None):
        self.x, self.feature, self.attention, self.place, self.patches = x, feature, attention, place, patches
        self.weight = attention * len(patches) if weight is None else weight  # in means


def fused(members, average):
    """Several tokens become one, which has the place of the first."""
    weight = sum(m.weight for m in members)
    x, feature = (sum(getattr(m, name) * m.weight for m in members) / weight for name in ("x", "feature"))
    if average == "mlerp" and len(members) > 1:
        x = x * max(m.x.norm() for m in members) / x.norm()
    patches = sorted(patch for m in members for patch in m.patches)
    return Token(x, feature, sum(m.attention for m in members), members[0].place, patches, weight)


def once(tokens, gone, prefix, config):
    """One pass over one image: positions count the prefix tokens, even ones are A and odd ones B."""
    group_a, group_b = ([t for i, t in enumerate(tokens, prefix) if i % 2 == part] for part in (0, 1))

    unit = {t: [v / math.hypot(*t.feature.tolist()) for v in t.feature.tolist()] for t in tokens}

    def attraction(a, b):
        alike = (1 + sum(p * q for p, q in zip(unit[a], unit[b]))) / 2
        heard, size = 1 / (a.attention * b.attention), 1 / (len(a.patches) * len(b.patches))
        return alike**config.similarity_power * heard**config.attention_power * size**config.size_power

    pairs = {(a, b): attraction(a, b) for a in group_a for b in group_b}
    into = {}

    def join(those, others, count):
        best = {one: max(others, key=lambda other: pairs.get((one, other), pairs.get((other, one)))) for one in those}
        ranked = sorted(those, key=lambda one: -pairs.get((one, best[one]), pairs.get((best[one], one))))
        into.update({one: best[one] for one in ranked[:count]})

    join(group_a, group_b, gone // 2)
    left = [a for a in group_a if a not in into]
    join(group_b, left, gone - gone // 2)

    def end(token):
        return end(into[token]) if token in into else token

    groups = [[t, *(o for o in tokens if o in into and end(o) is t)] for t in left + group_b if t not in into]
    return [fused(group, config.average) for group in groups]


def down_to(tokens, leaving, prefix, config):
    """As many passes as it takes."""
    while len(tokens) > leaving:
        tokens = once(tokens, min(len(tokens) - leaving, len(tokens) // 2), prefix, config)
    return tokens


def naive(model, image, config):
    """Logits of one image, and after each block where tokens go, for each patch the place of the token it is in."""
    method, prefix = reduction_of(model), model.num_prefix_tokens
    leaving = {step.place: step.leaving for step in method.steps(method.layout.patches)}
    x, carriers = model.embed(image[None])[0], {}
    places = list(range(x.shape[1] - prefix))
    patches = [[i] for i in places]

    def reduced(x, heads, left):
        nonlocal places, patches
        attention = heads.map()[0].mean((0, 1))[prefix:].tolist()  # over heads, then over rows
        key = heads.key[0, :, prefix:]
        features = {"x": x[0, prefix:], "mean": key.mean(0), "concat": key.transpose(0, 1).flatten(1)}[config.metric]
        tokens = [Token(*own) for own in zip(x[0, prefix:], features, attention, places, patches, strict=True)]
        tokens = down_to(tokens, left, prefix, config)
        places, patches = [t.place for t in tokens], [t.patches for t in tokens]
        return torch.cat([x[0, :prefix], torch.stack([t.x for t in tokens])])[None]

    for number, _ in enumerate(model.blocks, 1):
        sizes = torch.tensor([1.0] * prefix + [float(len(p)) for p in patches])
        x, heads = first_half(model, number, x, bias=sizes.log()[None, None, None] if config.proportional else None)
        for place in (Place(number, True), Place(number)):
            if not place.inside:
                x = model.opened(number).mlp_half(x)
            if place in leaving:
                x = reduced(x, heads, leaving[place])
                carrier = {p: place for own, place in zip(patches, places) for p in own}
                carriers[number] = [carrier[p] for p in range(len(carrier))]
    x = model.norm(x)
    if model.global_pool == "token":
        return model.forward_head(x)[0], carriers
    total = sum(x[0, prefix + i] * len(p) for i, p in enumerate(patches))
    return model.head(model.fc_norm(total / sum(map(len, patches)))), carriers


WHOLE = {
    "as published": MCTF(r=7),
    "clamped": MCTF(at=(2, 3, 4), r=(5, 40, 3)),
    "after": MCTF(at=(1, 4), r=9, inside=False),
    "keys": MCTF(at=(2, 3), r=11, metric="mean", attention_power=0.5),
    "all keys": MCTF(at=(2, 3), r=10, metric="concat", size_power=0.4),
    "plain attention": MCTF(r=6, proportional=False),
    "norms": MCTF(at=(2, 4), keep=0.4, average="mlerp"),
    "several passes": MCTF(at=(2, 4), keep=0.3, size_power=0.3, attention_power=0.2),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", first(("plain", "distilled", "registers", "avg_with_cls"), ("plain", "distilled")))
def test_whole_models_equal_the_loops(kind, name):
    model = reduce_(make(kind), WHOLE[name])
    images = photos_for(model, 2)
    with torch.inference_mode():
        expected = [naive(model, image, WHOLE[name]) for image in images]
    check_whole(model, images, expected)


def looked_at(n, prefix, seed):
    """Two images' tokens of six numbers, and a block's heads with its map."""
    generator = torch.Generator().manual_seed(seed)
    x, query, key = (torch.randn(2, prefix + n, 6, generator=generator) for _ in range(3))
    query, key = (one.unflatten(2, (2, 3)).transpose(1, 2) for one in (query, key))
    heads = Heads(query, key, key, scale=1.0)
    return start(x, prefix, follow=True), heads


def method_for(config, prefix, patches):
    layout = Layout("test", 6, 6, prefix, (1, patches), cls=prefix > 0, heads=2, attn_dim=6, opens=True)
    return MultiCriteriaFusion(config, layout)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 23), prefix=st.integers(0, 5), seed=st.integers(0, 999), data=st.data())
def test_one_step_equals_the_loops(n, prefix, seed, data):
    leaving, power = data.draw(st.integers(1, n - 1)), data.draw(st.sampled_from([0.0, 0.05, 1.0]))
    tokens, heads = looked_at(n, prefix, seed)
    config = MCTF(at=1, tokens=leaving, attention_power=power, size_power=power / 2)
    found = method_for(config, prefix, n)(tokens, Step(Place(1, True), n, leaving, leaving), heads)
    assert torch.equal(found.x[:, :prefix], tokens.x[:, :prefix])
    assert found.size.sum(1).tolist() == [n, n]
    for b in range(2):
        attention = heads.map()[b].mean((0, 1))[prefix:].tolist()
        image = [Token(x, x, a, i, [i]) for i, (x, a) in enumerate(zip(tokens.patches[b], attention))]
        image = down_to(image, leaving, prefix, config)
        torch.testing.assert_close(found.patches[b], torch.stack([t.x for t in image]), atol=1e-5, rtol=1e-5)
        assert found.index[b].tolist() == [t.place for t in image]
        for position, token in enumerate(image):
            assert (found.carrier[b] == position).nonzero().flatten().tolist() == token.patches


def test_a_token_that_has_just_taken_one_in_may_go_on():
    """Published: A goes into B, and then B into what is left of A. All three end in one."""
    x = torch.tensor([[1.0, 0.0], [0.99, 0.1], [-1.0, 0.2], [-1.0, 1.0], [0.9, 0.3], [0.0, -1.0]])[None]
    stay, source, target = match(x, torch.zeros(1, 6), 2, 0, 1.0)  # A: 0, 2, 4; B: 1, 3, 5
    assert stay.tolist() == [[2, 4, 3, 5]]
    assert source.tolist() == [[0, 1]] and target.tolist() == [[1, 1]]  # 0 into 1, and both into 4


@pytest.mark.parametrize("kind", ["plain", "no_cls", "eva02", "beit"])
def test_large_models_hold_no_map_and_give_the_same(kind, monkeypatch):
    model = make(kind)
    images, config = photos_for(model), MCTF(at=(2, 4), keep=0.4)
    with torch.inference_mode():
        expected = reduce_(model, config)(images)
        assert [block.sees for block in reduction_of(model).plan(64)[1:]] == ["", "map", "", "map", "", ""]
        monkeypatch.setattr(ops, "TABLE", 100)  # a few rows at a time
        reduce_(model, config)
        assert [block.sees for block in reduction_of(model).plan(64)[1:]] == ["", "heads", "", "heads", "", ""]
        torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)


def test_it_is_tome_where_only_likeness_counts():
    """All that is different then are the weights of the mean, which equal attention makes the same."""
    x = torch.randn(2, 1 + 12, 6)
    heads = Heads(*(torch.zeros(2, 2, 13, 3) for _ in range(3)), scale=1.0)
    step, tokens = Step(Place(1, True), 12, 11, 11), start(x, 1)
    config = MCTF(at=1, r=1, attention_power=0.0, size_power=0.0)
    found = method_for(config, 1, 12)(tokens, step, heads)
    pairs = ((a, b) for a in range(1, 12, 2) for b in range(0, 12, 2))
    a, b = max(pairs, key=lambda pair: cosine(tokens.patches[0, pair[0]], tokens.patches[0, pair[1]]))
    place = found.index[0].tolist().index(a)  # one token goes, from B
    torch.testing.assert_close(found.patches[0, place], (tokens.patches[0, a] + tokens.patches[0, b]) / 2)


@pytest.mark.parametrize("kind", ["plain", "distilled", "avg_with_cls", "no_cls", "map_pool"])
def test_equal_tokens_merge_without_a_trace(kind):
    """A token of size s counts like s equal ones: an image of equal patches comes out as if nothing was fused."""
    check_equal_tokens(make(kind), MCTF(r=9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "avg_with_cls", "test_vit4"])
def test_sizes_are_exact_and_the_precision_stays(kind, dtype):
    model = reduce_(make(kind), MCTF(r=9)).to(dtype)
    seen = []
    reduction_of(model).register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.inference_mode():
        logits = model(photos_for(model).to(dtype))
    assert logits.dtype == dtype and logits.isfinite().all()
    assert len(seen) == len(reduction_of(model).steps(reduction_of(model).layout.patches))
    for tokens in seen:
        assert tokens.x.dtype == dtype
        assert tokens.size.sum(1).tolist() == [reduction_of(model).layout.patches] * 3


def test_attention_and_sizes_of_nothing_are_no_trouble():
    tokens, _ = looked_at(8, 1, 0)
    query = torch.zeros(2, 2, 9, 3)
    key = torch.full_like(query, -1e4)
    key[:, :, 0] = 1e4  # all attention goes to the CLS token
    query[..., 0] = 1.0
    found = method_for(MCTF(at=1, tokens=3), 1, 8)(tokens, Step(Place(1, True), 8, 3, 3), Heads(query, key, key, 1.0))
    assert found.x.isfinite().all() and found.size.sum(1).tolist() == [8, 8]


def test_gradients_flow_to_every_token_and_to_no_weight():
    tokens, heads = looked_at(10, 1, 3)
    x = tokens.x.requires_grad_()
    query = heads.query.requires_grad_()
    found = method_for(MCTF(at=1, r=4), 1, 10)(tokens, Step(Place(1, True), 10, 6, 6), heads)
    found.x.square().sum().backward()
    assert (x.grad.abs().sum(2) > 0).all() and query.grad is None


def test_where_it_acts():
    at = [step.place for step in reduction_of(reduce_(make("plain"), MCTF(r=3))).steps(64)]
    assert at == [Place(block, True) for block in range(2, 7)]  # as published, not in the first
    at = [step.place for step in reduction_of(reduce_(make("plain"), MCTF(r=3, inside=False))).steps(64)]
    assert at == [Place(block) for block in range(2, 6)]
    assert MCTF().blocks(1) == (1,) and MCTF(inside=False).blocks(1) == () == ToMe(inside=False).blocks(1)
    assert MCTF(r=(1, 2, 3, 4, 5)).blocks(6) == (2, 3, 4, 5, 6)


def test_costs_are_those_of_the_comparisons_and_of_one_sum_for_each_token(monkeypatch):
    model = make("plain")  # 64 patches, 4 heads of 8, width 32
    for metric, width in (("mean", 8), ("concat", 32), ("x", 32)):
        found = macs(reduce_(model, MCTF(at=3, r=9, metric=metric)))
        assert found.reduction == {3: 32 * 32 * width + 9 * 32}
        assert found.tokens == [64, 64, 64, 55, 55, 55] and found.mlp_tokens == [64, 64, 55, 55, 55, 55]
    assert macs(reduce_(model, MCTF(at=3, tokens=7))).reduction == {
        3: (32 * 32 + 16 * 16 + 8 * 8 + 4 * 4) * 32 + 57 * 32  # to 32, 16, 8 and then 7
    }
    monkeypatch.setattr(ops, "TABLE", 100)  # the map is made again, and what goes back is compared again
    found = macs(reduce_(model, MCTF(at=3, r=9)))
    assert found.reduction == {3: 65**2 * 32 + 32 * 32 * 32 + (32 - 4) * 32 * 32 + 9 * 32}


def test_blocks_that_do_not_open_are_refused():
    model = VisionTransformer(**SMALL, block_fn=ParallelScalingBlock)
    with pytest.raises(UserError, match="mctf cannot be applied here: it reads the attention of blocks"):
        reduce_(model, MCTF(at=2, inside=False, metric="x", proportional=False))


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"at": 0}, "at=0: no block has been seen"),
        ({"r": -1}, "r=-1"),
        ({"r": 8, "keep": 0.5}, "r was given with keep or tokens"),
        ({"similarity_power": -1.0}, "similarity_power=-1.0"),
        ({"attention_power": math.nan}, "attention_power=nan"),
        ({"size_power": "large"}, "size_power='large'"),
    ],
)
def test_bad_options_say_what_is_expected(given, word):
    with pytest.raises(UsageError) as caught:
        MCTF(**given)
    assert word in str(caught.value) and "expected" in str(caught.value)


def test_it_says_where_its_options_do_not_fit_the_model():
    with pytest.raises(UsageError, match="2 values for 5 location"):
        reduce_(make("plain"), MCTF(r=(1, 2)))

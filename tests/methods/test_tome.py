"""ToMe against loops over images and tokens, written from the paper."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

import tntprune
from conftest import SMALL, make, photos_for
from merging_reference import Token, merged, merged_to, naive, norm
from reference import check_whole
from tntprune import ToMe, UsageError, UserError, load_, macs, record, reduce_, save
from tntprune.backbones.attach import reduction_of
from tntprune.methods import Combination, Random, from_dict, implementation, to_dict
from tntprune.methods.steps import Place, Step, Turn
from tntprune.ops.tokens import merge, start
from tntprune.system.storage import read_metadata

WHOLE = {
    "all": (ToMe(r=7), dict.fromkeys(range(1, 7), 7)),
    "clamped": (ToMe(at=(2, 3, 4), r=(5, 40, 3)), {2: 5, 3: 40, 4: 3}),
    "decreasing": (ToMe(r=5, decreasing=True), {1: 10, 2: 8, 3: 6, 4: 4, 5: 2}),
    "after": (ToMe(at=(1, 4), r=9, inside=False), {1: 9, 4: 9}),
    "concat": (ToMe(at=(2, 3), r=11, metric="concat"), {2: 11, 3: 11}),
    "tokens": (ToMe(at=(2, 3), r=11, metric="x"), {2: 11, 3: 11}),
    "plain attention": (ToMe(r=6, proportional=False), dict.fromkeys(range(1, 7), 6)),
    "mlerp": (ToMe(r=9, average="mlerp"), dict.fromkeys(range(1, 7), 9)),
    "several passes": (ToMe(at=(2, 4), keep=0.3), {}),
    "several passes over tokens": (ToMe(at=2, keep=0.15, metric="x", inside=False), {}),
    "several passes, mlerp": (ToMe(at=(2, 4), keep=0.3, average="mlerp"), {}),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", ["plain", "distilled", "registers", "avg_with_cls", "non_square", "qk_norm"])
def test_whole_models_equal_the_loops(kind, name):
    config, r = WHOLE[name]
    model = make(kind)
    images = photos_for(model, 2)
    with torch.inference_mode():
        expected = [naive(model, image, config, r) for image in images]
    check_whole(reduce_(model, config), images, expected)


def method_for(config, prefix, patches, width=6):
    layout = tntprune.methods.base.Layout(
        "test", width, 6, prefix, (1, patches), cls=prefix > 0, heads=2, attn_dim=width, opens=True
    )
    return implementation(ToMe)(config, layout)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 23), prefix=st.integers(0, 5), seed=st.integers(0, 999), data=st.data())
def test_one_step_equals_the_loops(n, prefix, seed, data):
    leaving = data.draw(st.integers(1, n - 1))
    generator = torch.Generator().manual_seed(seed)
    tokens = start(torch.randn(2, prefix + n, 6, generator=generator), prefix, follow=True)
    method = method_for(ToMe(at=1, tokens=leaving, metric="x"), prefix, n)
    found = method(tokens, Step(Place(1, True), n, leaving, leaving))
    assert torch.equal(found.x[:, :prefix], tokens.x[:, :prefix])
    assert found.size.sum(1).tolist() == [n, n]
    for b in range(2):
        image = [Token(tokens.patches[b, i], tokens.patches[b, i], i, [i]) for i in range(n)]
        image = merged_to(image, leaving, prefix)
        torch.testing.assert_close(found.patches[b], torch.stack([t.x for t in image]), atol=1e-5, rtol=1e-5)
        assert found.index[b].tolist() == [t.place for t in image]
        assert found.size[b].tolist() == [len(t.patches) for t in image]
        for position, token in enumerate(image):
            assert (found.carrier[b] == position).nonzero().flatten().tolist() == token.patches


@pytest.mark.parametrize(("prefix", "left"), [(0, [1]), (1, [0]), (2, [1]), (5, [0])])
def test_prefix_tokens_decide_who_is_in_which_set(prefix, left):
    """Of two patches the first is in B, and stays, where the number of prefix tokens is odd."""
    tokens = start(torch.randn(1, prefix + 2, 6), prefix)
    step = Step(Place(1, True), 2, 1, 1)
    found = method_for(ToMe(at=1, r=1, metric="x"), prefix, 2)(tokens, step)
    assert found.index.tolist() == [left] and found.size.tolist() == [[2.0]]


@given(n=st.integers(1, 300), prefix=st.integers(0, 5), r=st.integers(0, 400))
def test_r_is_clamped_as_published_and_a_always_holds_as_many(n, prefix, r):
    step = ToMe(r=r).step(Turn(Place(1, True), 0, 12), n, n)
    gone = min(r, n // 2)
    assert (0 if step is None else step.entering - step.leaving) == gone
    assert gone <= sum((prefix + i) % 2 == 0 for i in range(n))


@pytest.mark.parametrize("kind", ["plain", "distilled", "no_cls"])
def test_more_than_there_is_merges_half_each_time_down_to_one_token(kind):
    model = make(kind)
    images = photos_for(model)
    reduce_(model, ToMe(r=1000))
    assert [s.leaving for s in reduction_of(model).steps(64)] == [32, 16, 8, 4, 2, 1]
    assert [s.leaving for s in reduction_of(model).steps(45)] == [23, 12, 6, 3, 2, 1]
    with record(model) as trace, torch.inference_mode():
        assert model(images).isfinite().all()
    assert trace.kept[6].shape == (3, 1)


def published_schedule(r, of):
    """From 2r to 0 in even steps, each value cut to a whole number: the authors' (r, -1)."""
    fall = 2 * r / (of - 1)
    return [int(2 * r - fall * number) for number in range(of)]


def test_a_falling_r_is_the_published_schedule():
    found = [ToMe(r=13, decreasing=True).merged(number, 12) for number in range(12)]
    assert found == [26, 23, 21, 18, 16, 14, 11, 9, 7, 4, 2, 0] and sum(found) == 151
    model = reduce_(make("plain"), ToMe(r=4, decreasing=True))  # 8, 6.4, 4.8, 3.2, 1.6, 0
    assert [s.entering - s.leaving for s in reduction_of(model).steps(64)] == [8, 6, 4, 3, 1]


@given(r=st.integers(0, 60), of=st.integers(2, 40))
def test_a_falling_r_never_merges_more_than_the_same_r_everywhere(r, of):
    config = ToMe(r=r, decreasing=True)
    found = [config.merged(number, of) for number in range(of)]
    assert found == published_schedule(r, of)
    assert r * of - of < sum(found) <= r * of
    assert found[0] == 2 * r and found[-1] == 0 and found == sorted(found, reverse=True)


OLD = {  # what version 0.1 saved, which rounded to the nearest
    "version": 1, "method": "tome", "at": None, "keep": None, "tokens": None, "r": [13], "decreasing": True,
    "inside": True, "metric": "mean", "proportional": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "depth", "r"),
    [
        ({}, 12, (26, 24, 21, 19, 17, 14, 12, 9, 7, 5, 2, 0)),  # 156 in all
        ({"inside": False}, 13, (26, 24, 21, 19, 17, 14, 12, 9, 7, 5, 2, 0)),  # not after the last
        ({"at": [2, 4, 6, 7], "r": None}, None, (16, 11, 5, 0)),
        ({"at": [3]}, 12, (13,)),
        ({"decreasing": False}, 12, (13,)),
    ],
)
def test_an_older_file_merges_as_many_as_when_it_was_saved(changes, depth, r):
    data = OLD | changes
    config = from_dict(data, depth)
    assert (config.r, config.decreasing) == (r, False)
    assert from_dict({"version": 1, "method": "combination", "parts": [data, data]}, depth).parts == (config, config)


def test_an_older_saved_reduction_gives_what_it_gave(tmp_path):
    model = make("plain")
    save(reduce_(model, ToMe(r=4, decreasing=True)), tmp_path)
    path = tmp_path / "reducer.safetensors"
    about = read_metadata(path)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    about["config"] = json.dumps(OLD | {"r": [4]})
    save_file(tensors, path, metadata=about)
    steps = reduction_of(load_(make("plain"), tmp_path)).steps(64)
    assert [step.entering - step.leaving for step in steps] == [8, 6, 5, 3, 2]
    with pytest.raises(UsageError, match=r"falls from 8 to 0; .*decreasing=True"):
        load_(make("plain"), tmp_path, r=3)
    for falls in (True, False):
        changed = load_(make("plain"), tmp_path, r=3, decreasing=falls)
        assert reduction_of(changed).config == ToMe(r=3, decreasing=falls)
    with pytest.raises(UserError, match="depth 6, given one of 12"):
        load_(VisionTransformer(**{**SMALL, "depth": 12}), tmp_path)


def test_a_newer_file_falls_as_published():
    config = ToMe(r=13, decreasing=True)
    assert from_dict(json.loads(json.dumps(to_dict(config))), 12) == config


def test_each_location_on_its_own_merges_what_it_does_among_the_others():
    falling = ToMe(at=(2, 4, 6), r=4, decreasing=True)
    assert falling.singles(6) == [ToMe(at=2, r=8), ToMe(at=4, r=4), ToMe(at=6, r=0)]
    assert ToMe(at=3, r=4, decreasing=True).merged(0, 1) == 4  # one location has nothing to fall to
    assert ToMe(r=(1, 2, 3)).singles(3) == [ToMe(at=at, r=at) for at in (1, 2, 3)]


@pytest.mark.parametrize("metric", ["mean", "x"])
@pytest.mark.parametrize("kind", ["plain", "distilled", "avg_with_cls", "no_cls", "map_pool"])
def test_equal_tokens_merge_without_a_trace(kind, metric):
    """A token of size s counts like s equal ones: an image of equal patches comes out as if nothing was merged."""
    model = make(kind)
    images = torch.rand(2, 3, 1, 1).expand(2, 3, 32, 32)
    with torch.inference_mode():
        model.pos_embed.zero_()
        expected = model(images)
        merging = reduce_(model, ToMe(r=9, metric=metric))(images)
        torch.testing.assert_close(merging, expected, atol=1e-5, rtol=1e-5)
        if model.has_class_token:
            plain = reduce_(model, ToMe(r=9, metric=metric, proportional=False))(images)
            assert (plain - expected).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "avg_with_cls", "avgmax_include_prefix", "map_pool", "test_vit4"])
def test_sizes_are_exact_and_the_precision_stays(kind, dtype):
    model = reduce_(make(kind), ToMe(r=9)).to(dtype)
    seen = []
    reduction_of(model).register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.inference_mode():
        logits = model(photos_for(model).to(dtype))
    assert logits.dtype == dtype and logits.isfinite().all()
    patches = reduction_of(model).layout.patches
    assert len([t for t in seen if t.size is not None]) == len(seen) == len(reduction_of(model).steps(patches))
    for tokens in seen:
        assert tokens.x.dtype == dtype
        assert tokens.size is None or tokens.size.sum(1).tolist() == [patches] * 3


def test_sizes_that_half_precision_cannot_hold():
    tokens = start(torch.randn(1, 516, 6).bfloat16(), 1)
    found = method_for(ToMe(at=1, tokens=1, metric="x"), 1, 515)(tokens, Step(Place(1, True), 515, 1, 1))
    assert found.x.dtype == torch.bfloat16 and found.size.tolist() == [[515.0]]


def test_autocast_does_not_touch_the_stream():
    tokens = start(torch.randn(2, 9, 6), 1)
    step = Step(Place(1, True), 8, 5, 5)
    method = method_for(ToMe(at=1, r=3, metric="x"), 1, 8)
    exact = method(tokens, step)
    with torch.autocast("cpu", torch.bfloat16):
        found = method(tokens, step)
    assert found.x.dtype == torch.float32 and torch.equal(found.x, exact.x)


def test_tokens_of_zeros_are_no_trouble():
    tokens = start(torch.zeros(1, 7, 6), 1)
    found = method_for(ToMe(at=1, r=3, metric="x"), 1, 6)(tokens, Step(Place(1, True), 6, 3, 3))
    assert torch.equal(found.x, torch.zeros(1, 4, 6))


def test_gradients_flow_to_every_token_that_was_merged():
    x = torch.randn(2, 8, 3, dtype=torch.float64, requires_grad=True)
    size = torch.tensor([[1.0, 2, 3, 1, 5, 1, 1]]).expand(2, -1)
    alone, into = torch.tensor([[6], [0]]), torch.tensor([4, 1])
    source, target = torch.tensor([[0, 2, 3], [5, 6, 2]]), torch.tensor([[0, 1, 0], [1, 1, 1]])

    for average in ("mean", "none"):  # norms are found in fp32
        assert torch.autograd.gradcheck(
            lambda x, average=average: merge(replace(start(x, 1), size=size), alone, into, source, target, average).x, x
        )
    single = x.detach().float().requires_grad_()
    merge(replace(start(single, 1), size=size), alone, into, source, target, "mlerp").x[..., 0].sum().backward()
    assert single.grad.isfinite().all() and single.grad.any(2).sum() == 2 * 7  # one patch is dropped


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 17), prefix=st.integers(0, 3), seed=st.integers(0, 999), data=st.data())
def test_mlerp_keeps_the_longest_norm_and_the_direction_of_the_mean(n, prefix, seed, data):
    gone = data.draw(st.integers(1, n // 2))
    generator = torch.Generator().manual_seed(seed)
    tokens = start(10 * torch.randn(2, prefix + n, 6, generator=generator), prefix)
    tokens = replace(tokens, size=torch.randint(1, 9, (2, n), generator=generator).float())
    step = Step(Place(1, True), n, n - gone, n - gone)
    mean, found = (
        method_for(ToMe(at=1, r=gone, metric="x", average=average), prefix, n)(tokens, step)
        for average in ("mean", "mlerp")
    )
    assert torch.equal(found.x[:, :prefix], tokens.x[:, :prefix]) and torch.equal(found.size, mean.size)
    torch.testing.assert_close(*(torch.nn.functional.normalize(one.patches, dim=2) for one in (found, mean)))
    for b in range(2):
        before = dict(zip(tokens.index[b].tolist(), tokens.patches[b]))
        norms = [norm(x) for x in before.values()]
        for place, x, size, plain in zip(found.index[b].tolist(), found.patches[b], found.size[b], mean.patches[b]):
            if size == tokens.size[b, place]:
                assert torch.equal(x, before[place])  # took nothing in
            else:
                assert norm(x) >= max(norm(plain), norm(before[place])) - 1e-3
                assert min(abs(norm(x) - one) for one in norms) < 1e-3


def test_mlerp_of_opposite_tokens_is_finite_and_no_longer_than_they_are():
    x = torch.tensor([[[1.0, 2, 2], [-1, -2, -2]]])
    step = Step(Place(1, True), 2, 1, 1)
    found = method_for(ToMe(at=1, r=1, metric="x", average="mlerp"), 0, 2)(start(x, 0), step)
    assert found.x.isfinite().all() and norm(found.x[0, 0]) <= 3


@pytest.mark.parametrize("average", ["mean", "mlerp", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_that_take_others_in_may_differ_from_image_to_image(average, dtype):
    x = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens = replace(start(x, 1, follow=True), size=torch.arange(1.0, 9).expand(2, -1))
    alone, into = torch.tensor([[6, 7], [0, 1]]), torch.tensor([[4, 1], [7, 3]])
    source, target = torch.tensor([[0, 2, 3, 5], [5, 6, 2, 4]]), torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]])
    both = merge(tokens, alone, into, source, target, average)
    for b in range(2):
        image = replace(
            tokens, **{name: getattr(tokens, name)[b : b + 1] for name in ("x", "index", "size", "carrier")}
        )
        one = merge(image, alone[b : b + 1], into[b], source[b : b + 1], target[b : b + 1], average)
        torch.testing.assert_close(both.x[b], one.x[0])
        for name in ("index", "size", "carrier"):
            assert torch.equal(getattr(both, name)[b], getattr(one, name)[0])
    assert both.x.dtype == dtype and both.size.sum(1).tolist() == [36, 36]
    assert torch.equal(both.patches[1, 2], tokens.patches[1, 7])  # nothing went there
    if average == "none":
        assert torch.equal(both.x[0], x[0, [0, 7, 8, 5, 2]])


def parallel():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return VisionTransformer(**SMALL, block_fn=ParallelScalingBlock).eval()


ONE_PIECE = {"inside": False, "metric": "x", "proportional": False}


@pytest.mark.parametrize("missing", [("inside",), ("metric",), ("proportional",), tuple(ONE_PIECE)])
def test_blocks_that_do_not_open_say_what_would_do(missing):
    config = ToMe(at=2, r=8, **{name: value for name, value in ONE_PIECE.items() if name not in missing})
    wanted = ", ".join(f"{name}={ONE_PIECE[name]!r}" for name in missing)
    model = parallel()
    with pytest.raises(UserError, match=f"tome cannot be applied here: .*; {wanted} would do"):
        reduce_(model, config)
    assert type(model) is VisionTransformer


def test_blocks_that_do_not_open_run_whole():
    model = parallel()
    images = photos_for(model, 2)
    with torch.inference_mode():
        expected = []
        for image in images:
            x = model._pos_embed(model.patch_embed(image[None]))
            tokens = [Token(None, None, i, [i]) for i in range(64)]
            for number, block in enumerate(model.blocks, 1):
                x = block(x)
                if number in (2, 4):
                    tokens = [Token(x[0, 1 + i], x[0, 1 + i], t.place, t.patches) for i, t in enumerate(tokens)]
                    tokens = merged(tokens, 9, 1)
                    x = torch.stack([x[0, 0], *[t.x for t in tokens]])[None]
            expected.append(model.forward_head(model.norm(x))[0])
        reduce_(model, ToMe(at=(2, 4), r=9, **ONE_PIECE))
        model.halves = None  # nobody may ask for them
        torch.testing.assert_close(model(images), torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_blocks_are_opened_only_where_something_has_to_be_seen():
    def sees(config):
        method = reduction_of(reduce_(make("plain"), config))
        return [block.sees for block in method.plan(64)[1:]]

    assert sees(ToMe(at=(2, 4))) == ["", "heads", "", "heads", "", ""]
    assert sees(ToMe(at=(2, 4), inside=False, metric="concat")) == ["", "heads", "", "heads", "", ""]
    assert sees(ToMe(at=(2, 4), metric="x")) == [""] * 6


def test_sizes_count_in_attention_only_where_asked_for():
    tokens = replace(start(torch.randn(1, 5, 6), 1), size=torch.tensor([[1.0, 2, 4, 1]]))
    assert method_for(ToMe(proportional=False), 1, 4).bias(tokens, 3) is None
    bias = method_for(ToMe(), 1, 4).bias(tokens, 3)
    torch.testing.assert_close(bias.flatten().exp(), torch.tensor([1.0, 1, 2, 4, 1]))


def test_costs_are_those_of_the_comparisons_and_of_one_sum_for_each_token():
    model = make("plain")  # 64 patches, 4 heads of 8, width 32
    for metric, width in (("mean", 8), ("concat", 32), ("x", 32)):
        found = macs(reduce_(model, ToMe(at=3, r=9, metric=metric)))
        assert found.reduction == {3: 32 * 32 * width + 9 * 32}
        assert found.tokens == [64, 64, 64, 55, 55, 55] and found.mlp_tokens == [64, 64, 55, 55, 55, 55]
    assert macs(reduce_(model, ToMe(at=3, tokens=7))).reduction == {
        3: (32 * 32 + 16 * 16 + 8 * 8 + 4 * 4) * 8 + 57 * 32  # to 32, 16, 8 and then 7
    }
    assert macs(reduce_(model, ToMe(at=(3, 4), r=(31, 3)))).reduction[4] == 16 * 17 * 8 + 3 * 32  # 33 arrive


def test_it_follows_pruning():
    model = make("plain")
    config = Combination(parts=(Random(at=1, tokens=40), ToMe(at=(2, 3), r=6)))
    reduce_(model, config)
    with record(model) as trace, torch.inference_mode():
        assert model(photos_for(model)).isfinite().all()
    assert {block: kept.shape[1] for block, kept in trace.kept.items()} == {1: 40, 2: 34, 3: 28}
    assert ((trace.carrier[3] == -1).sum(1) == 24).all()  # what was dropped, and nothing that was merged


@pytest.mark.wide
def test_export_with_any_batch_size():
    model = reduce_(make("distilled"), WHOLE["several passes"][0])
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (photos_for(model, 3),), dynamic_shapes=({0: batch},)).module()
    for count in (1, 4):
        images = photos_for(model, count)
        with torch.inference_mode():
            torch.testing.assert_close(program(images), model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"r": -1}, "r=-1"),
        ({"r": 2.5}, "r=2.5"),
        ({"r": True}, "r=True"),
        ({"r": 8, "keep": 0.5}, "r was given with keep or tokens"),
        ({"r": 8, "tokens": 9}, "r was given with keep or tokens"),
        ({"r": (8, 8), "at": 3}, "2 values for 1 location"),
        ({"r": (8, 8), "decreasing": True}, "expected one value of r"),
        ({"keep": 0.5, "decreasing": True}, "expected one value of r"),
        ({"metric": "keys"}, "metric='keys'"),
        ({"average": "slerp"}, "average='slerp'"),
        ({"average": "none"}, "average='none'"),
        ({"inside": 1}, "inside=1"),
        ({"proportional": None}, "proportional=None"),
    ],
)
def test_bad_options_say_what_is_expected(given, word):
    with pytest.raises(UsageError) as caught:
        ToMe(**given)
    assert word in str(caught.value) and "expected" in str(caught.value)


def test_what_does_not_fit_the_model_says_so():
    for config, word in (
        (ToMe(at=7), "the model has 6 blocks"),
        (ToMe(at=6, inside=False), "removing tokens after the last one saves nothing"),
        (ToMe(r=(1, 2)), "2 values for 6 location"),
        (ToMe(at=2, tokens=65), "only 64 patch tokens arrive"),
    ):
        with pytest.raises(UsageError, match=word):
            reduce_(make("plain"), config)

"""What must hold for every method on every kind of backbone."""

from __future__ import annotations

import copy

import pytest
import torch

import tntprune
from configs import CONFIGS, EACH, FIRST, LOOSE, SOME, first, run, stirred
from conftest import BACKBONES, make, photos_for
from reference import by_place
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.base import find_backbone
from tntprune.methods import METHODS, obstacle_to
from tntprune.methods.learned import inherit
from tntprune.methods.steps import Place
from tntprune.reduce import reduce_, restore_


def test_every_method_is_in_the_matrix():
    assert {config.method for config in CONFIGS.values()} == set(METHODS)


NEED_CLS = ("topk", "evit", "ats", "evovit")


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("name", first(CONFIGS, FIRST))
def test_a_method_on_a_backbone(kind, name):
    """Every invariant of one pair on one model, which is made once."""
    model, config = make(kind), CONFIGS[name]
    images = photos_for(model)
    if obstacle_to(type(config), find_backbone(model).layout(model), config):
        with pytest.raises(tntprune.UserError, match="cannot be applied here"):
            reduce_(model, config)
        return
    before, names, plain = run(model, images), list(model.state_dict()), type(model)
    stirred(model, config)
    assert isinstance(model, plain) and type(model) is not plain
    assert [name for name in model.state_dict() if not name.startswith("reduction.")] == names
    check_a_pass(model, config, images, before)
    check_images_alone(model, images)
    check_a_copy(model, config, images)
    restore_(model)
    assert type(model) is plain and list(model.state_dict()) == names
    assert torch.equal(run(model, images), before)  # bit for bit
    assert restore_(model) is model
    changes = {"similar": 0} if hasattr(config, "similar") else {}
    changes |= {"at": 2} if config == CONFIGS["avit"] else {}  # alone it halts as it likes
    reduce_(model, config.changed(keep=1.0, **changes))
    assert torch.equal(run(model, images), before)


def check_a_pass(model, config, images, plain):
    """Prefix tokens come first and pass untouched; kept patches are unique, in range, counted, and really those."""
    method = reduction_of(model)
    prefix = method.layout.prefix
    seen = []

    def spy(module, args, out):
        tokens = args[0]
        if config == CONFIGS["avit"] and args[1].place == Place(len(model.blocks)):
            return  # here the halting-weighted outputs take the place of all tokens
        seen.append(torch.equal(tokens.x[:, :prefix], out.x[:, :prefix]) and out.x.shape[1] == out.count + prefix)

    handle = method.register_forward_hook(spy)
    with tntprune.record(model) as trace:
        assert not torch.equal(run(model, images), plain)
    handle.remove()
    assert len(seen) == len(method.steps(method.layout.patches)) - (config == CONFIGS["avit"]) and all(seen)
    if config.method in LOOSE:  # what they keep has tests of its own
        return
    layout = reduction_of(model).layout
    plan = by_place(reduction_of(model).steps(layout.patches))
    assert list(trace.kept) == [place.block for place in plan]
    grid = set(range(layout.patches))
    for place, step in plan.items():
        kept = trace.kept[place.block]
        assert kept.shape == (len(images), step.leaving)
        for row in kept.tolist():
            own = [place for place in row if place != -1]  # a fused token has no place
            assert len(set(own)) == len(own) and set(own) <= grid and row == sorted(row)
            assert len(row) - len(own) <= (list(plan).index(place) + 1 if config.method == "evit" else 0)
        placed = kept >= 0
        carried = trace.carrier[place.block].gather(1, kept.clamp(min=0))
        assert torch.equal(carried[placed], kept[placed])  # each carries itself
        dropped = trace.carrier[place.block] == -1
        if isinstance(config, tntprune.ToMe) or getattr(config, "merges", False):
            assert not dropped.any()
        elif getattr(config, "similar_how", "") != "merge":
            assert torch.equal(dropped.sum(1), layout.patches - placed.sum(1))
    blocks = [place.block for place in plan]
    for early, late in zip(blocks, blocks[1:]):
        for before, after in zip(trace.kept[early].tolist(), trace.kept[late].tolist()):
            assert set(after) - {-1} <= set(before)
    counted = torch.stack(trace.counts[:-1]).view(layout.depth, 2, len(images))
    found = tntprune.macs(model)
    assert counted[:, 0].tolist() == [[n] * len(images) for n in found.tokens]
    assert counted[:, 1].tolist() == [[n] * len(images) for n in found.mlp_tokens]


def check_images_alone(model, images):
    """An image does not depend on its batch or on the global generator."""
    torch.manual_seed(1)
    whole = run(model, images)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    alone = torch.cat([run(model, image[None]) for image in images])
    turned = run(model, images.flip(0)).flip(0)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(whole, turned, atol=1e-5, rtol=1e-4)


def check_a_copy(model, config, images):
    """A copy is equal and independent."""
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin, images), run(model, images))
    restore_(twin)
    assert type(model) is not type(twin)
    if not config.variable:  # else it says the most that is possible
        assert tntprune.macs(model).macs < tntprune.macs(twin).macs


@pytest.mark.parametrize("name", ["random", "tnt", "tnt-mlp", "tnt-merging", "topk", "dynamicvit", "avit-fixed"])
@pytest.mark.parametrize("kind", ["plain", "registers", "distilled"])
def test_kept_sets_are_nested(kind, name):
    model = make(kind)
    images = photos_for(model)
    stirred(model, CONFIGS[name])
    learned = reduction_of(model).state_dict()
    smaller: list[set[int]] = [set()] * len(images)
    for keep in (0.1, 0.3, 0.5, 0.8, 0.95):
        reduce_(model, CONFIGS[name].changed(at=2, keep=keep))
        inherit(reduction_of(model), learned)
        with tntprune.record(model) as trace:
            run(model, images)
        now = [set(row) for row in trace.kept[2].tolist()]
        assert all(a <= b for a, b in zip(smaller, now))
        smaller = now


@pytest.mark.parametrize("name", CONFIGS)
def test_dynamic_image_sizes(name):
    model = make("dynamic")
    stirred(model, CONFIGS[name])
    for height, width in ((32, 32), (24, 44), (48, 32)):
        images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
        with tntprune.record(model) as trace:
            logits = run(model, images)
        assert logits.shape == (2, 7) and logits.isfinite().all()
        steps = reduction_of(model).steps(height * width // 16)
        if CONFIGS[name].method not in LOOSE:
            assert {b: kept.shape[1] for b, kept in trace.kept.items()} == {s.place.block: s.leaving for s in steps}
        assert all(int(kept.max()) < height * width // 16 for kept in trace.kept.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision(name):
    model = stirred(make("plain"), CONFIGS[name])
    images = photos_for(model)
    exact = run(model, images)
    with torch.autocast("cpu", torch.bfloat16):
        assert (run(model, images).float() - exact).abs().mean() < 0.1 * exact.abs().mean() + 0.05
    assert run(model.to(torch.bfloat16), images.bfloat16()).isfinite().all()
    late = stirred(make("plain").to(torch.bfloat16), CONFIGS[name])  # what learns stays in fp32
    assert run(late, images.bfloat16()).isfinite().all()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("plain", name) for name in FIRST[1:] if name not in ("pitome", "tofu", "mctf", "atc")
    ]  # the next test exports them too
    + [
        pytest.param(kind, name, marks=pytest.mark.wide)
        for kind in ("plain", "distilled", "no_cls", "map_pool")
        for name in dict.fromkeys((*SOME, *EACH))
        if (kind != "plain" or name not in FIRST) and (kind in ("plain", "distilled") or name not in NEED_CLS)
    ],
)
def test_export_gives_what_eager_gives(kind, name):
    model = stirred(make(kind), CONFIGS[name])
    images = photos_for(model)
    program = torch.export.export(model, (images,)).module()
    with torch.inference_mode():
        torch.testing.assert_close(program(images), run(model, images), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", first(dict.fromkeys((*SOME, *EACH)), ("tnt-merging", "ats")))
def test_export_with_any_batch_size(name):
    model = stirred(make("plain"), CONFIGS[name])
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (photos_for(model, 3),), dynamic_shapes=({0: batch},)).module()
    for count in (1, 5):
        images = photos_for(model, count)
        with torch.inference_mode():
            torch.testing.assert_close(program(images), run(model, images), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", first(dict.fromkeys(("random", "tnt-several", *EACH)), ("tnt-several", "tnt-merging")))
def test_compiled_in_one_graph_gives_what_eager_gives(name):
    torch._dynamo.reset()
    model = stirred(make("plain"), CONFIGS[name])
    images = photos_for(model)
    expected = run(model, images)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, images), expected, atol=1e-5, rtol=1e-4)
    if name != "tnt-several":  # recording compiles it anew
        return
    with tntprune.record(compiled) as trace:
        run(compiled, images)
    assert list(trace.kept) == [step.place.block for step in reduction_of(model).steps(64)]
    torch.testing.assert_close(run(compiled, images), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, "tnt-several") for kind in BACKBONES] + [(kind, "tnt-merging-inside") for kind in ("plain", "eva02")],
)
def test_gradient_checkpointing_changes_nothing(kind, name):
    model = stirred(make(kind), CONFIGS[name])
    images = photos_for(model).requires_grad_()
    (plain,) = torch.autograd.grad(model(images).square().sum(), images)
    model.set_grad_checkpointing(True)
    (again,) = torch.autograd.grad(model(images).square().sum(), images)
    torch.testing.assert_close(plain, again)

"""A-ViT against loops over images and tokens, in which a halted token is simply no longer there."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer

import tntprune
from conftest import SMALL, make, photos_for
from reference import act
from tntprune.backbones.attach import reduction_of
from tntprune.errors import UsageError, UserError
from tntprune.methods import AViT, Random, from_dict, to_dict
from tntprune.methods.avit import AdaptiveTokens
from tntprune.methods.base import Layout
from tntprune.methods.steps import Place
from tntprune.ops.tokens import Tokens, start
from tntprune.reduce import reduce_
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer, learning

SCALE, CENTER = 3.0, 2.0  # at which the small random models halt here and there
GATE = {"gate_scale": SCALE, "gate_center": CENTER}
KINDS = ("plain", "distilled", "registers", "avg_with_cls", "avgmax_include_prefix", "no_cls", "map_pool", "non_square")


def embedded(model, images):
    return model.norm_pre(model._pos_embed(model.patch_embed(images)))


def loops(model, images, scale, center, epsilon=0.01):
    """Each image on its own: the tokens' outputs, the block at which each halts, rho, and all halting scores."""
    outputs, halted, rho, scores = [], [], [], []
    depth = len(model.blocks)
    for x in embedded(model, images):
        alive = {i: x[i] for i in range(len(x))}
        total = [torch.zeros(()) for _ in x]
        output = [torch.zeros_like(token) for token in x]
        block_of, ponder = [0] * len(x), [torch.zeros(()) for _ in x]
        said = [[torch.zeros(()) for _ in x] for _ in range(depth)]
        for number, block in enumerate(model.blocks, 1):
            if not alive:
                break
            rows = block(torch.stack(list(alive.values()))[None])[0]
            for i, row in zip(list(alive), rows):
                h = torch.ones(()) if number == depth else 1 / (1 + torch.exp(-(scale * row[0] - center)))
                said[number - 1][i] = h
                ponder[i] = ponder[i] + 1
                if total[i] + h > 1 - epsilon:
                    remainder = 1 - total[i]
                    output[i] = output[i] + remainder * row
                    ponder[i] = ponder[i] + remainder
                    block_of[i] = number
                    del alive[i]
                else:
                    output[i] = output[i] + h * row
                    total[i] = total[i] + h
                    alive[i] = row
        outputs.append(torch.stack(output))
        halted.append(block_of)
        rho.append(torch.stack(ponder))
        scores.append(torch.stack([torch.stack(block) for block in said]))
    return torch.stack(outputs), halted, torch.stack(rho), torch.stack(scores)


def head(model, outputs):
    return model.forward_head(model.norm(outputs))


def shallow(pool):
    """Three blocks, which compile in a third of the time."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = VisionTransformer(**{**SMALL, "depth": 3}, global_pool=pool).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def layout_of(prefix=1, patches=9, depth=3, width=4, pool="token"):
    return Layout("", width, depth, prefix, (1, patches), prefix > 0, attn_dim=width, pool=pool)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_loops_and_only_what_goes_on_enters_a_block(kind):
    model = make(kind)
    images = photos_for(model)
    prefix, depth = model.num_prefix_tokens, len(model.blocks)
    with torch.inference_mode():
        outputs, halted, _, _ = loops(model, images, SCALE, CENTER)
        expected = head(model, outputs)
        base = model(images)
        reduce_(model, AViT(**GATE))
        with tntprune.record(model) as trace:
            logits = model(images)
        features = model.forward_features(images)
    early = [block for image in halted for block in image if block < depth]
    assert len(set(early)) > 2 and len(early) < sum(map(len, halted))  # or the test would say nothing
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert (logits - base).abs().max() > 1e-3
    goes_on = [[[i for i, h in enumerate(image[prefix:]) if h > block] for image in halted] for block in range(depth)]
    for block in range(depth):
        counts = [len(image) for image in goes_on[block]]
        assert trace.counts[2 * block].tolist() == trace.counts[2 * block + 1].tolist() == counts
        if block:
            kept = trace.kept[block]
            assert kept.shape[1] == max(1, *counts)
            assert [[i for i in row if i >= 0] for row in kept.tolist()] == goes_on[block]
            carried = [[p for p, c in enumerate(row) if c == p] for row in trace.carrier[block].tolist()]
            assert carried == goes_on[block]
            assert ((trace.carrier[block] == -1).sum(1) + trace.counts[2 * block] == len(halted[0]) - prefix).all()
    with torch.inference_mode():
        read = model.norm(outputs)
    if model.global_pool == "token":
        torch.testing.assert_close(features[:, :prefix], read[:, :prefix], atol=1e-5, rtol=1e-4)
    else:
        torch.testing.assert_close(features, read, atol=1e-5, rtol=1e-4)
        assert torch.equal(trace.kept[depth], torch.arange(len(halted[0]) - prefix).expand(len(images), -1))


@pytest.mark.parametrize("kind", ["plain", "distilled", "non_square"])
def test_prefix_tokens_halt_too(kind):
    """So that the other tests compare what then happens."""
    model = make(kind)
    halted = loops(model, photos_for(model), SCALE, CENTER)[1]
    assert min(block for image in halted for block in image[: model.num_prefix_tokens]) < len(model.blocks)


@pytest.mark.parametrize("kind", ["plain", "avg_with_cls", "no_cls", "registers"])
def test_everything_halts_in_the_first_block(kind):
    model = make(kind)
    images = photos_for(model)
    with torch.inference_mode():
        expected = head(model, model.blocks[0](embedded(model, images)))
        reduce_(model, AViT(gate_scale=1.0, gate_center=-1e4))
        torch.testing.assert_close(model(images), expected, atol=1e-6, rtol=1e-5)
        model.reduction.train()
        torch.testing.assert_close(model(images), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_halts_it_is_the_base(kind):
    model = make(kind)
    images = photos_for(model)
    with torch.inference_mode():
        expected = model(images)
        reduce_(model, AViT(gate_center=1e4))
        assert torch.equal(model(images), expected)
        model.reduction.train()
        torch.testing.assert_close(model(images), expected, atol=1e-6, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    prefix=st.integers(0, 2),
    center=st.floats(-2, 4),
    epsilon=st.sampled_from([0.01, 0.2]),
    pool=st.sampled_from(["token", "avg"]),
)
def test_weights_add_up_to_one(seed, prefix, center, epsilon, pool):
    """Blocks that leave all tokens at one same vector must give that vector, whenever each halts."""
    layout = layout_of(prefix, pool=pool if prefix else "avg")
    method = AdaptiveTokens(AViT(gate_scale=1.0, gate_center=center, epsilon=epsilon), layout).eval()
    x = torch.randn(2, prefix + 9, 4, generator=torch.Generator().manual_seed(seed))
    tokens = start(x, prefix, follow=True)
    plan = method.plan(9)
    for block in range(1, 4):
        tokens = act(method, tokens, Place(block), plan)
        alive = method.goes_on(tokens.state.total)[:, prefix:]
        if block < 3:
            assert torch.equal(tokens.size > 0, alive) and torch.equal(tokens.index >= 0, alive)
    read = prefix if layout.pool == "token" else prefix + 9
    torch.testing.assert_close(tokens.x[:, :read], x[:, :read], atol=1e-6, rtol=1e-5)


def test_an_image_does_not_depend_on_its_batch():
    for kind in ("plain", "no_cls"):
        model = reduce_(make(kind), AViT(**GATE))
        images = photos_for(model, 5)
        with torch.inference_mode():
            whole = model(images)
            torch.testing.assert_close(whole, torch.cat([model(image[None]) for image in images]), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(whole, model(images.flip(0)).flip(0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "distilled", "no_cls"])
def test_training_keeps_all_tokens_and_has_the_gradients_of_loops(kind):
    model = make(kind)
    config = AViT(**GATE, ponder_weight=0.3, target_weight=0.2, target_depth=3.0)
    images = photos_for(model, 2).requires_grad_()
    scale, center = torch.tensor(SCALE, requires_grad=True), torch.tensor(CENTER, requires_grad=True)
    outputs, _, rho, scores = loops(model, images, scale, center)
    expected = head(model, outputs)

    profile = [sum(image[block].mean() for image in scores) / len(scores) for block in range(len(model.blocks))]
    profile = [p.clamp(0.01, 0.99) for p in profile]
    profile = [p / sum(profile) for p in profile]
    bell = [math.exp(-((block + 1 - 3.0) ** 2) / 2) for block in range(len(profile))]
    divergence = sum(p * torch.log(p / (q / sum(bell))) for p, q in zip(profile, bell))
    ponder = sum(rho.flatten()) / rho.numel()
    penalty = 0.3 * ponder + 0.2 * divergence
    weight = model.blocks[0].mlp.fc1.weight
    wanted = torch.autograd.grad(expected.square().sum() + penalty, [scale, center, images, weight])

    reduce_(model, config)
    method = reduction_of(model).train()
    seen = []
    method.register_forward_hook(lambda module, args, out: seen.append(out.count))
    tokens = model.tokens(images, None, False)
    logits = model.classify(tokens)
    own = method.penalty(tokens, None)
    assert set(seen) == {tokens.index.shape[1]}
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(own, penalty, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(
        logits.square().sum() + own, [method.scale, method.center, images, model.blocks[0].mlp.fc1.weight]
    )
    for one, other in zip(found, wanted):
        assert other.abs().max() > 0
        torch.testing.assert_close(one.reshape(other.shape), other, atol=1e-4, rtol=1e-3)

    method.eval()
    torch.testing.assert_close(model(images), logits, atol=1e-5, rtol=1e-4)  # taking out is the same as masking
    assert method.penalty(model.tokens(images, None, False), None) is None


def test_gradient_checkpointing_changes_nothing():
    model = reduce_(make("no_cls"), AViT(**GATE))
    reduction_of(model).train()
    images = photos_for(model, 2).requires_grad_()
    wanted = [images, *reduction_of(model).parameters()]

    def gradients():
        tokens = model.tokens(images, None, False)
        loss = model.classify(tokens).square().sum() + reduction_of(model).penalty(tokens, None)
        return torch.autograd.grad(loss, wanted)

    plain = gradients()
    model.set_grad_checkpointing(True)
    for one, other in zip(gradients(), plain):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backbone_lr", [0.0, 0.01])
def test_a_training_moves_the_gate_and_is_saved(tmp_path, backbone_lr):
    model = make("plain")
    reduce_(model, AViT(**GATE, ponder_weight=10.0, target_weight=0.0))
    images, labels = photos_for(model, 8), torch.arange(8) % 7
    before = [reduction_of(model).scale.item(), reduction_of(model).center.item()]
    weights = copy.deepcopy(tntprune.restore_(copy.deepcopy(model)).state_dict())

    def taken():
        with tntprune.record(model) as trace, torch.inference_mode():
            model(images)
        return sum(count.sum().item() for count in trace.counts)

    early = taken()
    tntprune.calibrate_(
        model, images, labels, epochs=6, batch_size=4, lr=0.1, backbone_lr=backbone_lr, amp="none", progress=False
    )
    after = [reduction_of(model).scale.item(), reduction_of(model).center.item()]
    assert after[1] < before[1] and taken() < early  # pondering is expensive, so that tokens halt earlier
    moved = any(not torch.equal(value, weights[name]) for name, value in model.state_dict().items() if name in weights)
    assert moved == (backbone_lr > 0)

    tntprune.save(model, tmp_path, weights=backbone_lr > 0)
    again = tntprune.load_(make("plain"), tmp_path)
    assert [reduction_of(again).scale.item(), reduction_of(again).center.item()] == after
    with torch.inference_mode():
        assert torch.equal(again(images), model(images))
    fixed = tntprune.load_(make("plain"), tmp_path, at=2, keep=0.5)
    assert reduction_of(fixed).center.item() == after[1]
    with pytest.raises(UsageError, match=r"gate_center=75.*trained with 2\.0"):
        tntprune.load_(make("plain"), tmp_path, gate_center=75.0)


def test_in_bfloat16_training_and_evaluation_are_finite():
    model = reduce_(make("plain"), AViT(**GATE))
    images, labels = photos_for(model), torch.tensor([0, 1, 2])
    with learning(model), torch.enable_grad():
        assert Trainer(model, Training(amp="bf16"), 2).step(0, [(images, labels)]).isfinite()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert model(images).isfinite().all()
    with torch.inference_mode():
        assert model.to(torch.bfloat16)(images.bfloat16()).isfinite().all()


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_export_masks_what_eager_takes_out(pool):
    model = reduce_(shallow(pool), AViT(**GATE))
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (photos_for(model, 3),), dynamic_shapes=({0: batch},)).module()
    for count in (1, 4):
        images = photos_for(model, count)
        with torch.inference_mode(), tntprune.record(model) as trace:
            torch.testing.assert_close(program(images), model(images), atol=1e-5, rtol=1e-4)
        assert trace.kept[2].shape[1] < 64  # or there was nothing to mask


def test_compiled_in_one_graph_gives_what_eager_gives():
    torch._dynamo.reset()
    model = reduce_(shallow("avg"), AViT(**GATE))
    images = photos_for(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fixed_number_is_the_same_as_loops(kind):
    model = make(kind)
    images, prefix = photos_for(model), model.num_prefix_tokens
    config = AViT(**GATE, at=(2, 4), keep=(0.7, 0.5))
    with torch.inference_mode():
        rows, kept = [], {2: [], 4: []}
        for x in embedded(model, images):
            places, total = list(range(len(x) - prefix)), [0.0] * len(x)
            for number, block in enumerate(model.blocks, 1):
                x = block(x[None])[0]
                for place, row in zip(places, x[prefix:]):
                    total[place] += 1 / (1 + math.exp(-(SCALE * row[0].item() - CENTER)))
                if number in config.at:
                    stay = math.floor(len(places) * config.keep[config.at.index(number)])
                    best = sorted(places, key=lambda place: total[place])[:stay]
                    x = torch.cat([x[:prefix], torch.stack([x[prefix + places.index(place)] for place in best])])
                    places = best
                    kept[number].append(sorted(places))
            rows.append(x)
        expected = head(model, torch.stack(rows))
    reduce_(model, config)
    with tntprune.record(model) as trace:
        logits = model(images)
    assert {block: found.tolist() for block, found in trace.kept.items()} == kept
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    method = reduction_of(model)
    assert not method.trains
    method.train()
    torch.testing.assert_close(model(images), logits, atol=1e-5, rtol=1e-5)
    assert method.penalty(model.tokens(images, None, False), None) is None


def test_a_fixed_number_with_keep_one_is_the_base_bit_for_bit():
    for kind in ("plain", "no_cls"):
        model = make(kind)
        images = photos_for(model)
        with torch.inference_mode():
            before = model(images)
            assert torch.equal(reduce_(model, AViT(at=(2, 3), keep=1.0))(images), before)


def test_equal_scores_keep_the_first_patches():
    method = AdaptiveTokens(AViT(at=1, tokens=3), layout_of()).eval()
    tokens = act(method, start(torch.zeros(2, 10, 4), 1), Place(1), method.plan(9))
    assert tokens.index.tolist() == [[0, 1, 2]] * 2


def test_macs_are_the_most_that_is_possible():
    model = make("plain")
    whole = tntprune.macs(model)
    assert tntprune.macs(reduce_(model, AViT())).macs == whole.macs
    assert tntprune.macs(reduce_(model, AViT(at=3, keep=0.5))).tokens == [64, 64, 64, 32, 32, 32]


def test_blocks_that_cannot_be_opened():
    layout = layout_of()._replace(opens=False)
    assert "avit with at" in AdaptiveTokens.obstacle(layout)
    assert "avit with at" in AdaptiveTokens.obstacle(layout, AViT())
    assert AdaptiveTokens.obstacle(layout, AViT(at=2)) is None
    assert AdaptiveTokens.obstacle(layout_of(), AViT()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0: expected between 0 and 1"),
        ({"gate_scale": math.inf}, "gate_scale=inf: expected a number"),
        ({"gate_center": "x"}, "gate_center=x: expected a number"),
        ({"ponder_weight": -1}, "ponder_weight=-1: expected 0 or more"),
        ({"target_weight": math.nan}, "target_weight=nan: expected 0 or more"),
        ({"keep": 0.5}, "keep or tokens without at: expected at as well"),
        ({"at": 0}, "at=0: no block has been seen"),
        ({"at": (2, 3), "keep": (0.5, 0.5, 0.5)}, "3 values for 2 location"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        AViT(**options)


def test_it_wants_the_model_for_itself_and_comes_back_from_json():
    for config in (AViT(), AViT(at=2)):
        with pytest.raises(UsageError, match="avit needs the whole model to itself"):
            reduce_(make("plain"), Random(at=1), config)
        assert from_dict(to_dict(config)) == config
    assert AViT().singles(6) == [AViT()]
    assert [single.at for single in AViT(at=(2, 3)).singles(6)] == [(2,), (3,)]
    with pytest.raises(UserError, match="nothing to train on a frozen model"):
        Trainer(reduce_(make("plain"), AViT(at=2)), Training(), 1)


def test_padding_is_no_patch():
    """One image keeps three patches, the other one: the second gets two tokens of padding."""
    method = AdaptiveTokens(AViT(gate_scale=1.0, gate_center=0.0), layout_of(prefix=1, patches=4)).eval()
    x = torch.full((2, 5, 4), -9.0)
    x[0, 2, 0] = x[1, 1, 0] = x[1, 3, 0] = x[1, 4, 0] = x[1, 0, 0] = 9.0  # these halt at once
    tokens: Tokens = act(method, start(x, 1, follow=True), Place(1), method.plan(4))
    assert tokens.index.tolist() == [[0, 2, 3], [1, -1, -1]]
    assert tokens.size.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert tokens.carrier.tolist() == [[0, -1, 1, 2], [-1, 0, -1, -1]]
    bias = method.bias(tokens, 2)
    assert bias.shape == (2, 1, 1, 4)
    assert (bias[:, 0, 0] == 0).tolist() == [[True, True, True, True], [False, True, False, False]]
    assert bias.min() == -1e4

"""DiffRate against loops: sorting, pruning, merging, chances; and whole numbers that meet the budget."""

from __future__ import annotations

import math

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

from conftest import SMALL, make, photos_for
from reference import cosine
from tntprune import DiffRate, Random, UsageError, UserError, load_, macs, record, reduce_, save
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.methods.base import Layout
from tntprune.methods.diffrate import CompressionRates, Soft, shifted, stays
from tntprune.methods.steps import Place, Step
from tntprune.ops import attention
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import start
from tntprune.training.calibrate import calibrate_
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer, learning

LAYOUT = Layout("vit", 12, 6, 2, (3, 3), True, heads=2, attn_dim=8)
ONE = {"epochs": 1, "batch_size": 6, "progress": False, "amp": "none"}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("ranked", "leaving"), [(6, 4), (6, 6), (9, 5), (2, 1)])
def test_the_last_are_pruned_and_the_next_ones_merged(ranked, leaving):
    method = CompressionRates(DiffRate(at=2, prune=1), LAYOUT)
    heads = Heads(*(random(2, 2, 11, 4, seed=seed) for seed in range(3)), scale=0.5)
    tokens = start(random(2, 11, 12), 2, follow=True)
    found = method(tokens, Step(Place(2, True), 9, ranked, leaving), heads)
    for image in range(2):
        logits = [[float(q[0] @ key) * 0.5 for key in k] for q, k in zip(heads.query[image], heads.key[image])]
        total = [sum(math.exp(logit) for logit in row) for row in logits]
        score = [sum(math.exp(row[2 + i]) / whole for row, whole in zip(logits, total)) for i in range(9)]
        order = sorted(range(9), key=lambda i: -score[i])
        groups = {i: [i] for i in order[:leaving]}
        for i in order[leaving:ranked]:
            groups[max(groups, key=lambda j: cosine(tokens.patches[image, i], tokens.patches[image, j]))].append(i)
        assert found.index[image].tolist() == order[:leaving]
        for x, members in zip(found.patches[image], groups.values()):
            torch.testing.assert_close(x, sum(tokens.patches[image, i] for i in members) / len(members))
        if leaving < ranked:
            assert found.size[image].tolist() == [len(members) for members in groups.values()]
        assert (found.carrier[image] == -1).nonzero().flatten().tolist() == sorted(order[ranked:])
    assert torch.equal(found.x[:, :2], tokens.x[:, :2])


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"at": 3}, [(64, 61, 57)]),  # 0.9 of 64 is 57: 7 go, of which 3 are pruned
        ({"at": (2, 4), "keep": (0.5, 1.0), "pruned_share": 1}, [(64, 32, 32)]),
        ({"at": (2, 4), "tokens": (60, 10), "pruned_share": 0}, [(64, 64, 60), (60, 60, 10)]),
        ({"at": (2, 4), "prune": 40}, [(64, 24, 24), (24, 1, 1)]),
        ({"at": (2, 4), "prune": (1, 2), "merge": (70, 3)}, [(64, 63, 1)]),
        (
            {"prune": (1, 2, 3, 4, 5), "merge": 0},
            [(64, 63, 63), (63, 61, 61), (61, 58, 58), (58, 54, 54), (54, 49, 49)],
        ),
    ],
)
def test_how_many_go(given, steps):
    found = reduction_of(reduce_(make("plain"), DiffRate(**given))).steps(64)
    assert [step[1:4] for step in found] == steps


def test_each_location_on_its_own_does_what_it_does_among_the_others():
    config = DiffRate(at=(2, 4), prune=(3, 5), merge=7)
    assert config.singles(6) == [DiffRate(at=2, prune=3, merge=7), DiffRate(at=4, prune=5, merge=7)]
    assert DiffRate(prune=1).changed(keep=0.5) == DiffRate(keep=0.5)


def test_chances_are_those_of_loops_and_the_mask_has_their_gradient():
    rates = random(7).double().requires_grad_()
    mask = stays(rates, 3, 5)
    assert mask.tolist() == pytest.approx([1, 1, 1, 0, 0, 1, 1])
    weight = random(7, seed=1).double()
    (found,) = torch.autograd.grad((mask * weight).sum(), rates)
    whole = sum(r.exp() for r in rates)
    chance = [sum(rates[j].exp() for j in range(i, 7)) / whole for i in range(7)]  # that i + 1 or more are left
    (wanted,) = torch.autograd.grad(sum(c * w for c, w in zip(chance, weight)), rates)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["plain", "distilled", "registers", "avg_with_cls", "eva02"])
def test_masked_tokens_give_in_training_what_their_absence_gives_at_test_time(kind, monkeypatch):
    monkeypatch.setattr(attention, "UNSEEN", 0.0)
    model = reduce_(make(kind), DiffRate(at=(2, 3, 5), budget=0.6))
    method, images = reduction_of(model), photos_for(model)
    method.train()
    patches, left = method.layout.patches, shifted(method.expected().tolist(), 0.0, method.layout.patches)
    before = [patches, *(leaving for _, leaving in left)]
    prune = tuple(count - ranked for count, (ranked, _) in zip(before, left))
    merge = tuple(ranked - leaving for ranked, leaving in left)
    assert all(prune) and all(merge)
    with record(model) as trace, torch.no_grad():
        found = model(images)
    assert all(kept.shape[1] == patches for kept in trace.kept.values())  # in training all tokens stay
    with torch.no_grad():
        wanted = reduce_(model, DiffRate(at=(2, 3, 5), prune=prune, merge=merge))(images)
        assert not torch.allclose(wanted, base_of(model)(images), atol=1e-3)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


def used(model):
    """The share of the blocks' multiply-accumulates that a reduced model needs."""
    found, base = macs(model), macs(base_of(model))
    return (sum(found.per_block) + sum(found.reduction.values())) / sum(base.per_block)


@pytest.mark.parametrize("kind", ["plain", "swiglu", "avg_with_cls"])
@pytest.mark.parametrize("budget", [0.35, 0.6, 0.9, 1.0])
def test_the_numbers_meet_the_budget(kind, budget):
    model = reduce_(make(kind), DiffRate(budget=budget))
    assert budget - 0.03 < used(model) <= budget
    reduction_of(model).set_calibrated()  # as if these had been learned
    config = reduction_of(model).config
    assert config.budget == budget and not config.must_train and budget - 0.03 < used(model) <= budget


def test_a_budget_that_cannot_be_met_is_refused():
    with pytest.raises(UsageError, match=r"budget=0.2: at these blocks at least 0\.\d+ of the multiply-acc"):
        reduce_(make("plain"), DiffRate(at=(4, 5), budget=0.2))


def test_the_penalty_is_the_squared_distance_from_the_budget():
    model = reduce_(make("plain"), DiffRate(at=(2, 4), budget=0.7, budget_weight=3.0))
    method = reduction_of(model)
    each, pair, mlp = method.layout.costs[0]
    (_, first), (_, second) = shifted(method.expected().tolist(), 0.0, 64)
    enter, leave = [64, 64, first, first, second, second], [64, first, first, second, second, second]
    total = sum((n + 1) * each + (n + 1) ** 2 * pair + (m + 1) * mlp for n, m in zip(enter, leave))
    base = 6 * (65 * each + 65**2 * pair + 65 * mlp)
    loss = method.penalty(start(random(1, 65, 32), 1), None)
    assert loss.item() == pytest.approx(3 * (total / base - 0.7) ** 2, rel=1e-3, abs=1e-9)
    with torch.no_grad():
        method.rates += torch.arange(64) * 0.2  # more are left
    loss = method.penalty(start(random(1, 65, 32), 1), None)
    (gradient,) = torch.autograd.grad(loss, method.rates)
    assert loss > 1e-3 and (gradient[:, 1, -1] > 0).all()  # that fewer are left lowers it


def test_training_changes_rates_alone_and_leaves_numbers_that_meet_the_budget(tmp_path):
    model = reduce_(make("plain"), DiffRate(budget=0.6))
    images = photos_for(model, 6)
    base = {name: value.clone() for name, value in base_of(model).state_dict().items()}
    rates = {name: value.clone() for name, value in reduction_of(model).state_dict().items()}
    untrained = reduction_of(model).steps(64)
    with learning(model):
        trainer = Trainer(model, Training(lr=0.3, warmup=0.0, amp="none"), 10)
        with torch.no_grad():
            reduction_of(model).rates += torch.arange(64) * 0.2  # far above the budget
        losses = [trainer.step(number, [(images, None)]).item() for number in range(10)]
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(value, base[name]) for name, value in base_of(model).state_dict().items())
    assert all(not torch.equal(value, rates[name]) for name, value in reduction_of(model).state_dict().items())
    config = reduction_of(model).config
    assert reduction_of(model).calibrated and config.budget == 0.6 and len(config.prune) == len(config.merge) == 5
    assert reduction_of(model).steps(64) != untrained and 0.55 < used(model) <= 0.6
    save(model, tmp_path)
    again = load_(make("plain"), tmp_path)
    assert reduction_of(again).config == config
    fixed = reduce_(make("plain"), DiffRate(prune=config.prune, merge=config.merge))
    assert not list(reduction_of(fixed).parameters())
    with torch.inference_mode():
        wanted = model(images)
        assert torch.equal(again(images), wanted) and torch.equal(fixed(images), wanted)
    states = reduce_(make("plain"), DiffRate(budget=0.6))
    states.load_state_dict(model.state_dict())
    assert reduction_of(states).steps(64) == reduction_of(model).steps(64)
    assert reduction_of(load_(make("plain"), tmp_path, keep=0.5)).steps(64)[0][1:4] == (64, 48, 32)
    calibrate_(again, images, **ONE)  # goes on
    assert used(again) <= 0.6


def test_what_was_never_trained_is_saved_as_that(tmp_path):
    model = reduce_(make("plain"), DiffRate(budget=0.6))
    with pytest.warns(UserWarning, match="never calibrated"):
        save(model, tmp_path)
    with pytest.warns(UserWarning, match="never calibrated"), torch.inference_mode():
        again = load_(make("plain"), tmp_path)
        again(photos_for(again))
    assert reduction_of(again).steps(64) == reduction_of(model).steps(64) and reduction_of(again).config.must_train


def test_the_published_objective_takes_labels():
    model = reduce_(make("plain"), DiffRate(budget=0.6, objective="ce"))
    with pytest.raises(UserError, match="cross-entropy needs labels"):
        calibrate_(model, photos_for(model, 6), **ONE)
    assert reduction_of(model).config.must_train


def test_beside_another_reduction_learned_numbers_stay_and_are_not_trained():
    learned = DiffRate(at=(1, 2), budget=0.8, prune=(1, 1), merge=(1, 2))
    model = reduce_(make("plain"), learned, Random(at=3, keep=0.5))
    with pytest.raises(UserError, match="nothing to train"):
        calibrate_(model, photos_for(model), **ONE)
    method = reduction_of(model)
    patches = method.layout.patches
    assert method.plan(patches) == method.train().plan(patches) and method.parts[0].config == learned
    images = photos_for(model)
    assert torch.equal(model.forward_features(images), model.eval().forward_features(images))


def test_images_of_another_size_cannot_be_trained_on():
    model = reduce_(make("dynamic"), DiffRate(budget=0.6))
    with pytest.raises(UsageError, match="images of 48 patches; numbers for 64 are learned here"):
        calibrate_(model, torch.randn(6, 3, 24, 32), **ONE)


def test_attention_of_masked_tokens_reaches_gradients():
    model = reduce_(make("plain"), DiffRate(at=(2, 3), budget=0.7))
    seen = []
    reduction_of(model).train().register_forward_hook(lambda module, args, out: seen.append(out.state))
    images = photos_for(model)
    model(images).square().sum().backward()
    assert all(isinstance(state, Soft) for state in seen) and len(seen) == 2
    assert (reduction_of(model).rates.grad.abs().sum(2) > 0).all()


def test_costs_are_the_row_the_comparisons_and_one_sum_for_each_merged_token():
    model = make("plain")  # 64 patches, width 32
    found = macs(reduce_(model, DiffRate(at=3, prune=9, merge=5)))
    assert found.reduction == {3: 65 * 32 + 5 * 50 * 32 + 5 * 32}
    assert found.tokens == [64, 64, 64, 50, 50, 50] and found.mlp_tokens == [64, 64, 50, 50, 50, 50]


def test_where_it_cannot_be_applied():
    with pytest.raises(UserError, match="diffrate cannot be applied here: it ranks tokens by the CLS token's"):
        reduce_(make("no_cls"), DiffRate())
    with torch.random.fork_rng():
        model = VisionTransformer(**SMALL, block_fn=ParallelScalingBlock).eval()
    with pytest.raises(UserError, match="diffrate cannot be applied here: it reads the attention"):
        reduce_(model, DiffRate())
    with pytest.raises(UsageError, match="diffrate needs the whole model to itself"):
        reduce_(make("plain"), Random(at=1), DiffRate(at=(3, 4), budget=0.6))
    reduce_(make("plain"), Random(at=1), DiffRate(at=(3, 4), prune=5))
    with pytest.raises(UsageError, match=r"budget=0.5: what goes is only known on a model; expected prune and merge"):
        DiffRate(at=3, budget=0.5).step(None, 9, 9)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"at": 0}, "at=0: no block has been seen"),
        ({"prune": -1}, "prune=-1"),
        ({"merge": 1.5}, "merge=1.5"),
        ({"prune": 3, "keep": 0.5}, "prune was given with keep"),
        ({"merge": 3, "tokens": 5}, "merge was given with tokens"),
        ({"budget": 0.5, "keep": 0.5}, "budget was given with keep"),
        ({"budget": 0}, "budget=0"),
        ({"budget": 1.1}, "budget=1.1"),
        ({"at": 3, "prune": (1, 2)}, "2 values for 1 location"),
        ({"pruned_share": 2}, "pruned_share=2"),
        ({"budget_weight": -1}, "budget_weight=-1"),
        ({"objective": "both"}, "objective='both'"),
    ],
)
def test_bad_options_say_what_is_expected(given, word):
    with pytest.raises(UsageError) as caught:
        DiffRate(**given)
    assert word in str(caught.value) and "expected" in str(caught.value)

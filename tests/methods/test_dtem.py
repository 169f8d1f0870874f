"""DTEM against loops: the embedding, the soft choice of pairs, the soft mean; and what its training does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

from conftest import SMALL, make, photos_for
from reference import cosine, layer_norm
from tntprune import DTEM, ToMe, UsageError, UserError, load_, macs, record, reduce_, save
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.methods import implementation
from tntprune.methods.base import Layout
from tntprune.methods.dtem import chosen_softly, merge_softly
from tntprune.methods.steps import Place, Step
from tntprune.methods.tome import match
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import merge, start
from tntprune.training.calibrate import calibrate_
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer, learning

LAYOUT = Layout("vit", 12, 4, 1, (3, 3), True, heads=2, attn_dim=8)
ONE = {"epochs": 1, "batch_size": 6, "progress": False, "amp": "none"}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def method_for(config, patches=9, training=False):
    method = implementation(type(config))(config, LAYOUT._replace(grid=(1, patches))).train(training)
    for number, parameter in enumerate(method.parameters()):
        parameter.data += random(*parameter.shape, seed=number)
    return method


def heads_of(batch, tokens):
    return Heads(*(random(batch, 2, tokens, 4, seed=seed) for seed in range(3)), scale=0.5)


@pytest.mark.parametrize("metric", ["concat", "mean", "x"])
def test_tokens_are_merged_by_the_cosine_of_their_embeddings(metric):
    method = method_for(DTEM(at=2, r=3, metric=metric, width=5))
    tokens, heads = replace(start(random(2, 10, 12), 1), block=2), heads_of(2, 10)
    with torch.no_grad():
        found = method(tokens, Step(Place(2, True), 9, 6, 6), heads)
    layer = method.embeddings["2"].requires_grad_(False)
    for image in range(2):
        made = []
        for i in range(9):
            keys = [heads.key[image, head, 1 + i] for head in range(2)]
            read = {
                "concat": torch.cat(keys),
                "mean": (keys[0] + keys[1]) / 2,
                "x": layer_norm(tokens.patches[image, i]),
            }
            made.append(torch.stack([(row * read[metric]).sum() + b for row, b in zip(layer.weight, layer.bias)]))
        first, second = range(1, 9, 2), range(0, 9, 2)  # behind one prefix token
        best = {a: max(second, key=lambda b: cosine(made[a], made[b])) for a in first}
        gone = sorted(first, key=lambda a: -cosine(made[a], made[best[a]]))[:3]
        wanted = [[a] for a in first if a not in gone] + [[b, *(a for a in gone if best[a] == b)] for b in second]
        assert found.size[image].tolist() == [len(members) for members in wanted]
        for x, members in zip(found.patches[image], wanted):
            torch.testing.assert_close(x, sum(tokens.patches[image, i] for i in members) / len(members))


def soft_pairs(first, second, gone, neighbours, temperature):
    """One image: the parts of each of the first that go into each of the second, pair by pair."""
    alike = [[cosine(a, b) for b in second] for a in first]
    pairs = [(i, j) for i, row in enumerate(alike) for j in sorted(range(len(row)), key=lambda j: -row[j])[:neighbours]]
    logits, part = {p: alike[p[0]][p[1]] / temperature for p in pairs}, dict.fromkeys(pairs, 0.0)
    for _ in range(gone):
        highest = max(logits.values())
        weight = {p: math.exp((logit - highest) / temperature) for p, logit in logits.items()}
        share = {p: w / sum(weight.values()) for p, w in weight.items()}
        for p in pairs:
            part[p] += share[p]
        of = {i: sum(s for p, s in share.items() if p[0] == i) for i in range(len(first))}
        logits = {p: logit + math.log(max(1 - of[p[0]], torch.finfo(torch.float32).eps)) for p, logit in logits.items()}
    found = torch.zeros(len(first), len(second))
    for i in range(len(first)):
        total = sum(p for pair, p in part.items() if pair[0] == i)
        for j in range(len(second)):
            found[i, j] = part.get((i, j), 0.0) / max(1.0, total)
    return found


@pytest.mark.parametrize(("gone", "neighbours", "temperature"), [(1, 3, 0.1), (4, 3, 0.3), (4, 9, 1.0), (3, 1, 0.2)])
def test_pairs_are_chosen_softly_one_after_the_other(gone, neighbours, temperature):
    first, second = random(2, 4, 6), random(2, 5, 6, seed=1)
    found = chosen_softly(first, second, gone, neighbours, temperature)
    for image in range(2):
        wanted = soft_pairs(first[image], second[image], gone, neighbours, temperature)
        torch.testing.assert_close(found[image], wanted, atol=1e-4, rtol=1e-3)
    assert found.sum(2).max() <= 1 + 1e-6


@pytest.mark.parametrize("odd", [0, 1])
def test_soft_merging_is_what_loops_give_and_keeps_all_patches(odd):
    tokens = start(random(1, 9, 3), 1)
    size = torch.tensor([[3.0, 1, 2, 1, 1, 0.5, 0.5, 1]])
    a, b = list(range(odd, 7, 2)), list(range(1 - odd, 7, 2))  # the last token takes no part
    share = random(1, len(a), len(b), seed=2).abs() / 10
    found = merge_softly(replace(tokens, size=size), share, 7, odd)
    sizes, x = {7: 1.0}, {7: tokens.patches[0, 7]}
    for i, p in enumerate(a):
        sizes[p], x[p] = float(size[0, p]) * (1 - float(share[0, i].sum())), tokens.patches[0, p]
    for j, p in enumerate(b):
        part = [float(share[0, i, j]) * float(size[0, q]) for i, q in enumerate(a)]
        sizes[p] = float(size[0, p]) + sum(part)
        mixed = float(size[0, p]) * tokens.patches[0, p] + sum(w * tokens.patches[0, q] for w, q in zip(part, a))
        x[p] = mixed / sizes[p]
    order = [*sorted(range(7), key=lambda p: -sizes[p]), 7]
    assert found.index[0].tolist() == order and torch.equal(found.x[:, 0], tokens.x[:, 0])
    torch.testing.assert_close(found.size[0], torch.tensor([sizes[p] for p in order]))
    torch.testing.assert_close(found.patches[0], torch.stack([x[p] for p in order]))
    assert found.size.sum() == pytest.approx(10)


def test_gradients_of_the_soft_choice_and_the_soft_mean_are_right():
    x, size = random(1, 8, 3).double().requires_grad_(), random(1, 7).double().abs().requires_grad_()

    def softly(x, size):
        tokens = replace(start(x, 1), size=size)
        share = chosen_softly(tokens.patches[:, 1::2], tokens.patches[:, 0::2], 2, 3, 0.4)
        found = merge_softly(tokens, share, 7, 1)
        return found.x, found.size

    assert torch.autograd.gradcheck(softly, (x, size))


def test_a_cold_softmax_chooses_the_pairs_that_are_merged_at_test_time():
    angles = torch.tensor(
        [[0.0, 1.0, 2.0, 3.0, 4.2], [0.14, 1.32, 2.45, 3.55, 5.3]]
    )  # the last pair is the least alike
    first, second = torch.stack([angles.cos(), angles.sin()], 2).unsqueeze(1)  # (1, 5, 2) each
    share = chosen_softly(first, second, 3, 2, 0.02)
    torch.testing.assert_close(share, torch.diag(torch.tensor([1.0, 1, 1, 0, 0]))[None], atol=1e-3, rtol=0)
    tokens = start(random(1, 10, 3), 0)
    hard = merge(tokens, *match(torch.stack([first, second], 2).flatten(1, 2), 3, 0))
    soft = merge_softly(tokens, share, 10, 0)
    order = hard.index[0].argsort(), soft.index[0, :7].argsort()
    torch.testing.assert_close(soft.x[0, :7][order[1]], hard.x[0][order[0]], atol=5e-3, rtol=0)
    torch.testing.assert_close(soft.size[0, :7][order[1]], hard.size[0][order[0]], atol=5e-3, rtol=0)
    assert soft.size[0, 7:].max() < 1e-3


@pytest.mark.parametrize("kind", ["plain", "distilled", "no_cls"])
def test_before_training_it_is_tome(kind):
    model, images = make(kind), photos_for(make(kind))  # heads of 8
    with torch.inference_mode():
        wanted = reduce_(model, ToMe(at=(1, 3), r=7))(images)
        assert torch.equal(reduce_(model, DTEM(at=(1, 3), r=7, width=8, metric="mean"))(images), wanted)
        torch.testing.assert_close(reduce_(model, DTEM(at=(1, 3), r=7, width=8))(images), wanted)
        assert not torch.allclose(reduce_(model, DTEM(at=(1, 3), r=7, width=3))(images), wanted)


@pytest.mark.parametrize("metric", ["concat", "x"])
def test_training_lowers_its_loss_on_a_model_that_stays_as_it_was(metric):
    model = reduce_(make("plain"), DTEM(at=(1, 3), r=20, metric=metric))
    images = photos_for(model, 6)
    base = {name: value.clone() for name, value in base_of(model).state_dict().items()}
    with learning(model):
        trainer = Trainer(model, Training(lr=0.06, warmup=0.0, amp="none"), 6)
        losses = [trainer.step(number, [(images, None)]).item() for number in range(6)]
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(value, base[name]) for name, value in base_of(model).state_dict().items())
    assert reduction_of(model).calibrated


def test_the_published_objective_takes_labels():
    model = reduce_(make("plain"), DTEM(at=2, objective="ce"))
    with pytest.raises(UserError, match="cross-entropy needs labels"):
        calibrate_(model, photos_for(model, 6), **ONE)
    calibrate_(model, photos_for(model, 6), torch.arange(6), **ONE)


def test_the_last_block_learns_where_something_reads_its_patches():
    for kind, learns in (("plain", False), ("no_cls", True)):
        model = reduce_(make(kind), DTEM(at=(2, 6), r=9))
        before = reduction_of(model).embeddings["6"].weight.clone()
        calibrate_(model, photos_for(model, 6), **ONE)
        assert torch.equal(reduction_of(model).embeddings["6"].weight, before) != learns
    with pytest.raises(UsageError, match="at=6: nothing reads patch tokens behind the last block"):
        calibrate_(reduce_(make("plain"), DTEM(at=6, r=9)), photos_for(model, 6), **ONE)


def test_training_lets_all_tokens_stay_and_a_trace_sees_that():
    model = reduce_(make("plain"), DTEM(at=(2, 4), r=9))
    reduction_of(model).train()
    with record(model) as trace, torch.no_grad():
        model(photos_for(model))
    assert {block: kept.shape[1] for block, kept in trace.kept.items()} == {2: 64, 4: 64}


def test_sizes_count_in_training_even_where_they_do_not_at_test_time():
    tokens = replace(start(random(1, 5, 6), 1), size=torch.tensor([[1.0, 0.25, 0, 2]]))
    method = method_for(DTEM(at=2, r=3, proportional=False))
    assert method.bias(tokens, 3) is None
    bias = method.train().bias(tokens, 3).flatten()
    torch.testing.assert_close(bias.exp(), torch.tensor([1.0, 1, 0.25, 0, 2]))
    assert [block.biased for block in method.plan(9)] == [False] * 3 + [True] * 2


def test_what_was_learned_serves_other_schedules_at_the_same_blocks(tmp_path):
    model = reduce_(make("plain"), DTEM(at=(2, 4), r=9))
    images = photos_for(model, 6)
    calibrate_(model, images, lr=0.3, **ONE)
    save(model, tmp_path)
    again = load_(make("plain"), tmp_path)
    with torch.inference_mode():
        assert torch.equal(again(images), model(images))
        assert not torch.equal(reduce_(make("plain"), DTEM(at=(2, 4), r=9))(images), model(images))
    fewer = load_(make("plain"), tmp_path, at=4, keep=0.3)
    assert torch.equal(reduction_of(fewer).embeddings["4"].weight, reduction_of(model).embeddings["4"].weight)
    with pytest.raises(UserError, match="has nothing for block 3; expected those that it was trained for: 2, 4"):
        load_(make("plain"), tmp_path, at=3)
    with pytest.raises(UserError, match="width"):
        load_(make("plain"), tmp_path, width=8)


def test_costs_are_the_embedding_the_comparisons_and_one_sum_for_each_token():
    model = make("plain")  # 64 patches, 4 heads of 8, width 32
    found = macs(reduce_(model, DTEM(at=3, r=9)))
    assert found.reduction == {3: 64 * 32 * 64 + 32 * 32 * 64 + 9 * 32}
    assert macs(reduce_(model, DTEM(at=3, r=9, metric="mean", width=5))).reduction == {
        3: 64 * 8 * 5 + 32 * 32 * 5 + 9 * 32
    }
    assert macs(reduce_(model, DTEM(at=3, tokens=20, metric="x", width=5))).reduction == {
        3: 64 * (32 * 5 + 5 * 32) + (32 * 32 + 16 * 16) * 5 + 44 * 32
    }


def test_blocks_that_do_not_open_are_refused():
    with torch.random.fork_rng():
        model = VisionTransformer(**SMALL, block_fn=ParallelScalingBlock).eval()
    with pytest.raises(UserError, match="dtem cannot be applied here: it learns by letting the sizes"):
        reduce_(model, DTEM(at=2, inside=False, metric="x", proportional=False))


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"width": 0}, "width=0"),
        ({"width": 1e9}, "width"),
        ({"temperature": 0}, "temperature=0"),
        ({"neighbours": 0}, "neighbours=0"),
        ({"objective": "both"}, "objective='both'"),
        ({"r": 8, "keep": 0.5}, "r was given with keep or tokens"),
        ({"at": 0}, "at=0: no block has been seen"),
    ],
)
def test_bad_options_say_what_is_expected(given, word):
    with pytest.raises(UsageError) as caught:
        DTEM(**given)
    assert word in str(caught.value) and "expected" in str(caught.value)

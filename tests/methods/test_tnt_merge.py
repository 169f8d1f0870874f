"""TNT that merges: its step against loops, what it learns, and where it is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

from conftest import SMALL, make, photos_for
from reference import act, by_place, chosen, cosine, first_half, folded, score, steps_of
from tntprune import ATS, TNT, ToMe, UsageError, UserError, load_, macs, reduce_, save
from tntprune.backbones.attach import reduction_of
from tntprune.methods.steps import Place
from tntprune.ops.tokens import start
from tntprune.training.calibrate import calibrate_
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer, learning

ALWAYS = 1 - 1e-9  # a share of batches: all of them


def stirred(config, kind="plain"):
    """A reduced model whose scores, weights and powers differ."""
    model = reduce_(make(kind), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in reduction_of(model).parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


@pytest.mark.parametrize(
    "options", [{}, {"scorer": "mlp", "hidden": 3}, {"score_weight": 1.0, "size_weight": 0.5}], ids=str
)
@pytest.mark.parametrize("metric", ["x", "mean"])
@torch.inference_mode()
def test_the_step_is_what_loops_say(metric, options):
    """Of tokens that were merged before, behind two prefix tokens."""
    model = stirred(TNT(at=2, tokens=11, inside=True, metric=metric, **options), "distilled")
    method = reduction_of(model)
    size = torch.randint(1, 5, (2, 64), generator=torch.Generator().manual_seed(2)).float()
    tokens = replace(start(model.embed(photos_for(model, 2))[0], 2), size=size)
    heads = first_half(model, 2, tokens.x)[1]
    out = act(method, tokens, Place(2, inside=True), method.plan(64), heads)
    for b in range(2):
        x = tokens.x[b, 2:]
        scores = torch.stack([score(method.scorers["2"], token, True) for token in x])
        scores = (scores - scores.mean()) / scores.std(correction=0)
        compared = x if metric == "x" else heads.key[b, :, 2:].mean(0)
        stay, into = chosen(scores, compared, size[b], 11, method.config.weight_of_score, method.config.size_weight)
        fade, kept = max(0.0, float(method.merge_gates["2"])), list(into.items())
        share = {i: math.exp(fade * (cosine(compared[i], compared[j]) - 1)) for i, j in kept}
        lift = max(0.0, float(method.norm_corrections["2"]))
        merged, sizes = folded(x, size[b], torch.exp(method.merge_weights["2"] * scores), stay, into, share, lift)
        assert out.index[b].tolist() == stay and out.size[b].tolist() == pytest.approx(sizes)
        torch.testing.assert_close(out.x[b, 2:], merged, atol=1e-5, rtol=1e-4)


def test_a_merged_token_counts_in_attention_by_its_size_to_the_power_of_the_block():
    method = reduction_of(stirred(TNT(at=2)))
    tokens = replace(start(torch.randn(1, 5, 32), 1), size=torch.tensor([[1.0, 2, 4, 1]]))
    for block in (3, 6):
        bias = method.bias(tokens, block)
        expected = torch.tensor([1.0, 1, 2, 4, 1]) ** method.powers[block - 1]
        torch.testing.assert_close(bias.flatten().exp(), expected)
    assert method.bias(replace(tokens, size=None), 3) is None
    assert reduction_of(stirred(TNT(at=2, proportional=False))).bias(tokens, 3) is None


@pytest.mark.parametrize("metric", ["x", "mean"])
@pytest.mark.parametrize("kind", ["plain", "no_cls", "map_pool"])
@torch.inference_mode()
def test_copies_that_are_merged_by_size_change_nothing(kind, metric):
    """Every patch is there four times: with powers of 1, an image of one of each says the same."""
    model = make(kind)
    model.pos_embed.zero_()
    patches = torch.randn(2, 3, 4, 4, 4, 4, generator=torch.Generator().manual_seed(0))  # 4 x 4 patches of 4 x 4
    patches = patches.repeat(1, 1, 2, 2, 1, 1)
    images = patches.permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 32)
    before = model(images)
    config = TNT(at=(1, 2), tokens=(40, 16), score_weight=0.0, size_weight=0.0, inside=metric == "mean", metric=metric)
    method = reduction_of(reduce_(model, config))
    method.powers.fill_(1.0)
    assert macs(model).tokens[-1] == 16
    torch.testing.assert_close(model(images), before, atol=1e-5, rtol=1e-4)
    tokens = replace(start(torch.randn(1, 5, 32), 1), size=torch.tensor([[1.0, 2, 4, 1]]))
    assert torch.equal(method.bias(tokens, 3), reduction_of(reduce_(make("plain"), ToMe(r=2))).bias(tokens, 3))
    method.powers.fill_(0.0)
    assert not torch.allclose(model(images), before, atol=1e-5, rtol=1e-4)


def test_padding_takes_no_part_at_any_power():
    model = reduce_(make("plain"), TNT(at=1, keep=0.5), ATS(at=2, tokens=20))
    method = reduction_of(model)
    tokens = replace(start(torch.randn(1, 5, 32), 1), size=torch.tensor([[1.0, 0, 4, 0]]))
    for power in (-1.0, 0.0, 1.0):
        with torch.no_grad():
            method.parts[0].powers.fill_(power)
        assert (method.bias(tokens, 3).flatten() == -1e4).tolist() == [False, False, True, False, True]


def plans(method, count=400):
    torch.manual_seed(0)
    return [by_place(steps_of(method.plan(64))) for _ in range(count)]


def is_pruned(plan):
    return all(step.leaving < step.entering for step in plan.values())


def test_a_share_of_the_batches_is_pruned():
    for share in (0.0, 0.4, 0.9):
        method = reduction_of(reduce_(make("plain"), TNT(at=2, prune_prob=share))).train()
        drawn = [is_pruned(plan) for plan in plans(method)]
        assert sum(drawn) / len(drawn) == pytest.approx(share, abs=0.07)
    assert TNT(at=2).resolved.prune_prob == 0.4 and TNT(at=(2, 3)).resolved.prune_prob == 0.4
    for recipe in ("relative", "paper"):
        assert TNT(at=(2, 3), recipe=recipe, how="merge").resolved.prune_prob == 0
    for config in (TNT(at=2, recipe="relative"), TNT(at=2, how="drop"), TNT(at=2, similar=3)):
        method = reduction_of(reduce_(make("plain"), config)).train()
        assert not any(is_pruned(plan) for plan in plans(method, 50))


def test_one_location_is_pruned_at_every_block_with_a_scorer_and_to_many_counts():
    blocks = (1, 2, 3, 4, 5)
    method = reduction_of(reduce_(make("plain"), TNT(at=2, prune_prob=ALWAYS, noise_blocks=blocks))).train()
    drawn = [(place, step) for plan in plans(method) for place, step in plan.items()]
    assert len(drawn) == 400 and {place.block for place, _ in drawn} == set(blocks)
    left = [step.leaving for _, step in drawn]
    assert 5 <= min(left) < 8 and 40 < max(left) <= 45  # 0.08 and 0.7 of 64


def test_several_locations_are_rehearsed_together_each_with_an_equal_share():
    config = TNT(at=(1, 3, 6), tokens=(9, 9, 8), inside=True, prune_prob=ALWAYS)
    method = reduction_of(reduce_(make("plain"), config)).train()
    for plan in plans(method, 50):
        steps = list(plan.values())
        assert [step.place for step in steps] == [Place(1, True), Place(3, True), Place(6, True)]
        assert [step.entering for step in steps[1:]] == [step.leaving for step in steps[:-1]]
        share = (steps[-1].leaving / 64) ** (1 / 3)
        for number, step in enumerate(steps, 1):
            assert step.leaving == pytest.approx(64 * share**number, abs=2)


@pytest.mark.parametrize("kind", ["plain", "no_cls", "map_pool"])
@pytest.mark.parametrize(
    "config", [TNT(at=(1, 3)), TNT(at=(1, 3), inside=True, metric="mean", proportional=False)], ids=["after", "inside"]
)
def test_rehearsal_reaches_all_that_is_learned_and_leaves_the_model_alone(kind, config):
    model = stirred(config.changed(prune_prob=ALWAYS, noise_blocks=(1, 2, 3)), kind)
    before = {name: value.clone() for name, value in model.state_dict().items() if "reduction." not in name}
    with learning(model):
        loss = Trainer(model, Training(amp="none", warmup=0.0), 4).step(1, [(photos_for(model), None)])
        assert loss > 0
        method = reduction_of(model)
        for block in (1, 3):
            assert all(p.grad.abs().sum() > 0 for p in method.scorers[str(block)].parameters() if p.ndim > 1)
            assert method.merge_weights[str(block)].grad != 0
        assert method.scorers["2"].layers[0].weight.grad is None  # nothing happened there
        if config.proportional:
            assert (method.powers.grad != 0).tolist() == [False, *[True] * 5]
        else:
            assert method.powers.grad is None
        others = [p for name, p in model.named_parameters() if "reduction." not in name]
        assert all(p.grad is None for p in others)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)


def test_a_training_changes_scorers_weights_and_powers_and_is_saved(tmp_path):
    model = reduce_(make("plain"), TNT(at=(2, 4), keep=0.6, noise_blocks=(2, 3, 4)))
    first = {name: value.clone() for name, value in reduction_of(model).state_dict().items()}
    images = photos_for(model, 12)
    calibrate_(model, images, epochs=5, batch_size=4, amp="none", progress=False)
    learned = reduction_of(model).state_dict()
    changed = {name for name in first if not torch.equal(first[name], learned[name])}
    assert {
        "powers",
        "merge_weights.2",
        "merge_weights.4",
        "scorers.2.layers.0.weight",
        "scorers.4.layers.0.weight",
    } <= changed
    save(model, tmp_path)
    again = load_(make("plain"), tmp_path)
    with torch.inference_mode():
        assert torch.equal(again(images), model.eval()(images))
        fewer = load_(make("plain"), tmp_path, at=3, keep=0.5)
        assert torch.equal(reduction_of(fewer).powers, learned["powers"]) and fewer(images).isfinite().all()
        load_(fewer, tmp_path, how="drop")
    assert "powers" not in reduction_of(fewer).state_dict()


def test_the_same_seed_draws_the_same_training():
    def learned(seed):
        model = reduce_(make("plain"), TNT(at=2))
        calibrate_(model, photos_for(model, 8), epochs=3, batch_size=4, amp="none", progress=False, seed=seed)
        return torch.cat([value.flatten() for value in reduction_of(model).state_dict().values()])

    assert torch.equal(learned(0), learned(0)) and not torch.equal(learned(0), learned(1))


def test_behind_the_last_attention_nothing_reads_patches_so_that_there_is_no_noise():
    def noisy(kind, blocks):
        config = TNT(at=blocks[-1], inside=True, noise_blocks=blocks, noise_at="all", prune_prob=0.0)
        plan = reduction_of(reduce_(make(kind), config)).train().plan(64)
        return [step.place.block for step in steps_of(plan) if step.place.inside]

    assert noisy("plain", (4, 5, 6)) == [4, 5]
    with pytest.raises(UsageError, match="at=6: nothing reads patch tokens behind the last block's attention"):
        noisy("plain", (6,))
    assert noisy("no_cls", (4, 5, 6)) == noisy("map_pool", (4, 5, 6)) == [4, 5, 6]


def test_noise_is_learned_where_tokens_go_and_up_to_there_in_the_recipes_that_drop():
    def blocks(**options):
        model = VisionTransformer(**{**SMALL, "depth": 8})
        return [int(block) for block in reduction_of(reduce_(model, TNT(**options))).scorers]

    assert blocks(at=2) == [2] == blocks(at=2, how="drop")  # which does not change what has been learned
    assert blocks(at=(0, 2, 7)) == [0, 2, 7]
    for recipe in ("relative", "paper"):
        assert blocks(at=2, recipe=recipe) == [1, 2, 3, 4, 5]
        assert blocks(at=(2, 7), recipe=recipe) == [1, 2, 3, 4, 5, 6, 7]
        assert blocks(at=8, inside=True, recipe=recipe) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert blocks(at=7, noise_blocks=(3, 7)) == [3, 7]


@torch.inference_mode()
def test_in_every_block_by_the_keys(model):
    depth = len(model.blocks)
    patches = reduction_of(reduce_(model, TNT())).layout.patches
    counts = tuple(patches - (number + 1) * max(1, patches // (2 * depth)) for number in range(depth))
    reduce_(model, TNT(at=tuple(range(1, depth + 1)), tokens=counts, inside=True, metric="mean"))
    method, found = reduction_of(model), macs(model)
    assert [block.sees for block in method.plan(patches)[1:]] == ["heads"] * depth
    assert found.tokens == [patches, *counts[:-1]] and found.mlp_tokens == list(counts)
    assert model(photos_for(model)).isfinite().all()
    assert [step.leaving for step in method.steps(patches)] == list(counts)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "count in attention; proportional=False would do"),
        ({"inside": True, "metric": "mean"}, "inside=False, metric='x', proportional=False would do"),
        ({"inside": True, "recipe": "relative"}, "attention; inside=False would do"),
    ],
    ids=str,
)
def test_blocks_that_cannot_be_opened_name_what_would_do(options, wanted):
    model = VisionTransformer(**SMALL, block_fn=ParallelScalingBlock).eval()
    with pytest.raises(UserError, match=f"tnt cannot be applied here: its blocks cannot be opened .*{wanted}"):
        reduce_(model, TNT(at=2, **options))
    changes = {"inside": False, "metric": "x", "proportional": False}
    assert reduce_(model, TNT(at=2, **{**options, **changes}))(photos_for(model)).isfinite().all()
    assert reduce_(model, TNT(at=2, recipe="relative"))(photos_for(model)).isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"how": "fold"}, "how='fold'.*drop.*merge"),
        ({"metric": "keys"}, "metric='keys'"),
        ({"score_weight": -0.1}, "score_weight=-0.1: expected a number, 0 or larger"),
        ({"size_weight": "much"}, "size_weight=much: expected a number, 0 or larger"),
        ({"inside": 1}, "inside=1"),
        ({"proportional": "yes"}, "proportional="),
        ({"noise_scale": "images"}, "noise_scale='images'"),
        ({"prune_prob": 1.0}, "prune_prob=1.0: expected a share from 0 to below 1"),
        ({"prune_prob": True}, "prune_prob=True: expected a share"),
        ({"prune_prob": 0.5, "recipe": "relative"}, "nothing is learned from dropping; expected 0, or how"),
        ({"prune_prob": 0.5, "similar": 3}, "prune_prob=0.5: nothing is learned from dropping"),
        ({"similar": 3, "how": "merge"}, "similar=3: with how='merge' what is similar is merged already"),
        ({"at": 0, "metric": "mean"}, "at=0: no block has been seen; expected at=1 and up, or metric='x'"),
        ({"at": 1, "noise_blocks": (0, 1), "metric": "mean"}, "noise_blocks: 0 given; no block has been seen there"),
        ({"at": 0, "inside": True}, "at=0: there is no block to act inside of; expected at=1 and up, or inside=False"),
        ({"beta": 0, "recipe": "relative"}, "beta=0: expected above 0"),
        ({"beta": -1}, "beta=-1: expected 0 or more"),
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(options, words):
    with pytest.raises(UsageError, match=words) as told:
        TNT(**options)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"at": 6}, "at=6: the model has 6 blocks, and removing tokens after the last one saves nothing"),
        ({"at": 7, "inside": True}, "at=7: the model has 6 blocks; expected 1 to 6"),
        ({"at": 3, "inside": True, "noise_blocks": (0, 3)}, "noise_blocks: 0 given; .* expected 1 to 6"),
        (
            {"at": 0, "recipe": "relative"},
            "at=0: no scorer there, because noise is learned at blocks 1 2 3 4 5; .*with 0 among them",
        ),
        ({"at": (2, 3), "tokens": (9, 10)}, "tokens=10 after block 3: only 9 patch tokens arrive"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_refused_in_one_line(options, words):
    with pytest.raises(UsageError, match=words):
        reduce_(make("plain"), TNT(**options))


def test_merging_by_keys_does_not_read_what_another_one_changed():
    with pytest.raises(UsageError, match="tnt after block 3 reads the attention of tokens that tome has changed"):
        reduce_(make("plain"), TNT(at=3, metric="mean"), ToMe(at=3, r=4))
    reduce_(make("plain"), TNT(at=3), ToMe(at=3, r=4))

"""Several reductions of one model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import make, photos_for
from reference import act, first_half
from tntprune import (
    ATS,
    TNT,
    AViT,
    DynamicViT,
    EViT,
    EvoViT,
    Random,
    ToMe,
    TopK,
    UsageError,
    UserError,
    ZeroTPrune,
    load_,
    macs,
    record,
    reduce_,
    restore_,
    save,
)  # fmt: skip
from tntprune.backbones.attach import reduction_of
from tntprune.methods import Combination, from_dict, implementation, to_dict
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import Place
from tntprune.ops.attention import Heads
from tntprune.ops.tokens import start
from tntprune.report.draw import kept_maps
from tntprune.training.calibrate import calibrate_
from tntprune.training.trainer import learning

PAIRS = [
    (TNT(at=2, keep=0.5, recipe="relative"), ToMe(at=(4, 5), r=6)),
    (TNT(at=2, keep=0.5), ToMe(at=(4, 5), r=6)),
    (TNT(at=(1, 2), keep=0.8, inside=True, metric="mean"), ATS(at=(4, 5), keep=0.6)),
    (TNT(at=(1, 2), keep=0.8, similar=5), ToMe(at=(3, 4, 5, 6), r=4)),
    (ToMe(at=(1, 2), r=8), TopK(at=4, keep=0.5)),
    (Random(at=1, keep=0.8), EViT(at=3, keep=0.7), ToMe(at=5, keep=0.5)),
    (ZeroTPrune(at=2, keep=0.7, similar=3), ToMe(at=(3, 4), r=5)),
    (ToMe(at=2, keep=0.7), ATS(at=(4, 5), keep=0.6)),
]


@pytest.mark.parametrize("configs", PAIRS, ids=lambda configs: "-".join(config.method for config in configs))
@pytest.mark.parametrize("kind", ["plain", "distilled"])
def test_a_combination_is_one_after_the_other(kind, configs):
    """The tokens of a model that does both are those of a walk that asks each reduction by hand."""
    model = reduce_(make(kind), *configs)
    images = photos_for(model)
    method = reduction_of(model)
    apart = [implementation(type(c))(c, method.layout).eval() for c in configs]
    for number, part in enumerate(apart):
        part.load_state_dict(method.parts[number].state_dict())
    steps = schedule(configs, 64, 6)
    plans = [part.planned([s for s in steps if s.part == number]) for number, part in enumerate(apart)]
    with torch.inference_mode():
        tokens = start(model.embed(images)[0], model.num_prefix_tokens)
        for part, plan in zip(apart, plans):
            tokens = act(part, tokens, Place(0), plan)
        for number in range(1, len(model.blocks) + 1):
            bias = next((b for b in (part.bias(tokens, number) for part in apart) if b is not None), None)
            x, heads = first_half(model, number, tokens.x, None, bias)
            if any(plan[number].sees == "map" for plan in plans):
                heads = Heads(**{**vars(heads), "attention": heads.map()})
            tokens = replace(tokens, x=x)
            for part, plan in zip(apart, plans):
                tokens = act(part, tokens, Place(number, True), plan, heads)
            tokens = replace(tokens, x=model.opened(number).mlp_half(tokens.x))
            for part, plan in zip(apart, plans):
                tokens = act(part, tokens, Place(number), plan, heads)
        expected = model.classify(replace(tokens, x=model.norm(tokens.x)))
        torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)


def test_counts_chain_and_macs_add_up():
    model = make("plain")
    both = macs(reduce_(model, TNT(at=2, keep=0.5), ToMe(at=(4, 5), r=6)))
    assert both.tokens == [64, 64, 32, 32, 26, 20] and both.mlp_tokens == [64, 64, 32, 26, 20, 20]
    assert set(both.reduction) == {2, 4, 5} and all(both.reduction.values())
    assert both.macs < macs(reduce_(model, TNT(at=2, keep=0.5))).macs
    with record(reduce_(model, TNT(at=2, keep=0.5), ToMe(at=(4, 5), r=6))) as trace, torch.inference_mode():
        model(photos_for(model))
    assert {block: kept.shape[1] for block, kept in trace.kept.items()} == {2: 32, 4: 26, 5: 20}
    assert restore_(model) is model


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ((TNT(at=2), Random(at=2)), "tnt and random both act after block 2; expected places of their own"),
        ((ToMe(r=4), TopK(at=3)), "tome and topk both act inside block 3"),
        ((TNT(at=2), AViT()), "avit needs the whole model to itself"),
        ((EvoViT(at=2), ToMe(at=4)), "evovit needs the whole model to itself"),
        (
            (ATS(at=2), ToMe(at=4)),
            "ats leaves another number of tokens in each image, which tome inside block 4 cannot go on from",
        ),
        ((ToMe(at=4, r=5), ATS(at=2)), "ats leaves another number of tokens in each image"),  # by place, not by order
        ((TopK(at=3), ToMe(at=3, r=4, inside=False)), "tome after block 3 reads the attention of tokens that topk"),
        ((ToMe(r=4), ZeroTPrune(at=3)), "zerotprune after block 3 reads the attention of tokens that tome has changed"),
        ((EViT(at=2, anneal=(0, 1)), ToMe(at=4)), "anneal: evit is trained alone"),
        ((TNT(at=2), DynamicViT(at=4)), "tnt and dynamicvit both learn; expected one of them"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_combined_is_refused(configs, words):
    model = make("plain")
    kind = type(model)
    with pytest.raises(UsageError, match=words):
        reduce_(model, *configs)
    assert type(model) is kind


def test_each_part_is_checked_against_the_model():
    with pytest.raises(UserError, match=r"topk cannot be applied here: .* CLS"):
        reduce_(make("no_cls"), TNT(at=2), TopK(at=4))


@pytest.mark.parametrize("learner", [TNT(at=2), DynamicViT(at=2, objective="kl")], ids=lambda c: c.method)
@pytest.mark.parametrize("other", [ToMe(at=4, r=9), ATS(at=5)], ids=lambda c: c.method)
def test_while_one_learns_the_others_stand_aside(learner, other):
    """The same training as alone: same scorers afterwards."""
    images = photos_for(make("plain"), 6)
    options = {"epochs": 2, "batch_size": 3, "amp": "none", "progress": False}
    alone = calibrate_(reduce_(make("plain"), learner), images, **options)
    both = calibrate_(reduce_(make("plain"), other, learner), images, **options)
    for name, value in reduction_of(alone).state_dict().items():
        assert torch.equal(value, reduction_of(both).parts[1].state_dict()[name])


def test_after_training_all_of_them_act():
    images = photos_for(make("plain"), 6)
    model = reduce_(make("plain"), TNT(at=2, prune_prob=0.0), ToMe(at=4, r=9))
    with learning(model):
        assert model.tokens(images, None, False).count == 64
    assert model.tokens(images, None, False).count == 23


def test_a_combination_is_saved_and_loaded(tmp_path):
    model = reduce_(make("plain"), TNT(at=2, keep=0.5), ToMe(at=(4, 5), r=6))
    images = photos_for(model)
    save(model, tmp_path / "both")
    again = load_(make("plain"), tmp_path / "both")
    with torch.inference_mode():
        assert torch.equal(again(images), model(images))
    with pytest.raises(UsageError, match="keep: a combination of tnt and tome is taken as it was saved"):
        load_(again, tmp_path / "both", keep=0.7)


def test_a_saved_reduction_takes_others_with_it(tmp_path):
    model = reduce_(make("plain"), TNT(at=2, keep=0.5))
    with torch.no_grad():
        for parameter in reduction_of(model).parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    save(model, tmp_path)
    learned = reduction_of(model).state_dict()
    load_(model, tmp_path, ToMe(at=(4, 5), r=6), keep=0.7)
    assert macs(model).tokens == [64, 64, 44, 44, 38, 32]
    for name, value in reduction_of(model).parts[0].state_dict().items():
        assert torch.equal(value, learned[name])


def test_json_round_trip():
    config = Combination(parts=(TNT(at=2, keep=0.5), ToMe(at=(4, 5), r=6)))
    assert from_dict(to_dict(config)) == config
    with pytest.raises(UsageError, match="1 reductions to combine; expected two or more"):
        Combination(parts=(TNT(),))


def test_a_further_reduction_that_learns_is_refused(tmp_path):
    save(reduce_(make("plain"), TopK(at=2)), tmp_path)
    with pytest.raises(UsageError, match="tnt has to be trained first; expected further reductions that need no"):
        load_(make("plain"), tmp_path, TNT(at=4))


@pytest.mark.parametrize("parts", [None, 3, [1, 2], [{"parts": []}]])
def test_a_broken_combination_is_refused(parts):
    with pytest.raises(UsageError, match="a combination without its parts"):
        from_dict({"version": 1, "method": "combination", "parts": parts})


def test_half_precision():
    model = reduce_(make("plain").to(torch.bfloat16), ToMe(at=(1, 2), r=4), ZeroTPrune(at=4, similar=3))
    for fused in (True, False):
        for block in model.blocks:
            block.attn.fused_attn = fused
        with torch.inference_mode():
            assert model(photos_for(model).bfloat16()).isfinite().all()


def test_pictures_of_what_was_learned_show_each_location():
    model = reduce_(make("plain"), TNT(at=(1, 2), keep=0.7), ToMe(at=4, r=6))
    (maps,) = kept_maps(model, photos_for(model, 1), [0.5] * 3, [0.5] * 3, each=True)
    assert list(maps) == ["original", "after block 1", "after block 2", "after block 4"]
    reduce_(model, EvoViT(at=(2, 4), keep=0.5))
    (maps,) = kept_maps(model, photos_for(model, 1), [0.5] * 3, [0.5] * 3, each=True)
    assert list(maps) == ["original", "after block 2", "after block 4"]


def test_pictures_show_each_location():
    model = reduce_(make("plain"), Random(at=2, keep=0.5), ToMe(at=4, r=6))
    (maps,) = kept_maps(model, photos_for(model, 1), [0.5] * 3, [0.5] * 3, each=True)
    assert list(maps) == ["original", "after block 2", "after block 4"]

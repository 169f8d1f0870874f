"""TNT without a training: tokens are ranked by the attention that they receive."""

from __future__ import annotations

import warnings

import pytest
import torch

from conftest import make, photos_for
from tntprune import TNT, Random, UsageError, UserError, calibrate_, load_, macs, record, reduce_, save
from tntprune.analysis.scores import record_scores
from tntprune.backbones.attach import reduction_of
from tntprune.ops.merging import standardised
from tntprune.search.timing import _spread


def attention_of(model, images, block):
    """The attention map of a block of the unpruned model, (B, heads, n, n), by the book."""
    seen = {}
    attn = model.blocks[block - 1].attn
    hook = attn.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    with torch.inference_mode():
        model(images)
    hook.remove()
    batch, n, _ = seen["x"].shape
    with torch.inference_mode():
        q, k, _ = attn.qkv(seen["x"]).reshape(batch, n, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        return (attn.q_norm(q) * attn.scale @ attn.k_norm(k).transpose(-2, -1)).softmax(-1)


@pytest.mark.parametrize(("kind", "prefix"), [("plain", 1), ("distilled", 2), ("registers", 5), ("no_cls", 0)])
def test_the_score_is_the_log_of_received_attention(kind, prefix):
    model = make(kind)
    prefix = model.num_prefix_tokens
    images = photos_for(model)
    with torch.inference_mode():
        attention = attention_of(model, images, 2)
        rows = attention.mean((1, 2)) if kind == "no_cls" else attention[:, :, 0].mean(1)
        reduce_(model, TNT(at=2, keep=0.5, score="attention"))
        with record_scores(model) as scores:
            model(images)
    assert torch.allclose(scores[2], rows[:, prefix:].log(), atol=1e-4)


def test_dropping_keeps_the_patches_that_receive_most():
    model = make("plain")
    images = photos_for(model)
    wanted = attention_of(model, images, 3)[:, :, 0, 1:].mean(1).topk(16, dim=1).indices
    reduce_(model, TNT(at=3, tokens=16, score="attention", how="drop"))
    with record(model) as trace, torch.inference_mode():
        model(images)
    assert torch.equal(trace.kept[3].sort(1).values, wanted.sort(1).values)


def test_it_has_nothing_to_learn_and_warns_of_nothing(tmp_path):
    model = make("plain")
    images = photos_for(model)
    reduce_(model, TNT(at=(1, 3), keep=0.5, score="attention"))
    assert not list(reduction_of(model).parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = model(images)
        save(model, tmp_path / "run")
    with pytest.raises(UserError, match="learn"):
        calibrate_(model, images, epochs=1, progress=False)
    assert torch.equal(load_(make("plain"), tmp_path / "run")(images), expected)
    other = load_(make("plain"), tmp_path / "run", at=2, keep=0.3)  # nothing is bound to a block
    assert reduction_of(other).config.locations == (2,)


def test_both_scores_add_up_and_the_scorer_is_trained_as_ever(tmp_path):
    model = make("plain")
    images = photos_for(model)
    learned = {}
    for score in ("learned", "both"):
        torch.manual_seed(0)
        reduce_(model, TNT(at=2, keep=0.5, score=score))
        calibrate_(model, images, epochs=2, batch_size=2, progress=False, seed=0)
        learned[score] = reduction_of(model).state_dict()
    assert all(torch.equal(value, learned["both"][name]) for name, value in learned["learned"].items())
    save(model, tmp_path / "run")
    found = {}
    for name, changes in {"learned": {"score": "learned"}, "both": {}}.items():
        other = load_(make("plain"), tmp_path / "run", **changes)
        with record_scores(other) as scores, torch.inference_mode():
            other(images)
        found[name] = scores[2]
    rows = attention_of(make("plain"), images, 2)[:, :, 0, 1:].mean(1).log()
    assert torch.allclose(found["both"], standardised(found["learned"]) + standardised(rows), atol=1e-4)
    with pytest.raises(UsageError, match="was trained, which would be without effect"):
        load_(make("plain"), tmp_path / "run", score="attention")


def test_its_cost_is_one_row_of_attention_instead_of_a_scorer():
    model = make("plain")
    layout = reduction_of(reduce_(model, TNT(at=2, keep=0.5))).layout
    scored, ranked, summed = (
        macs(reduce_(model, TNT(at=2, keep=0.5, score=score))).macs for score in ("learned", "attention", "both")
    )
    row, scorer = (layout.patches + layout.prefix) * layout.attn_dim, 6 * layout.patches * layout.embed_dim
    assert ranked - row == scored - scorer == summed - row - scorer


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"beta": 0.1}, "beta: score='attention' trains nothing"),
        ({"recipe": "relative"}, "recipe: score='attention' trains nothing"),
        ({"at": 0}, "at=0: no block has been seen whose attention could rank"),
        ({"score": "atention"}, "score"),
    ],
)
def test_options_without_effect_are_refused(given, line):
    with pytest.raises(UsageError, match=line):
        TNT(**{"score": "attention", **given})


def test_in_training_mode_it_works_as_ever_and_with_similar_tokens_removed_first():
    model = reduce_(make("plain").train(), TNT(at=(2, 4), keep=0.7, similar=5, score="attention"))
    images = photos_for(model)
    with torch.no_grad():
        assert torch.equal(model(images), model.eval()(images))


def test_combined_with_another_reduction_sizes_count_as_they_do_alone():

    model, images = make("plain"), photos_for(make("plain"))
    with torch.inference_mode():
        alone = reduce_(model, TNT(at=2, keep=0.5, score="attention"))(images)
        both = reduce_(model, TNT(at=2, keep=0.5, score="attention"), Random(at=5, keep=1.0))(images)
    assert torch.equal(alone, both)


def test_a_search_for_a_time_budget_finds_schedules():

    assert len(_spread(TNT(at=2, keep=0.5, score="attention"), 64, 6)) > 3

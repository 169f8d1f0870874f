from __future__ import annotations

import pytest
import torch

import tntprune
from conftest import make, photos_for
from tntprune.analysis.scores import record_scores
from tntprune.backbones.attach import reduction_of


@pytest.mark.parametrize("config", [tntprune.TNT(at=2, keep=0.5), tntprune.TopK(at=2, keep=0.5, inside=False)])
@torch.inference_mode()
def test_the_kept_tokens_of_a_method_that_ranks_have_the_largest_scores(config):
    model, images = make("plain"), photos_for(make("plain"))
    tntprune.reduce_(model, config.changed(how="drop") if config.method == "tnt" else config)
    with record_scores(model) as scores, tntprune.record(model) as trace:
        model(images)
    assert list(scores) == [2] and scores[2].shape == (len(images), 64)
    best = scores[2].topk(32, dim=1).indices.sort(1).values
    assert torch.equal(best, trace.kept[2])
    assert "score" not in vars(reduction_of(model))  # nothing stays behind


@torch.inference_mode()
def test_places_without_a_token_have_no_score():
    model, images = make("plain"), photos_for(make("plain"))
    tntprune.reduce_(model, tntprune.Random(at=(1, 3), keep=0.5))
    with record_scores(model) as scores:
        model(images)
    assert [int(one[0].isnan().sum()) for one in scores.values()] == [0, 32]


def test_a_method_without_scores_records_none_and_an_unpruned_model_is_refused():
    model, images = make("plain"), photos_for(make("plain"))
    with pytest.raises(tntprune.UserError, match="is not reduced"), record_scores(model):
        pass
    tntprune.reduce_(model, tntprune.ToMe(r=4))
    with record_scores(model) as scores:
        model(images)
    assert scores == {}

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tntprune.app.choices import ExploredModel, names_of
from tntprune.app.outcome import guesses, heat_map, outcome, view
from tntprune.data.images import BadImage


@pytest.fixture(scope="module")
def digits():
    return ExploredModel("digits_vit")


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "a.png"
    Image.effect_noise((90, 70), 60).save(path)
    return path


@pytest.mark.parametrize("method", ["tnt", "tome", "pitome", "tofu", "mctf", "evit", "ats", "avit", "evovit", "random"])
def test_an_outcome_has_a_picture_for_each_block_and_what_it_costs(digits, photo, method):
    seen = view(photo, digits.model)
    found = outcome(digits, digits.reduced(method, 0.6), seen)
    assert len(found.pictures) == len(found.scores) == len(found.counts) == 7
    assert all(picture.shape == seen.pixels.shape and picture.dtype == np.uint8 for picture in found.pictures)
    assert found.counts[0] == 64 >= found.counts[-1] >= 1
    assert np.array_equal(found.pictures[0], seen.pixels)
    assert len(found.before) == 5 and abs(found.cosine) <= 1.001 and min(found.milliseconds) > 0
    assert found.cost.macs < found.cost.base_macs
    assert (found.scores[-1] is not None) == (method in ("tnt", "random"))


def test_a_method_that_was_not_trained_says_so(digits, photo):
    found = outcome(digits, digits.reduced("dynamicvit", 0.6), view(photo, digits.model))
    assert "was not trained" in found.note
    assert outcome(digits, digits.reduced("tnt", 0.6), view(photo, digits.model)).note == ""


def test_a_model_without_classes_has_a_cosine_and_no_guesses(photo):
    explored = ExploredModel("digits_vit")
    explored.model.reset_classifier(0)
    found = outcome(explored, explored.reduced("tome", 0.6), view(photo, explored.model))
    assert found.before == found.after == [] and 0 < found.cosine < 1.001


def test_the_same_model_agrees_with_itself(digits, photo):
    found = outcome(digits, digits.reduced("random", 1.0), view(photo, digits.model))
    assert found.before == found.after and found.cosine > 0.9999


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1", "I;16", "LA"])
@pytest.mark.parametrize("size", [(1, 1), (3, 200), (1000, 700)])
def test_photos_of_any_mode_and_size(digits, tmp_path, mode, size):
    path = tmp_path / "photo.tiff"
    Image.new(mode, size).save(path)
    assert view(path, digits.model).images.shape == (1, 1, 64, 64)


def test_broken_photos_are_refused_by_name(digits, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(BadImage, match=r"^text\.png: "):
        view(tmp_path / "text.png", digits.model)


def test_a_heat_map_is_red_where_scores_are_high_and_grey_where_there_are_none():
    drawn = heat_map(np.array([0.0, 1, 2, np.nan]), (2, 2), np.full((4, 4, 3), 255, dtype=np.uint8))
    low, high, none = drawn[0, 0].astype(int), drawn[2, 0].astype(int), drawn[2, 2].astype(int)
    assert low[2] > low[0] and high[0] > high[2] and none.std() == 0


def test_guesses_have_the_names_of_the_classes():
    names = names_of(timm.create_model("vit_tiny_patch16_224"))
    logits = torch.zeros(1, 1000)
    logits[0, 1] = 9
    assert guesses(logits, names)[0][0] == "goldfish"
    assert len(guesses(logits, names)) == 5


def test_classes_without_a_known_name_have_their_number_and_embeddings_have_none():
    assert names_of(timm.create_model("test_vit", num_classes=7)) == list("0123456")
    assert names_of(timm.create_model("test_vit", num_classes=0)) == []

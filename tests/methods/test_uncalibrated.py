"""A method that has to be trained says once that it was not; saving says it again."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

import tntprune
from conftest import make, photos_for
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.bench.candidates import candidates
from tntprune.errors import UserNote
from tntprune.methods import ATS, TNT, AViT, DynamicViT, Random, ToMe
from tntprune.methods.learned import inherit
from tntprune.reduce import reduce_
from tntprune.system.storage import read_metadata

QUICK = {"epochs": 1, "batch_size": 2, "progress": False}
UNTRAINED = {
    "tnt": TNT(at=2, keep=0.5),
    "tnt drop": TNT(at=2, keep=0.5, recipe="relative"),
    "dynamicvit": DynamicViT(at=2, keep=0.5),
    "avit": AViT(),
}
READY = {
    "random": Random(at=2, keep=0.5),
    "tome": ToMe(r=2),
    "ats": ATS(at=2, keep=0.5),
    "avit with at": AViT(at=2, keep=0.5),
    "tnt that keeps all": TNT(at=2, keep=1.0),
}


def notes(call):
    """What a call returns, and the notes that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(one.message) for one in caught if issubclass(one.category, UserNote)]


def told(model):
    """The notes of a forward pass."""
    return notes(lambda: model(photos_for(model)))[1]


def calibrated(config=UNTRAINED["tnt"]):
    model = reduce_(make("plain"), config)
    return tntprune.calibrate_(model, photos_for(model, 4), torch.tensor([0, 1, 2, 3]), **QUICK)


@pytest.mark.parametrize("name", UNTRAINED)
def test_the_first_forward_pass_warns_once_and_saving_warns_again(name, tmp_path):
    model = reduce_(make("plain"), UNTRAINED[name])
    first = told(model)
    assert len(first) == 1 and "never calibrated" in first[0] and "calibrate_" in first[0]
    assert told(model) == [] and told(copy.deepcopy(model)) == []
    _, saved = notes(lambda: tntprune.save(model, tmp_path))
    assert len(saved) == 1 and "never calibrated" in saved[0]


def test_a_part_of_a_combination_warns_once():
    model = reduce_(make("plain"), TNT(at=2, keep=0.5), ToMe(at=(4, 5), r=2))
    assert len(told(model)) == 1 and told(model) == []


@pytest.mark.parametrize("name", READY)
def test_nothing_is_said_where_nothing_has_to_be_trained(name, tmp_path):
    model = reduce_(make("plain"), READY[name])
    assert told(model) == []
    if name != "tnt that keeps all":
        assert notes(lambda: tntprune.save(model, tmp_path))[1] == []


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_calibrated_one_says_nothing_and_neither_do_its_copies(name, tmp_path):
    model, said = notes(lambda: calibrated(UNTRAINED[name]))
    assert said == []
    path, said = notes(lambda: tntprune.save(model, tmp_path))
    assert said == [] and "calibrated" not in read_metadata(path)  # such files are, byte for byte, as they always were
    others = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), tntprune.load_(make("plain"), tmp_path)]
    again = reduce_(make("plain"), UNTRAINED[name])
    again.load_state_dict(model.state_dict())
    third = reduce_(make("plain"), UNTRAINED[name])
    inherit(reduction_of(third), reduction_of(model).state_dict())
    for other in (*others, again, third):
        assert told(other) == []


def test_a_combination_with_a_loaded_part_says_nothing(tmp_path):
    tntprune.save(calibrated(), tmp_path)
    assert told(tntprune.load_(make("plain"), tmp_path, ToMe(at=(4, 5), r=2))) == []


def test_what_was_saved_uncalibrated_still_warns_when_it_is_loaded(tmp_path):
    with pytest.warns(UserNote, match="never calibrated"):
        tntprune.save(reduce_(make("plain"), UNTRAINED["tnt"]), tmp_path)
    assert len(told(tntprune.load_(make("plain"), tmp_path))) == 1
    assert len(told(tntprune.load_(make("plain"), tmp_path, ToMe(at=(4, 5), r=2)))) == 1


def test_weights_of_the_model_alone_do_not_calibrate():
    model = reduce_(make("plain"), UNTRAINED["tnt"])
    model.load_state_dict(make("plain").state_dict(), strict=False)
    assert len(told(model)) == 1


def test_a_training_that_failed_does_not_calibrate():
    model = reduce_(make("plain"), UNTRAINED["tnt"])
    with pytest.raises(tntprune.UserError):
        tntprune.calibrate_(model, photos_for(model, 4) * torch.nan, **QUICK)
    assert len(told(model)) == 1


def test_another_reduction_on_a_calibrated_model_warns():
    model = calibrated()
    assert len(told(reduce_(model, TNT(at=3, keep=0.5)))) == 1


def test_training_and_timing_say_nothing():
    model = reduce_(make("plain"), UNTRAINED["tnt"]).train()
    assert told(model) == []
    for one in candidates(base_of(model.eval()), [UNTRAINED["tnt"]]):
        assert told(one.model) == []


@pytest.mark.wide
def test_it_compiles_and_exports_without_a_word():
    model, images = reduce_(make("plain"), UNTRAINED["tnt"]), photos_for(make("plain"))
    compiled, said = notes(lambda: torch.compile(model, fullgraph=True, backend="eager")(images))
    program, more = notes(lambda: torch.export.export(model, (images,)))
    assert said == more == []
    expected = model(images)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(program.module()(images), expected)

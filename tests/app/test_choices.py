from __future__ import annotations

from dataclasses import dataclass

import pytest
import timm
from safetensors.torch import save_file

import tntprune
from tntprune.analysis.macs import macs
from tntprune.app.choices import ExploredModel
from tntprune.backbones.attach import is_reduced, reduction_of
from tntprune.methods import registry


@pytest.fixture(scope="module")
def digits():
    return ExploredModel("digits_vit")


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
@pytest.mark.parametrize("method", registry.METHODS)
def test_every_method_comes_near_the_budget_from_below(digits, method, share):
    reduced = digits.reduced(method, share)
    cost = macs(reduced.model)
    assert cost.macs <= share * cost.base_macs or reduced.over
    if not reduced.over and not reduced.config.variable and method != "zerotprune":  # it drops similar ones too
        assert cost.macs > 0.8 * share * cost.base_macs
    assert not is_reduced(digits.model)


def test_a_budget_that_cannot_be_met_is_marked(digits):
    assert digits.reduced("random", 0.05).over and not digits.reduced("random", 0.9).over


def test_the_code_and_the_command_give_the_same_model(digits, tmp_path, monkeypatch, capsys):
    from tntprune.cli.main import _parse

    for method in registry.METHODS:
        reduced = digits.reduced(method, 0.5)
        names: dict = {}
        exec(digits.python(reduced), names)
        assert reduction_of(names["model"]).config == reduced.config
        assert callable(_parse(digits.command(reduced).split()[1:]))


def test_the_saved_reduction_comes_first_and_is_put_on(digits):
    assert next(iter(digits.methods())) == "tnt"
    reduced = digits.reduced("tnt", 0.5)
    assert reduced.source == "pretrained" and reduction_of(reduced.model).calibrated


def test_own_weights_and_an_own_reduction(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3).eval()
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=3).state_dict(), tmp_path / "own.safetensors")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3).eval()
    tntprune.save(tntprune.reduce_(model, tntprune.ToMe(at=(2, 4), keep=0.5)), tmp_path / "run")
    explored = ExploredModel("vit_tiny_patch16_224", tmp_path / "own.safetensors", str(tmp_path / "run"))
    reduced = explored.reduced("tome", 0.8)
    assert reduced.config.locations == (2, 4) and "own.safetensors" in explored.python(reduced)
    names: dict = {}
    exec(explored.python(reduced), names)
    assert names["model"].num_classes == 3
    assert "--reducer" in explored.command(reduced) and "--weights" in explored.command(reduced)


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(tntprune.UsageError, match="did you mean"):
        ExploredModel("digits_vitt")
    with pytest.raises(tntprune.UserError):
        ExploredModel("digits_vit", reducer=str(tmp_path / "nothing"))


def test_a_plug_in_method_appears_by_itself(digits, monkeypatch):
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    monkeypatch.setattr(registry, "_MODULES", dict(registry._MODULES))

    @dataclass(frozen=True)
    class Mine(tntprune.Config):
        method = "mine"

    class MinePruning(tntprune.ScoringMethod):
        def score(self, tokens, heads):
            return tokens.patches.float().norm(dim=2)

    tntprune.register_method(Mine, MinePruning)
    assert digits.methods()["mine"] == "mine"
    assert digits.reduced("mine", 0.5).config == Mine(at=3, keep=digits.reduced("mine", 0.5).config.keep)

"""What was saved with a method of another package says in one line which one to install, wherever it is read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

from tntprune import Random, load_, push, reduce_, save
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.digits_vit import build
from tntprune.cli.main import main
from tntprune.errors import UsageError
from tntprune.methods import registry
from tntprune.methods.random import RandomDrop
from tntprune.serialization.card import model_card
from tntprune.serialization.checkpoint import read
from tntprune.serialization.fingerprint import identity
from tntprune.serialization.plan import Plan, write_plan

TOLD = "method 'elsewhere' comes from the package token-zoo, which is not installed here; install it with: pip install"


@dataclass(frozen=True)
class Elsewhere(Random):
    method = "elsewhere"


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A run and a plan of a method whose package is gone, and the card that was written while it was there."""
    monkeypatch.setattr(registry, "packages_distributions", lambda: {Elsewhere.__module__.split(".")[0]: ["token-zoo"]})
    registry.register_method(Elsewhere, RandomDrop)
    try:
        model = reduce_(build(), Elsewhere(at=2))
        run = save(model, tmp_path / "run", card=True)
        plan = tmp_path / "plan.json"
        method = reduction_of(model)
        backbone = {"embed_dim": method.layout.embed_dim, "depth": method.layout.depth}
        write_plan(plan, Plan(method.config, {}, backbone, identity(model)))
        for source in (run, plan):
            assert model_card(load_(build(), source), "a/b") == model_card(model, "a/b")
    finally:
        del registry.METHODS["elsewhere"]
    return tmp_path


def test_it_is_told_wherever_it_is_read(saved, capsys):
    data = ["--data", str(saved)]
    for source in (saved / "run", saved / "run" / "reducer.safetensors", saved / "plan.json"):
        for call in (
            lambda source=source: load_(build(), source),
            lambda source=source: reduce_(build(), str(source)),
            lambda source=source: read(source),
            lambda source=source: push(reduce_(build(), Random(at=2)), "someone/small", run=source),
        ):
            with pytest.raises(UsageError, match=re.escape(TOLD)) as caught:
                call()
            assert "\n" not in str(caught.value)
        for command in (["eval", "digits_vit", *data], ["macs", "digits_vit"], ["push", "digits_vit", "--to", "a/b"]):
            assert main([*command, "--reducer", str(source)]) == 2
            assert capsys.readouterr().err.strip() == f"tntprune: {TOLD} token-zoo"
    assert main(["push", "digits_vit", "--reducer", str(saved / "run"), "--card-only"]) == 2
    assert capsys.readouterr().err.strip() == f"tntprune: {TOLD} token-zoo"


def test_a_card_says_what_to_install(saved):
    card = (saved / "run" / "README.md").read_text()
    assert "install it with `pip install token-zoo`" in card.split("## Use")[1].split("## Options")[0]
    assert json.loads(card.split("```json\n")[1].split("```")[0])["package"] == "token-zoo"
    assert "pip install" not in model_card(reduce_(build(), Random(at=2)), "a/b")

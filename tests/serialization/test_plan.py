from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
import torch
from test_checkpoint import reduced, refused

from conftest import make, photos_for
from tntprune import load_, reduce_, save
from tntprune.backbones.attach import reduction_of
from tntprune.errors import UsageError
from tntprune.methods import ATC, MCTF, TNT, DynamicViT, PiToMe, Random, ToFu, ToMe
from tntprune.serialization.checkpoint import read
from tntprune.serialization.fingerprint import identity
from tntprune.serialization.plan import Plan, read_plan, write_plan

CONFIGS = {
    "tnt": TNT(at=(2, 4), tokens=(40, 17), similar=3, noise_blocks=(1, 2, 3, 4)),
    "tome": ToMe(at=(2, 3, 5), tokens=(50, 33, 12)),
    "pitome": PiToMe(at=(2, 3, 5), tokens=(50, 33, 12), average="mlerp"),
    "tofu": ToFu(at=(2, 3, 5), tokens=(50, 33, 12), merge_from=3),
    "mctf": MCTF(at=(2, 3, 5), tokens=(50, 33, 12), size_power=0.1),
    "atc": ATC(at=(2, 3), tokens=(50, 33), linkage="single"),
    "random": Random(at=(0, 3), tokens=(40, 11), order=5),
    "dynamicvit": DynamicViT(at=(1, 4), tokens=(40, 11)),
}


def planned(model: torch.nn.Module, path: Path, **more) -> Path:
    """A plan of what is on a model."""
    method = reduction_of(model)
    backbone = {"embed_dim": method.layout.embed_dim, "depth": method.layout.depth}
    write_plan(path, Plan(method.config, dict(method.state_dict()), backbone, identity(model), **more))
    return path


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.inference_mode()
def test_a_plan_gives_the_same_logits_bit_for_bit(tmp_path, config):
    model, fresh = reduced("plain", config), make("plain")
    path = planned(model, tmp_path / "new" / "plan.json")
    for put in (load_, reduce_):
        again = put(make("plain"), str(path))
        assert reduction_of(again).config == config
        assert torch.equal(again(photos_for(again)), model(photos_for(model)))
    assert not torch.equal(model(photos_for(model)), fresh(photos_for(fresh)))


def test_what_is_written_is_read(tmp_path):
    model = reduced("plain", CONFIGS["tnt"])
    more = {
        "made_by": '{"a": 1}', "budget": {"macs": 0.8e9}, "predicted": {"kl": 0.1}, "front": [{"macs": 1}, {"macs": 2}],
    }  # fmt: skip
    path = planned(model, tmp_path / "plan.json", **more)
    plan = read_plan(path)
    assert {name: getattr(plan, name) for name in more} == more
    assert plan.config == CONFIGS["tnt"] and plan.model == identity(model)
    own = reduction_of(model).state_dict()
    assert set(plan.learned) == set(own) and all(torch.equal(plan.learned[name], own[name]) for name in own)
    assert path.read_bytes() == planned(model, tmp_path / "again.json", **more).read_bytes()
    saved = read(path)
    assert saved.made_by == more["made_by"] and saved.weights is None
    assert saved.path == path
    assert path.stat().st_size < 8000


def test_options_of_a_plan_can_be_changed_like_those_of_a_run(tmp_path):
    model = reduced("plain", CONFIGS["tnt"])
    path = planned(model, tmp_path / "plan.json")
    run = save(model, tmp_path / "run")
    for changes in ({"at": 3, "keep": 0.5}, {"similar": 0}, {"tokens": (30, 20)}):
        one, other = load_(make("plain"), path, **changes), load_(make("plain"), run, **changes)
        assert reduction_of(one).config == reduction_of(other).config != CONFIGS["tnt"]
        assert torch.equal(one(photos_for(one)), other(photos_for(other)))
    refused(lambda: load_(make("plain"), path, scorer="mlp"), "was trained with 'linear'", kind=UsageError)


def test_a_plan_goes_with_weights_that_were_trained(tmp_path):
    model = reduced("plain", CONFIGS["tnt"])
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight.mul_(1.5)
    save(model, tmp_path / "runs" / "tuned", weights=True)
    file = tmp_path / "runs" / "tuned" / "model.safetensors"
    path = planned(model, tmp_path / "plans" / "plan.json", weights=file)
    assert json.loads(path.read_text())["weights"] == "../runs/tuned/model.safetensors"
    assert read(path).weights.samefile(file)
    again = load_(make("plain"), path)
    assert torch.equal(again(photos_for(again)), model(photos_for(model)))
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    fresh = make("plain")
    refused(lambda: load_(fresh, path), str(path), "model.safetensors is gone")
    assert not hasattr(fresh, "reduction")


def broken(path: Path, **changes) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_what_is_no_plan_is_refused_in_one_line(tmp_path):
    path = planned(reduced("plain", CONFIGS["tnt"]), tmp_path / "plan.json")
    whole = path.read_text()

    def load() -> None:
        load_(make("plain"), path)

    refused(lambda: load_(make("plain"), tmp_path / "none.json"), "no such file", "tntprune search")
    for text in ("", "{", "[" * 10_000, whole[:-9], "\x00"):
        path.write_text(text)
        refused(load, "not JSON", str(path))
    path.write_bytes(b"\xff\xfe")
    refused(load, "not JSON")
    for text in ("[]", "3", '{"config": {}}'):
        path.write_text(text)
        refused(load, "not a plan")
    for changes, words in (
        ({"plan": 2}, "version 2"),
        ({"plan": "x"}, "version x"),
        ({"learned": "!"}, "what was learned cannot be read"),
        ({"learned": base64.b64encode(b"12345678").decode()}, "what was learned cannot be read"),
        ({"learned": ""}, "has nothing for scorers"),
        ({"config": None}, "without a config"),
        ({"front": {}}, "without a front"),
        ({"config": {"version": 99, "method": "tnt"}}, "version 99"),
        ({"config": {"version": 1, "method": "magic"}}, "unknown method 'magic'"),
    ):
        path.write_text(whole)
        broken(path, **changes)
        refused(load, words)


def test_what_was_learned_has_to_be_finite(tmp_path):
    model = reduced("plain", CONFIGS["tnt"])
    with torch.no_grad():
        next(reduction_of(model).parameters()).fill_(torch.nan)
    path = planned(model, tmp_path / "plan.json")
    refused(lambda: load_(make("plain"), path), "NaN or infinity")


def test_a_plan_for_another_model_is_refused(tmp_path):
    path = planned(reduced("plain", Random(at=3, tokens=9)), tmp_path / "plan.json")
    refused(lambda: load_(make("test_vit"), path), "embed_dim 32, given one of 64")

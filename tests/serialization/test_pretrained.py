from __future__ import annotations

import json

import pytest
import timm
import torch

from conftest import make
from tntprune import TNT, Random, ToMe, load_, reduce_
from tntprune.backbones.attach import is_reduced, reduction_of
from tntprune.backbones.digits_vit import digits_vit
from tntprune.backbones.models import load_model
from tntprune.cli.main import main
from tntprune.demo.digits import cluttered_digits
from tntprune.errors import UsageError, UserError
from tntprune.serialization.checkpoint import read
from tntprune.serialization.fingerprint import full_name, identity
from tntprune.serialization.pretrained import find_pretrained, pretrained_files
from tntprune.system.storage import read_metadata

MODEL = "vit_tiny_patch16_224"
NAME = f"{MODEL}.augreg_in21k_ft_in1k"


def refused(call, *words, kind=UserError):
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.fixture
def likeness():
    """A model that passes for the one there are scorers for: of its name, and of its norms."""
    model = timm.create_model(MODEL).eval()
    with torch.no_grad():
        for name, norm in json.loads(read_metadata(pretrained_files()[NAME])["model"])["norms"].items():
            value = model.get_parameter(name)
            value.mul_(norm / value.norm())
    return model


@pytest.mark.parametrize("name", pretrained_files())
def test_a_pretrained_file_is_small_and_says_what_it_is(name):
    path = pretrained_files()[name]
    about = read_metadata(path)
    assert path.parent.name == name and path.stat().st_size < 20_000
    recorded, note = json.loads(about["model"]), json.loads(about["made_by"])
    assert full_name(recorded) == name and len(recorded["norms"]) == 4
    assert note["command"].startswith(("tntprune train ", "python -m tntprune.demo.")) and note["training"]["seed"] == 0
    assert not any(f"/{root}/" in text for text in about.values() for root in ("home", "root", "work", "tmp", "Users"))
    config = read(path).config
    assert len(config.locations) == 1 and config.given == (0.5,)


@pytest.mark.parametrize("load", [reduce_, load_])
@torch.inference_mode()
def test_the_word_is_enough(likeness, load):
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    assert load(likeness, "pretrained") is likeness
    saved = read(pretrained_files()[NAME])
    assert reduction_of(likeness).config == saved.config
    assert all(torch.equal(v, saved.learned[n]) for n, v in reduction_of(likeness).state_dict().items())
    first = likeness(images)
    load(likeness, "pretrained", at=2, keep=0.25, similar=0)
    assert reduction_of(likeness).config == saved.config.changed(at=2, keep=0.25, similar=0)
    assert not torch.equal(likeness(images), first)
    load(likeness, "pretrained", ToMe(at=6, r=10))
    assert [part.method for part in reduction_of(likeness).config.parts] == ["tnt", "tome"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_another_head_are_recognised(likeness, dtype):
    likeness.reset_classifier(7)
    assert find_pretrained(likeness.to(dtype)) == pretrained_files()[NAME]


def test_random_weights_are_refused_and_the_model_stays_as_it_is():
    model = timm.create_model(MODEL)
    refused(lambda: reduce_(model, "pretrained"), f"the pretrained weights of {NAME}", "has a norm of", "train")
    assert not is_reduced(model)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: make("plain"), "this VisionTransformer"),
        (lambda: timm.create_model(f"{MODEL}.augreg_in21k"), f"{MODEL}.augreg_in21k,"),
        (lambda: timm.create_model("deit_tiny_patch16_224"), "deit_tiny_patch16_224.fb_in1k"),
    ],
)
def test_a_model_without_any_is_told_which_ones_have_some(build, name):
    model = build()
    refused(lambda: reduce_(model, "pretrained"), name, f"only for digits_vit, {NAME}", "tntprune train")
    assert not is_reduced(model)


def test_what_was_learned_cannot_be_changed(likeness):
    refused(lambda: reduce_(likeness, "pretrained", scorer="mlp"), "was trained with 'linear'", kind=UsageError)


def test_options_of_a_config_go_into_it():
    refused(lambda: reduce_(make("plain"), TNT(at=3), keep=0.5), "options go into the config", kind=UsageError)


def test_the_command_line_knows_the_word(tmp_path, capsys):
    weights = tmp_path / "w.pth"
    torch.save(timm.create_model(MODEL).state_dict(), weights)
    (tmp_path / "n01440764").mkdir()
    arguments = ["--weights", str(weights), "--data", str(tmp_path), "--reducer", "pretrained"]
    assert main(["eval", MODEL, *arguments]) == 1
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("tntprune: pretrained: was made for the pretrained weights of")


@torch.inference_mode()
def test_the_demos_model_has_scorers_that_beat_random_drop():
    images, labels = cluttered_digits("test", seed=3)

    def top1(model):
        return float((model(images).argmax(1) == labels).float().mean())

    learned = top1(reduce_(digits_vit(), "pretrained", at=2, keep=0.15))
    assert learned > top1(reduce_(digits_vit(), Random(at=2, keep=0.15))) + 0.2
    assert learned > top1(digits_vit()) - 0.1


@pytest.mark.realdata
@torch.inference_mode()
def test_the_real_weights_are_recognised(data):
    model = load_model(MODEL, data / f"{MODEL}.safetensors")
    recorded = json.loads(read_metadata(find_pretrained(model))["model"])
    assert recorded == identity(model)
    reduce_(model, "pretrained")
    assert model(torch.zeros(1, 3, 224, 224)).isfinite().all()

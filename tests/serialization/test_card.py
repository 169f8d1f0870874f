from __future__ import annotations

import json

import pytest
import timm
import yaml

from conftest import make
from tntprune import TNT, ToMe, reduce_, save
from tntprune.analysis.accuracy_curve import AccuracyCurve, AccuracyPoint
from tntprune.errors import UserError
from tntprune.serialization.card import model_card, shareable

NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
BASE = AccuracyPoint("unpruned", 82.5, 95.0, 100.0, 1_260_000_000)
POINTS = [
    AccuracyPoint("keep 0.7", 81.0, 94.0, 92.0, 960_000_000),
    AccuracyPoint("keep 0.5", 78.7, 93.0, 88.0, 630_000_000, True),
]
CURVE = AccuracyCurve(1300, "photos", BASE, POINTS, "a processor, 2 threads; 2026-11-28")


def metadata(card):
    empty, block, rest = card.split("---\n", 2)
    assert empty == "" and rest.startswith("\n# ")
    return yaml.safe_load(block)


def test_a_model_of_timm_is_named_as_timm_names_it():
    model = reduce_(timm.create_model("vit_tiny_patch16_224"), TNT(at=3, keep=0.5))
    card = model_card(model, "someone/small")
    assert metadata(card) == {
        "library_name": "tntprune", "license": "apache-2.0", "base_model": f"timm/{NAME}",
        "pipeline_tag": "image-classification", "tags": ["tntprune", "tnt", "token-pruning", "vision-transformer"],
    }  # fmt: skip
    usage = card.split("```python\n")[1].split("```")[0].strip().splitlines()
    assert usage == [
        "import timm, tntprune",
        f'model = timm.create_model("{NAME}", pretrained=True).eval()',
        'tntprune.load_(model, "someone/small")',
    ]
    assert metadata(model_card(model, "a/b", license="mit"))["license"] == "mit"


def test_another_image_size_is_told():
    model = reduce_(timm.create_model("vit_tiny_patch16_224", img_size=(96, 160)), TNT(at=3))
    assert f'timm.create_model("{NAME}", pretrained=True, img_size=(96, 160)).eval()' in model_card(model, "a/b")


def test_a_folder_is_no_base_model(tmp_path, monkeypatch):
    hf_models = pytest.importorskip("hf_models")
    monkeypatch.chdir(tmp_path)
    model = reduce_(hf_models.make("vit_classifier"), ToMe(at=1, r=2))
    model.config.name_or_path = "runs/mine"
    assert metadata(model_card(model, "a/b"))["base_model"] == "runs/mine"
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert "runs/mine" not in model_card(model, "a/b")


def test_a_model_of_nobody_has_no_base_and_no_licence():
    card = model_card(reduce_(make("plain"), TNT(at=3)), "a/b")
    assert not {"base_model", "license"} & set(metadata(card)) and "your VisionTransformer" in card


def test_options_are_told_without_those_left_open():
    card = model_card(reduce_(make("plain"), TNT(at=3, keep=0.5), ToMe(at=5, r=2)), "a/b")
    told = json.loads(card.split("```json\n")[1].split("```")[0])
    assert [part["method"] for part in told["parts"]] == ["tnt", "tome"]
    assert told["parts"][0]["keep"] == [0.5] and "tokens" not in told["parts"][0]


def test_what_was_measured_is_a_table_and_else_it_says_that_nothing_was():
    model = reduce_(make("plain"), TNT(at=3))
    card = model_card(model, "a/b", curve=CURVE)
    assert "| unpruned | 82.5 | 95.0 | 100.0 | 1.260 | 1.00 |" in card
    assert "| keep 0.7 | 81.0 | 94.0 | 92.0 | 0.960 | 0.76 |" in card
    assert "| keep 0.5 (as saved) | 78.7 | 93.0 | 88.0 | 0.630 | 0.50 |" in card
    assert "On 1300 labelled photos (`photos`)" in card and CURVE.stamp in card and "Nothing was measured" not in card
    assert "Nothing was measured." in model_card(model, "a/b") and "%" not in model_card(model, "a/b")


@pytest.mark.parametrize(
    ("made_by", "told"),
    [
        ("", "No training is recorded."),
        ("on a rainy day", "on a rainy day"),
        (json.dumps({"data": "/home/me/cats", "photos": 9, "weights": None}), "- data: cats\n- photos: 9\n"),
        (json.dumps({"data": "C:\\me\\cats"}), "- data: cats\n"),
        (json.dumps({"training": {"epochs": 5, "seed": 0}}), "- options of the training: epochs 5, seed 0"),
        ("[1]", "[1]"),
    ],
)
def test_how_it_was_trained_is_told_without_paths(made_by, told):
    card = model_card(reduce_(make("plain"), TNT(at=3)), "a/b", made_by=made_by)
    assert told in card.split("## How it was made\n\n")[1] and "me/" not in card and "me\\" not in card


def test_only_paths_are_taken_from_a_note():
    note = {"weights": "/a/b/w.safetensors", "inner": {"data": "/x/y"}, "model": "vit/tiny", "photos": 3}
    expected = {"weights": "w.safetensors", "inner": {"data": "y"}, "model": "vit/tiny", "photos": 3}
    assert json.loads(shareable(json.dumps(note))) == expected
    assert shareable("as /home says") == "as /home says"


def test_saving_writes_a_card_only_when_asked(tmp_path):
    model = reduce_(make("plain"), TNT(at=3))
    save(model, tmp_path / "without")
    assert [path.name for path in (tmp_path / "without").iterdir()] == ["reducer.safetensors"]
    save(model, tmp_path / "run", "by hand", card=True)
    card = (tmp_path / "run" / "README.md").read_text()
    assert 'load_(model, "run")' in card and "by hand" in card and "Nothing was measured" in card
    save(model, tmp_path / "run", card=CURVE)
    assert "| keep 0.7 | 81.0" in (tmp_path / "run" / "README.md").read_text()


def test_a_model_without_reduction_has_no_card():
    with pytest.raises(UserError, match="is not reduced"):
        model_card(make("plain"), "a/b")

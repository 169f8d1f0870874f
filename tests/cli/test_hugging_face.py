"""Commands on models of transformers, which lie in a folder with an image processor beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from hf_models import make, transformers
from tntprune.cli.main import main


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Seven classes in no alphabetical order, and photos prepared in a way of its own."""
    folder = tmp_path_factory.mktemp("classifier")
    model = make("vit_classifier")
    model.config.id2label = {number: f"kind{6 - number}" for number in range(7)}
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(
        size={"height": 24, "width": 40}, image_mean=[0.2, 0.5, 0.8], image_std=[0.1, 0.2, 0.4], resample=0
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    make("clip").save_pretrained(folder)
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    transformers.CLIPImageProcessor(**size).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder, numbers = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for kind in range(7):
        (folder / f"kind{kind}").mkdir()
        for number in range(2):
            pixels = numbers.integers(0, 255, (50, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"kind{kind}" / f"{number}.png")
    return folder


@pytest.fixture
def call(capsys):
    """Run a command in this process, and return what it tells as JSON."""

    def run(*arguments):
        capsys.readouterr()
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_eval_takes_the_models_own_classes_and_processor(classifier, photos, call):
    told = call("eval", f"hf:{classifier}", "--data", photos, "--method", "tome", "--r", 5, "--compare", "--workers", 0)
    processor = transformers.AutoImageProcessor.from_pretrained(classifier)
    model = transformers.AutoModelForImageClassification.from_pretrained(classifier).eval()
    right = []
    for path in sorted(photos.rglob("*.png")):
        with torch.inference_mode():
            logits = model(**processor(Image.open(path), return_tensors="pt")).logits
        right.append(model.config.id2label[int(logits.argmax())] == path.parent.name)
    assert told["base"]["top1"] == pytest.approx(100 * sum(right) / len(right), abs=0.01) and told["images"] == 14
    assert told["macs"] < told["base"]["macs"]


def test_train_then_eval_and_search_then_eval(classifier, photos, call, tmp_path):
    name, data = f"hf:{classifier}", ("--data", photos, "--workers", 0)
    run = call("train", name, *data, "--out", tmp_path / "run", "--at", 2, "--keep", 0.5, "--epochs", 1)["reducer"]
    assert call("eval", name, *data, "--reducer", run)["tokens"] == [60, 60, 30, 30]
    tuned = call("train", name, *data, "--out", tmp_path / "tuned", "--reducer", tmp_path / "run", "--unfreeze",
                 "norms", "--epochs", 1)["reducer"]  # fmt: skip
    assert call("eval", name, *data, "--reducer", tuned)["tokens"] == [60, 60, 30, 30]
    plan = tmp_path / "plan.json"
    call("search", name, *data, "--macs", 0.7, "--out", plan, "--method", "random", "--photos", 8, "--moves", 1)
    found = call("eval", name, *data, "--reducer", plan)
    assert found["macs"] <= 0.7 * call("macs", name)["macs"]


def test_a_sweep_goes_on_and_measures_other_weights_anew(classifier, photos, call, tmp_path):
    arguments = ["sweep", f"hf:{classifier}", "--data", photos, "--methods", "random", "--at", 2, "--rates", 0.5,
                 "--out", tmp_path / "r.jsonl", "--no-speed", "--workers", 0]  # fmt: skip
    first = call(*arguments)["rows"]
    assert len(first) == 2 and call(*arguments)["rows"] == first
    before = (classifier / "model.safetensors").read_bytes()
    model = transformers.ViTForImageClassification.from_pretrained(classifier)
    model.classifier.weight.data *= -1
    model.save_pretrained(classifier)
    try:
        assert call(*arguments)["rows"][0]["top1"] != first[0]["top1"]
    finally:
        (classifier / "model.safetensors").write_bytes(before)


def test_bench_show_and_export(classifier, clip, photos, call, tmp_path):
    photo = photos / "kind0" / "0.png"
    for number, folder in enumerate((classifier, clip)):  # a whole CLIP is asked without words
        name = f"hf:{folder}"
        rows = call("bench", name, "--method", "random", "--at", 2, "--rounds", 3, "--batch-sizes", 2)["results"]
        assert {row["method"] for row in rows} == {"unpruned", "random", "bound"}
        sheet = tmp_path / f"{number}.png"
        call("show", name, photo, "--method", "random", "--at", 2, "--out", sheet)
        assert sheet.is_file()
        told = call("export", name, "--method", "random", "--at", 2, "--to", "pt2", "--check", "--data", photos,
                    "--out", tmp_path / f"{number}.pt2")  # fmt: skip
        assert told["check"]["problem"] is None
    assert told["outputs"][0]["name"] == "embedding"


def test_show_turns_pixels_back_as_the_processor_made_them(classifier, photos, tmp_path):
    from tntprune.backbones.models import load_model
    from tntprune.methods import Random
    from tntprune.reduce import reduce_
    from tntprune.report.draw import ORIGINAL, photo_maps

    photo = photos / "kind0" / "0.png"
    (maps,) = photo_maps(reduce_(load_model(f"hf:{classifier}"), Random(at=2)), [photo])
    expected = np.asarray(Image.open(photo).resize((40, 24), Image.Resampling.NEAREST))
    assert np.abs(maps[ORIGINAL].astype(int) - expected).max() <= 1


@pytest.mark.wide  # a process of its own, which imports everything anew
def test_info_and_macs_start_without_the_compiler_and_still_find_transformers(classifier):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tntprune", "info", f"hf:{classifier}", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["grid"] == [6, 10]


def test_what_cannot_be_used_is_told_in_a_line(classifier, photos, tmp_path, capsys):
    make("dinov2").save_pretrained(tmp_path / "bare")
    for arguments, words in (
        (["info", "hf:nowhere/at-all"], "no config of a model of transformers could be read"),
        (["eval", f"hf:{tmp_path / 'bare'}", "--data", photos], "its image processor cannot be loaded"),
        (["eval", f"hf:{classifier}", "--data", photos, "--img-size", "48", "48"], "expected none"),
        (["sweep", f"hf:{tmp_path / 'bare'}", "--data", photos, "--out", tmp_path / "o"], "has no classes to tell"),
        (["pretrain", f"hf:{classifier}", "--data", photos, "--out", tmp_path / "p"], "expected one of timm's models"),
    ):
        capsys.readouterr()
        assert main([*map(str, arguments)]) in (1, 2)
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tntprune: ")]
        assert len(told) == 1 and words in told[0], told

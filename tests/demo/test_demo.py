from __future__ import annotations

import html
import json
import re
import sys

import pytest
import torch

from tntprune.backbones.digits_vit import WEIGHTS, digits_vit
from tntprune.cli.main import main
from tntprune.demo import demo
from tntprune.demo.digits import CANVAS, cluttered_digits, scans
from tntprune.demo.train_digits_vit import accuracy


def test_training_and_test_scans_are_kept_apart():
    (train, train_labels), (test, test_labels) = scans("train"), scans("test")
    assert len(train) == len(train_labels) == 1297 and len(test) == len(test_labels) == 500
    assert torch.equal(torch.cat([train_labels, test_labels]).bincount().sum(), torch.tensor(1797))
    both = torch.cat([train, test]).flatten(1)
    assert len({tuple(row.tolist()) for row in both}) > 1790  # a few scans are equal in the source


def test_the_data_follow_from_the_seed_and_the_digit_is_there():
    images, labels = cluttered_digits("test", seed=3)
    again, _ = cluttered_digits("test", seed=3)
    other, _ = cluttered_digits("test", seed=4)
    assert images.shape == (500, 1, CANVAS, CANVAS) and images.min() >= -1 and images.max() <= 1
    assert torch.equal(images, again) and not torch.equal(images, other)
    assert labels.shape == (500,) and set(labels.tolist()) == set(range(10))
    lit = (images > -0.9).float().mean((1, 2, 3)) * 64  # in tokens
    assert 3 < lit.mean() < 16


def test_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    cluttered_digits("train", seed=1)
    assert torch.equal(state, torch.get_rng_state())


def test_the_committed_model_is_small_and_reads_held_out_scans():
    model = digits_vit()
    assert WEIGHTS.stat().st_size < 1_000_000
    assert 150_000 < sum(p.numel() for p in model.parameters()) < 250_000
    images, labels = cluttered_digits("test", copies=2, seed=1)
    assert accuracy(model, images, labels) >= 90


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["short", "whole"])
def test_the_demo_does_the_whole_job(tmp_path, capsys, monkeypatch, whole):
    keep, methods = (demo.KEEP, dict(demo.METHODS)) if whole else ((16, 6), {})
    if not whole:
        methods = {name: demo.METHODS[name] for name in ("TNT", "random drop")}
        training = {"TNT": {"epochs": 1}}
        for name, value in (("KEEP", keep), ("SHOWN", keep[:1]), ("METHODS", methods), ("TRAINING", training)):
            monkeypatch.setattr(demo, name, value)
    assert main(["demo", "--out", str(tmp_path / "demo"), "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "training" in err and "note:" not in err  # progress is shown
    top1 = {(row["method"], row["tokens"]): row["top1"] for row in found["rows"]}
    assert set(top1) == {(method, tokens) for method in methods for tokens in keep}
    for tokens in keep:
        assert top1["TNT", tokens] > top1["random drop", tokens] + 5
    assert top1["TNT", 16] > found["base"]["top1"] - 2
    assert found["base"]["top1"] >= 90

    page = html.unescape((tmp_path / "demo" / "report.html").read_text())
    assert not re.search(r'(?:src|href)="(?!data:)', page)  # nothing is fetched
    assert page.count("<img") == 2 and page.count("<tr>") == 2 + len(keep)
    for method in methods:
        assert method in page
    assert re.search(r"\d{4}-\d\d-\d\d", page)


def test_what_is_not_installed_is_told_at_once(tmp_path, capsys, monkeypatch):
    for module in ("matplotlib", "sklearn.datasets"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            assert main(["demo", "--out", str(tmp_path / "demo")]) == 1
        assert "pip install 'tntprune[" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "demo")]) == 1
    assert capsys.readouterr().err.count("\n") == 1

"""Messages that tell a user what to do next."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from PIL import Image

from tntprune import TNT, UsageError, UserError, evaluate, find_plan, load_, reduce_
from tntprune.backbones.models import load_model
from tntprune.cli.main import main


@pytest.fixture
def call(capsys):
    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_method_that_acts_in_every_block_says_so_where_one_token_is_left(call):
    code, _, err = call("macs", "vit_tiny_patch16_224", "--method", "tome", "--keep", "0.5")
    assert code == 0 and "tome removes tokens in 7 blocks and leaves 1 of 196 patch tokens" in err
    assert "--method tome --at 3 --keep 0.5" in err
    for harmless in (["--r", "8"], ["--at", "3", "--keep", "0.5"]):
        assert call("macs", "vit_tiny_patch16_224", "--method", "tome", *harmless)[2] == ""


def test_macs_says_where_windows_would_save_much(call):
    tnt = ["macs", "vit_small_patch16_224", "--img-size", "1024", "1024", "--method", "tnt"]
    code, _, err = call(*tnt)
    assert code == 0 and "tnt itself takes 3.9 % of the MACs, because it compares all tokens; with --window 16" in err
    promised = float(err.split("it would take ")[1].split(" %")[0])
    found = json.loads(call(*tnt, "--window", "16", "--json")[1])
    assert promised == round(100 * sum(found["reduction"].values()) / found["macs"], 1) < 1
    for harmless in (["--window", "16"], ["--how", "drop"], ["--at", "11"]):
        assert call(*tnt, *harmless)[2] == ""
    assert call("macs", "vit_small_patch16_224", "--method", "tnt")[2] == ""


@pytest.mark.parametrize(
    ("keep", "line"),
    [
        (50, "keep=50: expected a share above 0 and at most 1 (for 50 % write 0.5)"),
        ("0.5", "keep='0.5': expected a share above 0 and at most 1"),
        (0, "keep=0: expected a share above 0 and at most 1"),
    ],
)
def test_a_share_in_percent_is_told_as_a_share(keep, line):
    with pytest.raises(UsageError) as caught:
        TNT(keep=keep)
    assert str(caught.value) == line


def test_a_misspelt_run_is_told_with_the_one_beside_it(tmp_path, monkeypatch):
    (tmp_path / "runs" / "flowers").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such folder here \(did you mean runs/flowers\?\), and the Hub gave none"):
        load_(load_model("digits_vit"), "runs/flwers")


def test_a_budget_in_python_is_told_without_flags():
    with pytest.raises(UsageError, match="none given; expected one of macs, latency and speedup; or drop; or drop and"):
        find_plan(load_model("digits_vit"), "photos")


def test_an_evaluation_prints_what_was_found():
    model = load_model("digits_vit")
    told = str(evaluate(model, torch.zeros(4, 1, 64, 64), progress=False))
    assert "images: 4" in told and "None" not in told


@pytest.fixture
def folders(tmp_path):
    for number in range(10):
        (tmp_path / "mine" / f"name-{number}").mkdir(parents=True)
        Image.new("L", (64, 64), 20 * number).save(tmp_path / "mine" / f"name-{number}" / "one.png")
    return tmp_path / "mine"


def test_class_folders_name_the_classes_of_an_export(call, folders, tmp_path):
    code, _, err = call("export", "digits_vit", "--data", folders, "--to", "pt2", "--out", tmp_path / "a.pt2")
    assert code == 0, err
    assert json.loads((tmp_path / "a.pt2.json").read_text())["classes"] == [f"name-{number}" for number in range(10)]
    shutil.rmtree(folders / "name-0")  # not as many as classes: they are other folders
    call("export", "digits_vit", "--data", folders, "--to", "pt2", "--out", tmp_path / "b.pt2")
    assert json.loads((tmp_path / "b.pt2.json").read_text())["classes"] is None


def test_an_export_of_what_was_never_calibrated_says_so(tmp_path):
    from tntprune import export
    from tntprune.errors import UserNote

    model = reduce_(load_model("digits_vit"), TNT(at=2, keep=0.5))
    with pytest.warns(UserNote, match="tnt was never calibrated"):
        found = export(model, tmp_path / "a.pt2", to="pt2")
    assert found.about["reduction"]["left"] == {"after block 2": 32}
    assert "tokens" not in found.about["reduction"]


def test_a_model_that_is_not_supported_is_told_before_its_weights(call, tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "w.safetensors")
    code, _, err = call("eval", "resnet18", "--weights", tmp_path / "w.safetensors", "--data", tmp_path)
    assert code == 1 and "is not supported" in err

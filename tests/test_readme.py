"""What the README says, done."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from tntprune.cli.commands import COMMANDS as COMMANDS_OF_THE_PROGRAM
from tntprune.cli.main import _parse, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    re.split(r"\s{3,}", line)[0] for _, block in BLOCKS for line in block.splitlines() if line.startswith("tntprune ")
]
COMMANDS = [re.sub(r"\[(--\w+)\]", r"\1", command) for command in COMMANDS]  # optional ones too


def test_there_are_commands_in_the_readme():
    assert {command.split()[1] for command in COMMANDS} == set(COMMANDS_OF_THE_PROGRAM)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_in_the_readme_is_understood(command):
    assert callable(_parse(shlex.split(command)[1:]))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] in ("info", "macs")])
def test_commands_that_need_no_weights_run(command, capsys):
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.realdata
@pytest.mark.slow
@pytest.mark.wide
def test_the_commands_that_need_photos_run_in_order(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tntprune.training.config.STEPS", 2)
    photos = sorted((data / "calibration-1000" / "images").glob("*/*.jpg"))[:12]
    for photo in photos:
        target = tmp_path / "PHOTOS" / photo.parent.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(photo, target)
    shutil.copy(photos[0], tmp_path / "PHOTO...")
    (tmp_path / "PHOTO...").rename(tmp_path / "PHOTO.jpg")
    weights = ["--weights", str(data / "vit_tiny_patch16_224.safetensors")]
    for command in COMMANDS:
        words = [word.replace("PHOTO...", "PHOTO.jpg") for word in shlex.split(command)[1:] if word != "--resume"]
        short = {"train": ["--epochs", "1"], "sweep": ["--rounds", "3"], "push": ["--card-only", "--keep", "0.5"]}
        short["bench"] = ["--rounds", "3", "--dtypes", "fp32", "--batch-sizes", "1"]
        short["search"] = ["--photos", "8", "--moves", "2"]
        if words[0] in ("train", "search", "eval", "show", "bench", "export", "push", "sweep"):
            assert main([*words, *weights, *short.get(words[0], [])]) == 0, capsys.readouterr().err
        if words[0] == "report":
            assert main(words) == 0, capsys.readouterr().err
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "small.xml").exists()
    assert Image.open(tmp_path / "sheet.png").width > 1000


@pytest.mark.slow
def test_the_python_in_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tntprune.training.config.STEPS", 2)
    for name in ("a", "b"):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.effect_noise((240, 240), 80).convert("RGB").save(tmp_path / "photos" / f"{name}.jpg")
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name, pretrained=False))  # no Hub here
    scope = {"images": torch.randn(1, 3, 224, 224)}
    for language, block in BLOCKS:
        if language == "python":
            exec(block, scope)
    assert scope["logits"].shape == (1, 1000)
    assert scope["trace"].kept[3].shape == (1, 98)
    assert (tmp_path / "runs" / "small" / "reducer.safetensors").stat().st_size < 20_000


def test_pictures_and_pages_that_the_readme_names_are_there():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        path, _, part = target.partition("#")
        assert (ROOT / path).is_file(), target
        headings = re.findall(r"^#+ (.*)", (ROOT / path).read_text(), re.MULTILINE) if part else []
        assert not part or part in [heading.lower().replace(" ", "-") for heading in headings], target


def test_make_targets_that_the_readme_names_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile

"""A thousand classes, the whole recipe and two processes, by the command that a user would give."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from tntprune.cli.main import main
from tntprune.methods import from_dict
from tntprune.system.storage import read_metadata, read_weights
from tntprune.training.recipes import published

pytestmark = pytest.mark.wide
CLASSES, STEPS = 1000, 8
BATCH = 248  # four in an epoch, in two parts of an even number of images


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An image in each of a thousand class folders, to learn from and to evaluate on; and a small model."""
    root, generator = tmp_path_factory.mktemp("scale"), np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(CLASSES):
            path = root / split / f"class {number:03}" / "0.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(generator.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(path, compress_level=0)
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", img_size=32).state_dict(), root / "weights.safetensors")
    return root


def options(place):
    return ["test_vit", "--img-size", "32", "32", "--weights", place / "weights.safetensors", "--workers", "0"]


def training(place, out):
    recipe = [
        "--preset",
        "published",
        "--recipe",
        "paper",
        "--epochs",
        "2",
        "--batch-size",
        BATCH,
        "--micro-batches",
        "2",
    ]
    return ["train", *options(place), "--data", place / "train", "--out", out, "--at", "2", *recipe]


def evaluation(place, out):
    return ["eval", *options(place), "--data", place / "val", "--reducer", out, "--batch-size", "125", "--json"]


def torchrun(*arguments):
    """What two processes print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tntprune"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def lines(out):
    found = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def test_a_thousand_classes_in_two_processes_with_every_augmentation(place, capsys):
    two, one = place / "two", place / "one"
    assert f" of {CLASSES} photos, {STEPS} steps of {BATCH}, in " in torchrun(*training(place, two))
    assert main([str(argument) for argument in training(place, one)]) == 0

    images = json.loads(read_metadata(two / "reducer.safetensors")["made_by"])["augmentation"]
    assert images == published(from_dict({"version": 1, "method": "tnt"})).augmentation.to_dict()
    assert all(images.values()), "an augmentation is off"
    assert len(lines(two)) == STEPS and all(math.isfinite(line["loss"]) for line in lines(two))
    assert lines(two) == lines(one)
    assert sorted(path.name for path in (two / "ema").iterdir()) == ["reducer.safetensors"]
    for folder in ("", "ema"):
        first, second = (read_weights(out / folder / "reducer.safetensors") for out in (two, one))
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    together = json.loads(torchrun(*evaluation(place, two)))
    capsys.readouterr()
    assert main([str(argument) for argument in evaluation(place, one)]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert together.pop("images_per_s") > 0 and alone.pop("images_per_s") > 0
    assert together == alone and together["images"] == CLASSES

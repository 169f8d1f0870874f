"""2,000 random command lines end without a traceback; `make test` runs a part of them."""

from __future__ import annotations

import random
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from command_lines import Things, line, run
from tntprune.backbones.digits_vit import WEIGHTS
from tntprune.cli.main import main
from tntprune.demo.digits import scans, scatter

SEED = 17
LINES = 2000
PARTS = 16


@pytest.fixture(scope="module")
def things(tmp_path_factory) -> Things:
    """Twenty small photos, a short training and a results file."""
    root = tmp_path_factory.mktemp("things")
    images, labels = scans("test")
    chosen = torch.cat([(labels == digit).nonzero()[:2, 0] for digit in range(10)])
    canvas, labels = scatter(images[chosen], labels[chosen], torch.Generator().manual_seed(0))
    for number, (image, label) in enumerate(zip(canvas, labels.tolist())):
        folder = root / "photos" / f"digit{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].mul(255).round().byte().numpy()).save(folder / f"{number:02}.png")
    digits = ["digits_vit", "--data", str(root / "photos"), "--workers", "0"]
    assert main(["train", *digits, "--out", str(root / "run"), "--epochs", "1", "--at", "2"]) == 0
    assert main(["sweep", *digits, "--out", str(root / "rows.jsonl"), "--methods", "topk at=2", "--no-speed"]) == 0
    picture = root / "photos" / "digit3" / "06.png"
    return Things(root / "photos", root / "run", Path(WEIGHTS), root / "rows.jsonl", picture)


def check(things: Things, seed: str, count: int, folder: Path) -> None:
    """Run so many lines and tell all that end badly."""
    draw, wrong = random.Random(seed), []
    for number in range(count):
        words, encoding = line(things, draw), draw.choice(("utf-8", "ascii"))
        here = folder / str(number)
        here.mkdir()
        shutil.copytree(things.run, here / "run")
        faults = run(words, here, encoding, limit=300).faults()
        wrong += [f"tntprune {shlex.join(words)}\n{fault}" for fault in faults]
        shutil.rmtree(here, ignore_errors=True)
    assert not wrong, "\n\n".join(wrong)


def test_random_command_lines_end_without_a_traceback(things, tmp_path):
    check(things, f"{SEED} short", 75, tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("part", range(PARTS))
def test_two_thousand_random_command_lines_end_without_a_traceback(things, tmp_path, part):
    check(things, f"{SEED} {part}", LINES // PARTS, tmp_path)

"""A lack of memory is told in one line that names what to give smaller."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from tntprune.cli.main import main
from tntprune.data.photo import Photo
from tntprune.system.memory import lack_of_memory


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)  # torch waits so long for a reader
    for digit in range(10):
        (tmp_path / str(digit)).mkdir()
        Image.new("L", (32, 32)).save(tmp_path / str(digit) / "a.png")
    return tmp_path


def told(capsys) -> str:
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if "tntprune:" in line]
    assert len(lines) == 1 and "Traceback" not in error, error
    return lines[0]


REASONS = {
    "python": lambda *given: bytearray(1 << 60),
    "numpy": lambda *given: np.zeros(1 << 55),
    "torch": lambda *given: torch.zeros(1 << 50),
    "cuda": lambda *given: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_flags_that_help_are_named(photos, monkeypatch, capsys, reason):
    monkeypatch.setattr("timm.models.vision_transformer.VisionTransformer.forward", REASONS[reason])
    assert main(f"eval digits_vit --data {photos} --workers 0".split()) == 1
    line = told(capsys)
    assert "out of memory" in line and "--batch-size" in line and "--workers" in line


def test_of_a_training_too(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tntprune.training.trainer.Trainer.step", REASONS["torch"])
    assert main(f"train digits_vit --data {photos} --workers 0 --out {tmp_path}/run".split()) == 1
    assert "--micro-batches" in told(capsys)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_no_bad_image(photos, monkeypatch, capsys, workers):
    monkeypatch.setattr("tntprune.data.images._whole", REASONS["python"])
    skip = "--on-bad-image skip"
    assert main(f"eval digits_vit --data {photos} --workers {workers} {skip} --batch-size 2".split()) == 1
    assert "out of memory" in told(capsys)


def test_a_killed_process_that_reads_is_told(photos, monkeypatch, capsys):
    monkeypatch.setattr(Photo, "read", lambda self, mode: os.kill(os.getpid(), signal.SIGKILL))
    assert main(f"eval digits_vit --data {photos} --workers 1".split()) == 1
    assert "was killed" in told(capsys)


def test_other_errors_stay_what_they_are(photos, monkeypatch):
    assert lack_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    monkeypatch.setattr(
        "timm.models.vision_transformer.VisionTransformer.forward", lambda *given: torch.zeros(2) @ torch.zeros(3)
    )
    with pytest.raises(RuntimeError, match="size"):
        main(f"eval digits_vit --data {photos} --workers 0".split())

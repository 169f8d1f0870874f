"""Photos come out of the processes that read, however little shared memory there is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from tntprune.data.folders import all_photos
from tntprune.data.loading import Photos, in_order
from tntprune.errors import UserError

MOUNT = 'mount -t tmpfs -o size={size} tmpfs /dev/shm || exit 77; exec "$@"'


def read(folder: str, workers: int) -> list:
    """Sums of pixels, positions, and photos that cannot be read, batch by batch."""
    photos = Photos(all_photos(Path(folder)), create_transform((3, 224, 224)))
    loader = in_order(photos, 4, workers)
    return [[batch.images.double().sum().item(), batch.positions.tolist(), len(batch.bad)] for batch in loader]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(60):
        Image.fromarray(generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(root / f"{number:02}.png")
    (root / "30.png").write_bytes(b"no image")
    return root


def run(command: list[str], size: str | None) -> subprocess.CompletedProcess[str]:
    """Run a command with so much shared memory: a mount that nobody else sees."""
    if size is not None:
        command = ["unshare", "-m", "sh", "-c", MOUNT.format(size=size), "sh", *command]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def allowed() -> bool:
    """Whether a process of ours may have its own mounts."""
    return shutil.which("unshare") is not None and run(["true"], "64m").returncode == 0


def test_a_lack_of_room_for_locks_is_told(photos, monkeypatch):
    monkeypatch.setattr("tntprune.data.loading.SHARED", photos)
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(f_bavail=1, f_frsize=4096))
    with pytest.raises(UserError, match=r"no room for 4 processes that read photos; expected --workers 0, or more"):
        read(str(photos), 4)


needs_mounts = pytest.mark.skipif(
    not allowed(), reason="skipped: mounting in a namespace of one's own is not allowed here"
)


def test_where_memory_cannot_be_shared_photos_come_through_the_pipe(photos, monkeypatch):
    straight = read(str(photos), 0)
    monkeypatch.setattr(torch.Tensor, "share_memory_", lambda self: (_ for _ in ()).throw(RuntimeError("no room")))
    assert read(str(photos), 2) == straight and len(straight) == 15 and sum(bad for *_, bad in straight) == 1


@pytest.mark.wide
@needs_mounts
@pytest.mark.parametrize("size", ["64m", "1m", "200k"])
def test_photos_are_read_where_shared_memory_is_small(photos, size):
    """Four batches of 2.4 MB at a time do not fit; with Docker's 64 MB larger batches do not."""
    script = f"import json, test_shared_memory; print(json.dumps(test_shared_memory.read({str(photos)!r}, 4)))"
    small = run([sys.executable, "-c", script], size)
    assert small.returncode == 0, small.stderr
    assert json.loads(small.stdout) == read(str(photos), 0) and len(json.loads(small.stdout)) == 15


@pytest.mark.wide
@needs_mounts
def test_shared_memory_without_any_room_is_told_in_a_line(photos, tmp_path):
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "0.png").write_bytes((photos / "00.png").read_bytes())
    command = ["-m", "tntprune", "eval", "digits_vit", "--data", str(tmp_path), "--batch-size", "2", "--workers", "4"]
    found = run([sys.executable, *command], "4k")
    assert found.returncode == 1 and "--workers 0" in found.stderr
    assert [line for line in found.stderr.splitlines() if "tntprune:" in line] == found.stderr.splitlines()[-1:]

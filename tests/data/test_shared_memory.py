"""Photos come out of the processes that read, however little shared memory there is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

MOUNT = 'mount -t tmpfs -o size={size} tmpfs /dev/shm || exit 77; exec "$@"'
READ = """
import json, sys
from pathlib import Path
from timm.data import create_transform
from tntprune.data.folders import Photos, all_photos
from tntprune.data.loading import in_order

photos = Photos(all_photos(Path(sys.argv[1])), create_transform((3, 224, 224)))
loader = in_order(photos, 4, int(sys.argv[2]))
print(json.dumps([[batch.images.double().sum().item(), batch.positions.tolist(), len(batch.bad)] for batch in loader]))
"""


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
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def allowed() -> bool:
    """Whether a process of ours may have its own mounts."""
    return shutil.which("unshare") is not None and run(["true"], "64m").returncode == 0


needs_mounts = pytest.mark.skipif(
    not allowed(), reason="skipped: mounting in a namespace of one's own is not allowed here"
)


@needs_mounts
@pytest.mark.parametrize("size", ["64m", "1m", "200k"])
def test_photos_are_read_where_shared_memory_is_small(photos, size):
    """Four batches of 2.4 MB at a time do not fit; with Docker's 64 MB larger batches do not."""
    straight = run([sys.executable, "-c", READ, str(photos), "0"], None)
    small = run([sys.executable, "-c", READ, str(photos), "4"], size)
    assert small.returncode == 0, small.stderr
    assert json.loads(small.stdout) == json.loads(straight.stdout) and len(json.loads(small.stdout)) == 15


@needs_mounts
def test_shared_memory_without_any_room_is_told_in_a_line(photos, tmp_path):
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "0.png").write_bytes((photos / "00.png").read_bytes())
    command = ["-m", "tntprune", "eval", "digits_vit", "--data", str(tmp_path), "--batch-size", "2", "--workers", "4"]
    found = run([sys.executable, *command], "4k")
    assert found.returncode == 1 and "--workers 0" in found.stderr
    assert [line for line in found.stderr.splitlines() if "tntprune:" in line] == found.stderr.splitlines()[-1:]

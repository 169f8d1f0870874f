"""`tntprune embed`, and the commands that work on a model without its classifier."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from PIL import Image

from tntprune import ToMe, embed, reduce_
from tntprune.backbones.digits_vit import digits_vit
from tntprune.backbones.models import drop_classifier_
from tntprune.cli.embed import PIECE
from tntprune.cli.main import main
from tntprune.serialization import vectors

TOME = "--method tome --at 2 --r 8"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Twenty small photos in ten folders."""
    folder, draw = tmp_path_factory.mktemp("photos"), random.Random(0)
    for number in range(20):
        place = folder / f"digit{number % 10}"
        place.mkdir(exist_ok=True)
        Image.frombytes("L", (64, 64), draw.randbytes(4096)).save(place / f"{number:02}.png")
    return folder


@pytest.fixture
def call(capsys):
    """Run a command in this process: its exit code, standard output and standard error."""

    def run(text, *more):
        capsys.readouterr()
        return main([*text.split(), *map(str, more)]), *capsys.readouterr()

    return run


def test_it_writes_the_pooled_features_and_tells_where(call, photos, tmp_path):
    code, out, err = call(f"embed digits_vit {photos} --workers 0 {TOME} --out {tmp_path}/out")
    assert code == 0 and "embedding: 100%" in err
    assert out.startswith("20 images, 0 skipped, 64 dimensions, ") and out.endswith(f"s: {tmp_path}/out/vectors.npy\n")
    model = drop_classifier_(reduce_(digits_vit().eval(), ToMe(at=2, r=8)))
    expected = embed(model, photos, workers=0, progress=False).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "out" / "vectors.npy"), expected, atol=1e-5)
    code, out, _ = call(f"embed digits_vit {photos} --workers 0 {TOME} --out {tmp_path}/out")
    assert code == 0 and "had been embedded already" in out
    code, out, err = call(f"embed digits_vit {photos} --workers 0 --out {tmp_path}/out")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "was begun with reduction=tome at=2 r=8, not None" in err


def test_json_and_photos_that_are_left_out(call, photos, tmp_path):
    for path in photos.rglob("*.png"):
        copy = tmp_path / "copy" / path.relative_to(photos)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes() if path.name != "07.png" else b"no image")
    words = f"embed digits_vit {tmp_path}/copy --workers 0 --out {tmp_path}/out --json"
    code, out, err = call(words)
    assert (code, out) == (1, "") and "07.png" in json.loads(err.splitlines()[-1])["error"]
    code, out, err = call(f"{words} --on-bad-image skip --dtype float16")
    assert (code, out) == (2, "") and "dtype=float32, not float16" in err
    code, out, err = call(f"{words} --on-bad-image skip")
    told = json.loads(out)
    assert code == 3 and "skipped " in err and told.pop("images_per_s") > 0
    assert told == {
        "vectors": f"{tmp_path}/out/vectors.npy", "files": f"{tmp_path}/out/files.txt", "images": 19, "skipped": 1,
        "dimensions": 64,
    }  # fmt: skip
    code, out, _ = call(f"{words} --on-bad-image skip")
    assert code == 3 and "images_per_s" not in json.loads(out)


def test_the_largest_batch_is_a_piece():
    assert PIECE == vectors.PIECE


def test_wrong_usage_is_one_line(call, photos, tmp_path):
    for words, code, told in (
        (f"embed digits_vit {tmp_path}/nowhere --out {tmp_path}/out", 1, "no such folder"),
        (f"embed digits_vit {photos} --out {photos}", 1, "holds other files"),
        (f"embed digits_vit {photos} --out {tmp_path}/out --batch-size 513", 2, "batch_size=513"),
        (f"embed digits_vit {photos} --out {tmp_path}/out --keep 0.5", 2, "--method"),
        (f"embed digits_vit {photos} --out {tmp_path}/out --method tnt", 1, "has to be trained first"),
        (f"embed digits_vit {photos}", 2, "--out"),
    ):
        found, out, err = call(words)
        assert (found, out) == (code, "") and err.count("\n") == 1 and told in err, err


def test_learn_measure_and_embed_without_the_classifier(call, photos, tmp_path):
    train = f"train digits_vit --no-classifier --data {photos} --out {tmp_path}/run --at 2 --keep 0.5 --workers 0"
    assert call(f"{train} --epochs 1 --batch-size 10")[0] == 0
    code, _, err = call(f"{train.replace('--no-classifier', '')} --epochs 1 --batch-size 10 --resume")
    assert code == 2 and "classifier=False" in err
    code, out, _ = call(f"eval digits_vit --no-classifier --data {photos} --workers 0 --reducer {tmp_path}/run --json")
    told = json.loads(out)
    assert code == 0 and 0 < told["cosine"] < 1 and {"recall1", "recall10", "knn", "knn_unpruned"} <= told.keys()
    assert "top1" not in told
    words = f"embed digits_vit {photos} --workers 0 --reducer {tmp_path}/run --out {tmp_path}/out"
    assert call(words)[0] == 0
    code, _, err = call(f"{words} --keep 0.4")
    assert code == 2 and "keep=0.5, not " in err

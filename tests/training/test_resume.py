"""A resumed training has the same weights and images as before, and a checkpoint that was tampered with is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from test_runs import IMAGES, LABELS, STATE, run, signalled

from tntprune.cli.main import main
from tntprune.data.batches import TensorSource
from tntprune.data.photo import READ, Packed, Photo
from tntprune.errors import UsageError, UserError
from tntprune.serialization.checkpoint import save_weights
from tntprune.system.storage import read_metadata, read_weights
from tntprune.training.runs import Stopped


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    source, out = signalled(5), tmp_path_factory.mktemp("interrupted")
    source.digest = source.source.digest
    with pytest.raises(Stopped):
        run(out, source)
    return out


@pytest.fixture
def stopped(tmp_path, interrupted):
    return shutil.copytree(interrupted, tmp_path / "run")


def retold(folder: Path, **entries: str | None) -> None:
    """Change entries of the checkpoint's metadata; None takes one out."""
    about = {**read_metadata(folder / STATE), **entries}
    tensors = read_weights(folder / STATE)
    save_file(tensors, folder / STATE, {key: value for key, value in about.items() if value is not None})


# Checkpoints


@pytest.mark.parametrize("step", ["999999", "12", "0", "-3", "", "abc", "4.5", None, "9" * 400])
def test_a_step_that_cannot_be_is_refused(stopped, step):
    retold(stopped, step=step)
    with pytest.raises(UserError, match=r"broken .*step is") as caught:
        run(stopped, resume=True)
    assert "\n" not in str(caught.value) and not (stopped / "reducer.safetensors").exists()


@pytest.mark.parametrize("entry", ["options", "scaler", "notes"])
@pytest.mark.parametrize("value", ["[1, 2]", "5", '"text"', "null", "{", "[" * 100_000])
def test_metadata_that_is_no_object_is_refused(stopped, entry, value):
    retold(stopped, **{entry: value})
    with pytest.raises(UserError, match=f"broken .*{entry} is no JSON object"):
        run(stopped, resume=True)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("options", '{"training": 5}'),
        ("notes", '{"best": 5}'),
        ("notes", '{"best": {"top1": "high"}}'),
        ("notes", '{"best": {}}'),
    ],
)
def test_objects_of_another_shape_are_refused(stopped, entry, value):
    retold(stopped, **{entry: value})
    with pytest.raises(UserError, match="broken"):
        run(stopped, resume=True)


def test_a_finished_folder_with_a_note_of_another_kind_is_refused(stopped):
    run(stopped, resume=True)
    path = stopped / "reducer.safetensors"
    save_file(read_weights(path), path, {**read_metadata(path), "made_by": "by hand"})
    with pytest.raises(UserError, match=r"broken .*made_by is no JSON object"):
        run(stopped, resume=True)


def test_lines_of_the_log_that_are_none_are_left_out(stopped):
    log = stopped / "log.jsonl"
    log.write_text(log.read_text() + '[1]\n5\n{"step": 4}\n{"step": 4, "epoch": "x", "seconds": 1}\n{"step": 1e999}\n')
    run(stopped, resume=True)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, 13))


# Other contents


def test_other_pixels_and_other_labels_are_refused(stopped):
    other = IMAGES.clone()
    other[3, 0, 0, 0] += 1
    labels = LABELS.flip(0)
    for source in (TensorSource(other, LABELS, 4, 0), TensorSource(IMAGES, labels, 4, 0)):
        with pytest.raises(UsageError, match="was started with other images to train on; expected the same ones"):
            run(stopped, source, resume=True)
    run(stopped, resume=True)


def test_a_run_that_recorded_no_digests_resumes(stopped):
    options = json.loads(read_metadata(stopped / STATE)["options"])
    assert {"model_digest", "data_digest"} <= options.keys()
    retold(stopped, options=json.dumps({k: v for k, v in options.items() if not k.endswith("_digest")}))
    run(stopped, resume=True)


@pytest.fixture
def photos(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        place = tmp_path / "photos" / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place / f"{number:02}.bmp")  # all of one size
    return tmp_path / "photos"


def test_the_command_refuses_other_pixels_and_another_file_of_weights(photos, tmp_path, capsys, monkeypatch):
    weights = tmp_path / "weights"
    torch.manual_seed(0)
    save_weights(timm.create_model("test_vit", num_classes=3), weights)
    file = weights / "model.safetensors"
    given = ["train", "test_vit", "--weights", str(file), "--img-size", "32", "32", "--data", str(photos),
             "--val", str(photos), "--out", str(tmp_path / "run"), "--batch-size", "8", "--epochs", "3",
             "--workers", "0", "--save-every", "1"]  # fmt: skip

    import tntprune.training.runs as runs

    fit = runs.fit

    def stopping(model, source, *rest):
        fit(model, signalled(4, source=source), *rest)

    monkeypatch.setattr(runs, "fit", stopping)
    assert main(given) == 130 and "stopped after step 4" in capsys.readouterr().err
    monkeypatch.undo()

    picture = photos / "class1" / "04.bmp"
    before = picture.read_bytes()
    picture.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert main([*given, "--resume"]) == 2
    assert "was started with other images to train on" in capsys.readouterr().err
    picture.write_bytes(before)

    kept = file.read_bytes()
    torch.manual_seed(1)
    save_weights(timm.create_model("test_vit", num_classes=3), weights)
    assert main([*given, "--resume"]) == 2
    assert "was started with other weights of the model" in capsys.readouterr().err
    file.write_bytes(kept)
    assert main([*given, "--resume"]) == 0


def test_a_digest_does_not_depend_on_where_the_photos_lie(photos, tmp_path):
    def digest(folder, labels=0):
        return Packed([Photo(path, labels) for path in sorted(folder.glob("*/*"))]).digest(folder)

    first = digest(photos)
    photos.rename(tmp_path / "moved")
    assert digest(tmp_path / "moved") == first != digest(tmp_path / "moved", 1)
    (tmp_path / "moved/class0/00.bmp").rename(tmp_path / "moved/class0/99.bmp")
    assert digest(tmp_path / "moved") != first


def test_of_very_many_photos_some_are_read_and_all_are_looked_at(tmp_path):
    for number in range(READ + 10):
        (tmp_path / f"{number:04}.png").write_bytes(b"abc")
    packed = Packed([Photo(path, 0) for path in sorted(tmp_path.iterdir())])
    first = packed.digest(tmp_path)
    (tmp_path / "0001.png").write_bytes(b"abcd")
    assert packed.digest(tmp_path) != first
    (tmp_path / "0001.png").unlink()
    assert len({packed.digest(tmp_path), first}) == 2  # one that is gone is for the reader to tell

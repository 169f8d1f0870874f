"""A folder of embeddings: what is in it, and that a killed job goes on and others are refused."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from several import processes, together
from tntprune import Random, ToMe, UsageError, UserError, embed, reduce_
from tntprune.serialization import embedding, vectors
from tntprune.serialization.embedding import embed_folder
from tntprune.system.distributed import ALONE
from tntprune.system.storage import alone

COUNT = 11
SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 0}


def headless(seed=0):
    torch.manual_seed(seed)
    model = VisionTransformer(**SIZES).eval()
    model.pretrained_cfg = {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    return model


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 16, 16, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        place = folder / f"album {number % 3}"
        place.mkdir(exist_ok=True)
        Image.fromarray(picture).save(place / f"{number}.png")
    return folder


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Three photos a piece, so that there are four pieces."""
    for module in (vectors, embedding):
        monkeypatch.setattr(module, "PIECE", 3)


def run(photos, out, model=None, group=ALONE, **more):
    options = {"batch_size": 2, "workers": 0, "progress": False, "name": "small", **more}
    return embed_folder(model or headless(), photos, out, group=group, **options)


def left(out):
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))


def names(photos):
    return sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))


def check(out, photos, model=None):
    """All of it is there, in order, and nothing else."""
    found = np.load(out / "vectors.npy", mmap_mode="r")
    expected = embed(model or headless(), photos, workers=0, progress=False).numpy()
    assert (found.dtype, found.shape, found.flags.c_contiguous) == (np.float32, (COUNT, 8), True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (out / "files.txt").read_text().splitlines() == names(photos)
    assert left(out) == ["files.txt", "index.json", "vectors.npy"]


# What is written


@pytest.mark.parametrize("config", [None, ToMe(at=1, keep=0.5)])
def test_one_array_and_the_names_beside_it(tmp_path, photos, config):
    model = headless() if config is None else reduce_(headless(), config)
    found = run(photos, tmp_path / "new" / "out", model, workers=1)
    check(tmp_path / "new" / "out", photos, model)
    assert (found.images, found.skipped, found.dimensions, found.bad) == (COUNT, 0, 8, ())
    assert found.images_per_s > 0
    index = json.loads((tmp_path / "new" / "out" / "index.json").read_text())
    assert index["complete"] and (index["images"], index["dimensions"], index["skipped"]) == (COUNT, 8, [])
    assert index["settings"]["model"] == "small"
    assert index["settings"]["reduction"] == (config and {**index["settings"]["reduction"], "method": "tome"})


def test_half_the_disk(tmp_path, photos):
    run(photos, tmp_path / "whole")
    run(photos, tmp_path / "half", dtype="float16")
    half, whole = (np.load(tmp_path / name / "vectors.npy") for name in ("half", "whole"))
    assert half.dtype == np.float16 and np.array_equal(half, whole.astype(np.float16))
    model = headless()
    model.norm.bias.data[3] = 1e6
    with pytest.raises(UserError, match=r"embeddings up to 1e\+06 do not fit float16; expected --dtype float32"):
        run(photos, tmp_path / "large", model, dtype="float16")


def test_bf16(tmp_path, photos):
    run(photos, tmp_path / "out", precision="bf16")
    found, expected = np.load(tmp_path / "out" / "vectors.npy"), embed(headless(), photos, progress=False).numpy()
    assert found.dtype == np.float32 and 0 < np.abs(found - expected).max() < 0.1


def test_what_was_embedded_before_is_found(tmp_path, photos, monkeypatch):
    first = run(photos, tmp_path / "out")
    before = (tmp_path / "out" / "vectors.npy").stat().st_mtime_ns
    monkeypatch.setattr(embedding, "vectors_of", None)
    again = run(photos, tmp_path / "out", batch_size=1)
    assert again == first._replace(images_per_s=None)
    assert (tmp_path / "out" / "vectors.npy").stat().st_mtime_ns == before


# Photos that cannot be read


@pytest.fixture
def spoilt(tmp_path, photos):
    """A copy with four photos that are none: one in the first piece, and the whole second one."""
    for number, name in enumerate(names(photos)):
        path = tmp_path / "spoilt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image" if number in (1, 3, 4, 5) else (photos / name).read_bytes())
    return tmp_path / "spoilt"


def test_bad_photos_stop_it_or_are_left_out(tmp_path, spoilt):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"not an image.*leave such images out with --on-bad-image skip"):
        run(spoilt, out)
    found = run(spoilt, out, on_bad_image="skip")
    kept = [name for number, name in enumerate(names(spoilt)) if number not in (1, 3, 4, 5)]
    assert (found.images, found.skipped, len(found.bad)) == (7, 4, 4) and names(spoilt)[1] in found.bad[0]
    assert (out / "files.txt").read_text().splitlines() == kept
    images = [embedding.transform_for(headless())(Image.open(spoilt / name)) for name in kept]
    expected = embed(headless(), torch.stack(images), progress=False).numpy()
    np.testing.assert_allclose(np.load(out / "vectors.npy"), expected, atol=1e-5)


def test_pieces_with_photos_left_out_do_not_do_where_none_may_be(tmp_path, spoilt, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(vectors.VectorFolder, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            run(spoilt, tmp_path / "out", on_bad_image="skip")
    with pytest.raises(UserError, match="not an image"):
        run(spoilt, tmp_path / "out")


def test_nothing_but_bad_photos(tmp_path, spoilt):
    for name in names(spoilt):
        (spoilt / name).write_bytes(b"no image")
    with pytest.raises(UserError, match="no image could be read, 11 were skipped"):
        run(spoilt, tmp_path / "out", on_bad_image="skip")


# Killed


def stop(*given, **more):
    raise KeyboardInterrupt


def killed(photos, out, step, after):
    """Embed until `step` is called for the `after`-th time, and die there as if the power failed."""
    for module in (vectors, embedding):
        module.PIECE = 3
    plain, calls = getattr(os, step), []

    def dying(*given, **more):
        calls.append(given)
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*given, **more)

    setattr(os, step, dying)
    run(photos, out)


@pytest.mark.parametrize(
    ("step", "after"),
    [
        ("replace", 3),  # of six files the second piece
        pytest.param("replace", 1, marks=pytest.mark.wide),
        pytest.param("fsync", 6, marks=pytest.mark.wide),
        ("replace", 6),  # the array
        pytest.param("replace", 7, marks=pytest.mark.wide),
        ("replace", 8),  # the finished index
    ],
)
def test_killed_at_any_step_the_same_call_goes_on(tmp_path, photos, step, after):
    out = tmp_path / "out"
    process = processes.Process(target=killed, args=(photos, out, step, after))
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    run(photos, out)
    check(out, photos)


def test_what_is_done_is_not_done_again(tmp_path, photos, monkeypatch):
    done, plain = [], embedding.vectors_of

    def until(model, images):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(len(images))
        return plain(model, images)

    with monkeypatch.context() as patch:
        patch.setattr(embedding, "vectors_of", until)
        with pytest.raises(KeyboardInterrupt):
            run(photos, tmp_path / "out")
    assert left(tmp_path / "out") == [
        "index.json",
        "pieces",
        "pieces/0000000.safetensors",
        "pieces/0000001.safetensors",
    ]
    done.clear()
    monkeypatch.setattr(embedding, "vectors_of", lambda *given: done.append(len(given[1])) or plain(*given))
    run(photos, tmp_path / "out", batch_size=3)
    assert done == [3, 2]
    check(tmp_path / "out", photos)


# Several processes


def test_processes_share_the_photos(tmp_path, photos):
    with pytest.MonkeyPatch.context() as patch:  # one of them goes on with what one process has begun
        patch.setattr(vectors.VectorFolder, "finish", stop)
        patch.setattr(vectors.VectorFolder, "add", lambda self, piece, *given: piece and add(self, piece, *given))
        with pytest.raises(KeyboardInterrupt):
            run(photos, tmp_path / "out")
    assert "pieces/0000000.safetensors" not in left(tmp_path / "out")
    together(2, share, photos, tmp_path)
    for name in ("out", "whole"):
        check(tmp_path / name, photos)
    assert {(tmp_path / f"{rank}").read_text() for rank in range(2)} == {"[11, true, 11, true]"}
    assert {(tmp_path / f"told {rank}").read_text() for rank in range(2)} == {"UsageError False", "UsageError True"}


add = vectors.VectorFolder.add


def share(group, photos, place):
    for module in (vectors, embedding):
        module.PIECE = 3
    found = [run(photos, place / name, group=group) for name in ("out", "whole")]
    told = [value for one in found for value in (one.images, one.images_per_s > 0)]
    (place / f"{group.rank}").write_text(json.dumps(told))
    try:  # the mistake that the main one finds ends all, and is told once
        run(photos, place / "whole", group=group, dtype="float16")
    except UsageError as error:
        (place / f"told {group.rank}").write_text(f"UsageError {error.told}")


# What does not go together


def test_other_embeddings_are_refused(tmp_path, photos):
    out = tmp_path / "out"
    run(photos, out, reduce_(headless(), ToMe(at=1, keep=0.5)))
    before = left(out)
    other = tmp_path / "photos"
    for number, name in enumerate(names(photos)):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_bytes((photos / names(photos)[number - 1]).read_bytes())
    tome = reduce_(headless(), ToMe(at=1, keep=0.5))
    for model, more, told in (
        (headless(), {}, r"was begun with reduction=tome at=1 keep=0\.5, not None"),
        (reduce_(headless(), ToMe(at=1, keep=0.6)), {}, r"not tome at=1 keep=0\.6; expected the same command"),
        (reduce_(headless(), Random(at=1, keep=0.5)), {}, "not random at=1 keep=0.5"),
        (reduce_(headless(1), ToMe(at=1, keep=0.5)), {}, "was begun with other weights"),
        (tome, {"dtype": "float16"}, "dtype=float32, not float16"),
        (tome, {"precision": "bf16"}, "precision=fp32, not bf16"),
        (tome, {"name": "large"}, "model=small, not large"),
        (tome, {"photos": photos / "album 0"}, "photos=11, not 4"),
        (tome, {"photos": other}, "was begun with other photos"),
    ):
        with pytest.raises(UsageError, match=told) as caught:
            run(more.pop("photos", photos), out, model, **more)
        assert "\n" not in str(caught.value) and str(caught.value).endswith("or another --out")
    assert left(out) == before


def test_what_is_no_folder_of_embeddings_is_left_as_it_is(tmp_path, photos):
    def refused(out, told):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError, match=told) as caught:
            run(photos, out)
        assert "\n" not in str(caught.value)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    (tmp_path / "file").write_bytes(b"mine")
    refused(tmp_path / "file", "cannot be made")
    refused(tmp_path, r"holds other files \(file\); expected a new or an empty folder")
    for number, text in enumerate(
        (b"", b"{", b"[]", b'{"complete": 1, "settings": {}}', b'{"complete": true, "settings": {}}', b"\xff")
    ):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "index.json").write_bytes(text)
        refused(tmp_path / f"{number}", r"index\.json: not written by tntprune embed, or broken")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "index.json")
    refused(tmp_path / "pipe", r"index\.json: cannot be written \(a device, pipe or socket\)")
    run(photos, tmp_path / "out")
    (tmp_path / "out" / "vectors.npy").unlink()
    refused(tmp_path / "out", r"vectors\.npy: gone")


def test_a_broken_piece_is_named(tmp_path, photos, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(vectors.VectorFolder, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            run(photos, out)
    piece = out / "pieces" / "0000001.safetensors"
    good = piece.read_bytes()
    for break_ in (lambda: piece.write_bytes(good[:-3]), lambda: save_file({"x": torch.zeros(1)}, piece)):
        break_()
        with pytest.raises(UserError, match=r"0000001\.safetensors: broken; remove it, and run the same command again"):
            run(photos, out)
    piece.unlink()
    run(photos, out)
    check(out, photos)


def test_a_name_with_a_line_break_is_refused_before_the_work(tmp_path, photos):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a\nb.png").write_bytes((photos / names(photos)[0]).read_bytes())
    with pytest.raises(UserError, match="a line break in its name"):
        run(tmp_path / "photos", tmp_path / "out")
    assert left(tmp_path / "out") == []


def test_two_jobs_at_a_time_are_refused(tmp_path, photos):
    (tmp_path / "out").mkdir()
    with alone(tmp_path / "out"), pytest.raises(UserError, match="another process writes here"):
        run(photos, tmp_path / "out")
    run(photos, tmp_path / "out")

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo

from conftest import make
from tntprune.backbones.models import drop_classifier_, shape_of
from tntprune.data import datasets as opening
from tntprune.data.augment import AUTHORS, LIGHT
from tntprune.data.batches import PhotoSource, Share
from tntprune.data.datasets import open_photos
from tntprune.data.folders import labelled_photos
from tntprune.data.images import BadImage
from tntprune.data.loading import Photos, in_order
from tntprune.data.mixing import Mixer
from tntprune.data.streams import items_of_shards
from tntprune.data.transforms import transform_for
from tntprune.errors import UsageError, UserError

IMAGENET = shape_of("test_vit")  # 1000 classes
SEVEN = make("plain")
HEADLESS = drop_classifier_(make("plain"))
WORDNET = ImageNetInfo("imagenet-1k").label_names()
PLAIN = [f"class{i}" for i in range(7)]
BROKEN = b"\x89PNG\r\n\x1a\n but no more"


def encoded(number: int) -> bytes:
    """An image that tells its number."""
    file = io.BytesIO()
    Image.new("RGB", (40, 40), (number % 256, number // 256, 7)).save(file, "PNG")
    return file.getvalue()


def number_in(image: Image.Image) -> int:
    red, green, _ = image.getpixel((0, 0))
    return red + 256 * green


def refused(call, *words: str, kind: type[UserError] = UserError) -> None:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.fixture
def folder(tmp_path):
    def fill(names: list[str], each: int = 2, split: str = "train") -> Path:
        for number in range(each * len(names)):
            path = tmp_path / "set" / split / names[number // each] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(number))
        return tmp_path / "set"

    return fill


@pytest.fixture
def shards(tmp_path):
    def fill(sizes: list[int], info: bool = True, edit=lambda number, files: files) -> Path:
        root, number = tmp_path / "shards", 0
        root.mkdir()
        for shard, size in enumerate(sizes):
            with tarfile.open(root / f"train-{shard}.tar", "w") as tar:
                for _ in range(size):
                    files = {"png": encoded(number), "cls": str(number % 7).encode()}
                    for suffix, data in edit(number, files).items():
                        entry = tarfile.TarInfo(f"{number:04}.{suffix}")
                        entry.size = len(data)
                        tar.addfile(entry, io.BytesIO(data))
                    number += 1
        if info:
            split = {
                "name": "train", "num_samples": number, "shard_lengths": sizes,
                "filenames": [f"train-{shard}.tar" for shard in range(len(sizes))],
            }  # fmt: skip
            (root / "_info.json").write_text(json.dumps({"splits": {"train": split}}))
        return root

    return fill


def test_folders_are_read_as_before(folder):
    path = folder(PLAIN) / "train"
    assert open_photos(path, SEVEN) == open_photos(str(path), SEVEN) == labelled_photos(path, SEVEN)
    assert open_photos(path.parent, SEVEN, split="train") == labelled_photos(path, SEVEN)
    assert {photo.label for photo in open_photos(path, SEVEN, labelled=False)} == {-1}
    refused(lambda: open_photos(path, SEVEN, split="test"), f"{path / 'test'}: no such folder")
    refused(lambda: open_photos(path, SEVEN, samples=3), "a folder needs no samples", kind=UsageError)
    refused(lambda: open_photos(path, SEVEN, root=path), "a folder needs no root", kind=UsageError)


def test_a_model_without_classes_takes_any_folders_for_labels(folder):
    path = folder(["b", "a", "c/deep"]) / "train"
    found = open_photos(path, HEADLESS, labelled=None)
    assert [(photo.path.relative_to(path).parts[0], photo.label) for photo in found[::2]] == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
    ]
    (path / "loose.png").write_bytes(encoded(99))
    assert {photo.label for photo in open_photos(path, HEADLESS, labelled=None)} == {-1}


def test_a_path_is_a_folder_whatever_its_name(folder, monkeypatch):
    path = folder(PLAIN)
    path.rename(path.with_name("wds"))
    monkeypatch.chdir(path.parent)
    assert len(open_photos(Path("wds/train"), SEVEN)) == len(open_photos("./wds/train", SEVEN)) == 14


@pytest.mark.parametrize(
    ("model", "names", "labels"),
    [
        (SEVEN, PLAIN, range(7)),
        (IMAGENET, ["n01440764", "n02123045", "n15075141"], (0, 281, 999)),
        (HEADLESS, ["birds", "cats", "dogs"], range(3)),
    ],
    ids=["plain", "wordnet", "no classes"],
)
@pytest.mark.parametrize("kind", ["hfds", "hfids", "torch"])
def test_data_sets_have_the_classes_of_the_model(folder, tmp_path, kind, model, names, labels):
    path, labelled = folder(names), None if model is HEADLESS else True
    if kind == "torch":
        found = open_photos("torch/folder", model, split="train", root=path, labelled=labelled)
    else:
        options = {"samples": 2 * len(names), "labelled": labelled} if kind == "hfids" else {"labelled": labelled}
        found = open_photos(f"{kind}/{path}", model, training=True, root=tmp_path / "cache", **options)
    photos = list(found.photos()) if kind == "hfids" else list(found)
    assert len(found) == len(photos) == 2 * len(names)
    for photo in photos:
        assert photo.label == list(labels)[number_in(photo.read("RGB")) // 2]
    assert Counter(photo.label for photo in photos) == dict.fromkeys(labels, 2)


@pytest.mark.parametrize("kind", ["hfds", "hfids", "torch"])
@pytest.mark.parametrize("names", [PLAIN[:6], [*PLAIN, "more"]])
def test_another_number_of_classes_is_refused(folder, tmp_path, kind, names):
    path = folder(names)
    spec, root = ("torch/folder", path) if kind == "torch" else (f"{kind}/{path}", tmp_path / "cache")
    options = {"root": root, "split": "train"} | ({"samples": 2} if kind == "hfids" else {})
    refused(
        lambda: open_photos(spec, SEVEN, **options),
        spec,
        f"{len(names)} classes ('class0' for one), but the model has 7",
    )
    assert len(open_photos(spec, SEVEN, labelled=False, **options)) == (2 if kind == "hfids" else 2 * len(names))


@pytest.mark.parametrize("kind", ["hfds", "hfids", "torch"])
def test_an_image_that_cannot_be_read_is_told_by_name_and_not_replaced(folder, tmp_path, kind):
    path = folder(PLAIN)
    (path / "train" / "class1" / "3.png").write_bytes(BROKEN)
    spec, root = ("torch/folder", path) if kind == "torch" else (f"{kind}/{path}", tmp_path / "cache")
    options = {"samples": 14} if kind == "hfids" else {}
    photos = Photos(open_photos(spec, SEVEN, split="train", root=root, **options), transform_for(SEVEN))
    read = list(in_order(photos, 14, 0))
    assert [len(batch.images) for batch in read] == [13]
    (line,) = read[0].bad
    assert ("3.png" in line or "photo 3" in line) and "not an image that can be read" in line and "\n" not in line


def test_slices_of_a_data_set_read_nothing(folder, tmp_path):
    found = open_photos(f"hfds/{folder(PLAIN)}", SEVEN, split="train", root=tmp_path / "cache")
    found.read = lambda position: pytest.fail("read")  # type: ignore[attr-defined]
    part = found[1::2]
    assert len(part) == 7 and len(part[2:4]) == 2


def test_a_file_that_is_gone_is_told(folder, tmp_path):
    path = folder(PLAIN)
    found = open_photos(f"hfds/{path}", SEVEN, split="train", root=tmp_path / "cache")
    (path / "train" / "class0" / "1.png").unlink()
    refused(lambda: found[1], "photo 1: cannot be read", kind=BadImage)
    photos = Photos(found, transform_for(SEVEN))
    assert isinstance(photos[1], BadImage) and not isinstance(photos[2], BadImage)


@pytest.mark.parametrize("kind", ["hfds", "torch"])
def test_a_photo_of_no_class_is_told_in_a_line_by_the_processes_that_read(folder, tmp_path, kind):
    path = folder(PLAIN)
    spec, root = ("torch/folder", path) if kind == "torch" else (f"{kind}/{path}", tmp_path / "cache")
    found = open_photos(spec, SEVEN, split="train", root=root)
    found.numbers = [0, 1, 2, 3, 4, 5]
    (batch,) = in_order(Photos(found, transform_for(SEVEN)), 14, 1)
    assert batch.positions.tolist() == list(range(12))
    line = f"{spec} train photo {{}}: has the label 6; expected a class index from 0 to 5"
    assert batch.bad == [line.format(12), line.format(13)]


@pytest.mark.parametrize("kind", ["hfds", "hfids", "torch", "wds"])
def test_processes_that_read_may_be_started_anew(folder, shards, tmp_path, kind):
    """As on macOS, where they get by message what they read from."""
    path = shards([5]) if kind == "wds" else folder(PLAIN)
    spec = "torch/folder" if kind == "torch" else f"{kind}/{path}"
    options = {"wds": {}, "hfids": {"samples": 14}}.get(kind, {"root": path if kind == "torch" else tmp_path / "cache"})
    photos = Photos(open_photos(spec, SEVEN, split="train", **options), transform_for(SEVEN, AUTHORS))
    sent = pickle.loads(pickle.dumps(photos))
    assert len(sent) == len(photos)
    if kind in ("hfds", "torch"):
        assert sent[3][1:] == photos[3][1:] and torch.equal(sent[3][0], photos[3][0])


def test_torchvisions_own_images(monkeypatch, tmp_path):
    class Fake:
        classes = PLAIN

        def __len__(self) -> int:
            return 3

        def __getitem__(self, position: int):
            return Image.new("L", (28, 28), position), 2 * position

    monkeypatch.setattr(opening, "create_dataset", lambda *args, **options: Fake())
    found = open_photos("torch/mnist", SEVEN, root=tmp_path)
    assert [photo.label for photo in found] == [0, 2, 4]
    assert found[2].read("RGB").getpixel((0, 0)) == (2, 2, 2)


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("hfds/{path}", {"split": "nonsense"}, ["nonsense", "cannot be opened", "train"]),
        ("hfds/nobody/nothing", {}, ["hfds/nobody/nothing", "cannot be opened"]),
        ("hfids/{path}", {"split": "train"}, ["cannot be opened", "--samples"]),
        ("torch/nothing", {"root": Path("/nonexistent")}, ["torch/nothing", "expected a set that torchvision finds"]),
        ("torch/cifar10", {"root": Path("/nonexistent")}, ["cannot be opened"]),
        ("torch/cifar10", {}, ["needs the folder it lies in", "--root"]),
        ("tfds/mnist", {}, ["tensorflow-datasets is not read"]),
        ("wds//nonexistent", {"split": "train"}, ["expected a split of its _info.json"]),
    ],
)
def test_what_cannot_be_opened_is_refused_in_a_line(folder, tmp_path, spec, options, words):
    given = spec.format(path=folder(PLAIN))
    refused(lambda: open_photos(given, SEVEN, **{"root": tmp_path / "cache", **options} if "torch" not in spec else
            options), *words)  # fmt: skip


def test_samples_are_for_streams(folder):
    refused(lambda: open_photos("hfds/x", SEVEN, samples=3), "samples=3", kind=UsageError)


@pytest.mark.parametrize(("spec", "package"), [("hfds/x", "datasets"), ("wds/x", "webdataset")])
def test_a_missing_package_is_told_with_the_command(monkeypatch, spec, package):
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    refused(lambda: open_photos(spec, SEVEN), package, "pip install 'tntprune[data]'")


# webdataset


def stream_of(root: Path, split: str = "train", **options):
    return open_photos(f"wds/{root}", SEVEN, split=split, **options)


@pytest.mark.parametrize("split", ["train", "train-{0..1}.tar|9"])
def test_shards_are_read_in_their_order(shards, split):
    found = stream_of(shards([5, 4], info=split == "train"), split)
    photos = list(found.photos())
    assert len(found) == 9 and [number_in(photo.read("RGB")) for photo in photos] == list(range(9))
    assert [photo.label for photo in photos] == [number % 7 for number in range(9)]
    assert photos[6].path.name == "0006.png" and photos[6].path.parent.name == "train-1.tar"


def test_shards_are_shuffled_by_seed_and_epoch_alone(shards, monkeypatch):
    monkeypatch.setattr("tntprune.data.streams.BUFFER", 6)
    found = stream_of(shards([5] * 8))

    def order(*key: int) -> list[int]:
        return [number_in(photo.read("RGB")) for photo in found.photos(key)]

    orders = {key: order(*key) for key in ((0, 0), (0, 1), (1, 0))}
    assert all(sorted(numbers) == list(range(40)) for numbers in orders.values())
    assert len({tuple(numbers) for numbers in orders.values()}) == 3 and list(range(40)) not in orders.values()
    assert order(0, 0) == orders[0, 0]
    assert len({number // 5 for number in orders[0, 0][:5]}) > 1  # of several shards at the same time
    assert len({order(0, epoch)[0] // 5 for epoch in range(8)}) > 2  # and it is not always the first shards that begin


def test_labels_may_lie_in_the_json(shards):
    root = shards([3], edit=lambda n, files: {"png": files["png"], "json": json.dumps({"class": n + 1}).encode()})
    info = json.loads((root / "_info.json").read_text())
    info["splits"]["train"]["alt_label"] = "class"
    (root / "_info.json").write_text(json.dumps(info))
    assert [photo.label for photo in stream_of(root).photos()] == [1, 2, 3]


def test_a_stream_must_tell_how_many_photos_it_has(shards):
    root = shards([5, 4], info=False)
    refused(lambda: stream_of(root, "train-{0..1}.tar"), "how many photos", "--samples", "|12000")
    refused(lambda: stream_of(root), "train cannot be opened", "'train-{0000..0009}.tar|12000'")
    assert len(stream_of(root, "train-{0..1}.tar", samples=9)) == 9
    assert len(list(stream_of(root, "train-{0..1}.tar", samples=4).photos())) == 4
    refused(lambda: list(stream_of(root, "train-{0..1}.tar", samples=10).photos()), "ends after 9 photos", "10")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda files: {**files, "cls": b"7"}, ["train-0.tar/0002", "has the label 7", "from 0 to 6"]),
        (lambda files: {**files, "cls": b"-1"}, ["has the label -1"]),
        (lambda files: {"png": files["png"]}, ["train-0.tar/0002", "has no label"]),
        (lambda files: {"cls": b"1", "txt": b"x"}, ["train-0.tar/0002", "has no image", "png"]),
    ],
)
def test_what_a_shard_lacks_is_told_by_name(shards, edit, words):
    found = stream_of(shards([4], edit=lambda n, files: edit(files) if n == 2 else files))
    refused(lambda: list(found.photos()), *words)
    if "has no image" not in words:
        unlabelled = open_photos(found.name.removesuffix(" train"), SEVEN, split="train", labelled=False)
        assert [photo.label for photo in unlabelled.photos()] == [-1] * 4


@pytest.mark.parametrize("damage", ["cut", "gone", "noise"])
def test_a_broken_shard_is_told(shards, damage):
    found = stream_of(root := shards([30, 30]))
    path = root / "train-1.tar"
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[: 512 * 21 + 100])
    else:
        path.write_bytes(os.urandom(5000))
    refused(lambda: list(found.photos()), f"wds/{root} train: breaks off after 3")


def photo_source(found, workers: int = 0, batch: int = 4, augmentation=LIGHT, labelled: bool = True) -> PhotoSource:
    photos = Photos(found, transform_for(SEVEN, augmentation), seed=4)
    mixer = Mixer(augmentation, 7, 0.1, 4) if augmentation.mixes else None
    return PhotoSource(photos, batch, 4, workers, labelled, augmentation.repeats, mixer)


def same(found, expected) -> bool:
    found, expected = list(found), list(expected)
    return len(found) == len(expected) and all(
        torch.equal(a, c) and (b is d is None or torch.equal(b, d))
        for (a, b), (c, d) in zip(found, expected, strict=True)
    )


@pytest.fixture
def noisy(shards):
    """Shards whose images show every change."""
    rng = np.random.default_rng(0)

    def edit(number: int, files: dict[str, bytes]) -> dict[str, bytes]:
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(file, "PNG")
        return {**files, "png": file.getvalue()}

    return stream_of(shards([7, 3, 5], edit=edit))


@pytest.mark.parametrize("augmentation", [LIGHT, AUTHORS], ids=["light", "authors"])
def test_streams_resume_with_the_batches_that_were_left_whatever_the_workers_and_the_processes(noisy, augmentation):
    source = photo_source(noisy, augmentation=augmentation)
    assert source.per_epoch == 3
    whole = list(source.batches(0, 8))
    for workers, first in ((0, 0), (0, 3), (0, 5), (2, 0), (2, 4)):
        assert same(photo_source(noisy, workers, augmentation=augmentation).batches(first, 8), whole[first:])
    halves = list(source.batches(0, 8, Share(2, (0, 1))))
    assert same(photo_source(noisy, 1, augmentation=augmentation).batches(3, 8, Share(2, (1,))), halves[7::2])
    if augmentation is LIGHT:  # the same images, in parts
        for (images, labels), one, two in zip(whole, halves[::2], halves[1::2], strict=True):
            assert torch.equal(images[::2], one[0]) and torch.equal(images[1::2], two[0])
            assert torch.equal(labels[::2], one[1]) and torch.equal(labels[1::2], two[1])


def test_an_epoch_of_a_stream_goes_once_through_it_and_repeats_if_asked(shards):
    found = stream_of(shards([6, 6]))
    steps = [labels.tolist() for _, labels in photo_source(found, labelled=True).batches(0, 6)]
    epochs = [[label for step in part for label in step] for part in (steps[:3], steps[3:])]
    expected = Counter(number % 7 for number in range(12))
    assert Counter(epochs[0]) == Counter(epochs[1]) == expected and epochs[0] != epochs[1]
    sent = []
    source = photo_source(found)
    source.repeats = 3
    source.photos.transform = lambda image: torch.tensor(number_in(image))
    for images, _ in source.batches(0, 3):
        sent += images.tolist()
    assert len(set(sent)) == 4 and sent == [number for number in dict.fromkeys(sent) for _ in range(3)]


def test_a_bad_image_in_a_shard_stops_the_training_by_name(shards):
    found = stream_of(shards([4], edit=lambda n, files: {**files, "png": BROKEN} if n == 2 else files))
    refused(lambda: list(photo_source(found).batches(0, 1)), "train-0.tar/0002.png: not an image")


WHOLE = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]  # the batches of a single process


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("streamed", [True, False])
def test_processes_that_evaluate_share_all_photos(shards, size, workers, streamed):
    found = stream_of(shards([5, 5])) if streamed else list(stream_of(shards([5, 5])).photos())
    photos, seen = Photos(found, transform_for(SEVEN)), []
    for rank in range(size):
        loader = in_order(photos, 4, workers, rank, size)
        batches = list(loader)
        assert len(loader) == len(batches)
        assert all(batch.positions.tolist() in WHOLE for batch in batches)
        for batch in batches:
            assert batch.labels.tolist() == [position % 7 for position in batch.positions.tolist()]
            seen += batch.positions.tolist()
    assert sorted(seen) == list(range(10))


def test_a_stream_of_a_data_set_is_shuffled_by_the_key(folder, tmp_path):
    found = open_photos(f"hfids/{folder(PLAIN)}", SEVEN, split="train", root=tmp_path / "cache", samples=14)

    def order(key):
        return [number_in(photo.read("RGB")) for photo in found.photos(key)]

    assert order(None) == list(range(14)) != order((0, 0)) == order((0, 0)) != order((0, 1))
    assert sorted(order((3, 1))) == list(range(14))


# Names that a data set's own files have


def index(root: Path, **changes) -> Path:
    """Change what the index says of the split."""
    info = json.loads((root / "_info.json").read_text())
    info["splits"]["train"].update(changes)
    (root / "_info.json").write_text(json.dumps(info))
    return root


@pytest.mark.parametrize("place", ["wds/{root}", "wds/{root}/.", "wds/."])
@pytest.mark.parametrize(
    "name",
    ["pipe:touch {mark}; cat {root}/train-0.tar", "|touch {mark}", "file:{other}", "{other}", "../other.tar",
     "x/../../other.tar", "link.tar", "fifo.tar", "/dev/zero", "", ".", "gone.tar", "a\0b", 3, None, ["train-0.tar"], "http://localhost:9/x.tar",
     "hf://datasets/a/b/x.tar"],
)  # fmt: skip
def test_only_plain_files_of_the_folder_are_shards(shards, monkeypatch, place, name):
    """A name such as "pipe:..." would be run as a command by webdataset, and was where the folder was "."."""
    root = shards([2, 2])
    mark, other = root / "PWNED", root.parent / "other.tar"
    other.write_bytes((root / "train-0.tar").read_bytes())
    (root / "link.tar").symlink_to(other)
    os.mkfifo(root / "fifo.tar")
    monkeypatch.chdir(root)
    known = {"root": root, "mark": mark, "other": other}
    given = name.format(**known) if isinstance(name, str) else name
    index(root, filenames=[given], shard_lengths=[2], num_samples=2)
    refused(lambda: list(open_photos(place.format(root=root), SEVEN, split="train").photos()))
    assert not mark.exists()
    index(root, filenames=["train-0.tar"], shard_lengths=[2], num_samples=2)
    assert len(list(open_photos(place.format(root=root), SEVEN, split="train").photos())) == 2


@pytest.mark.parametrize("split", ["pipe:touch PWNED; cat train-0.tar|2", "pipe:touch PWNED # ..", "/dev/zero.tar|3"])
def test_a_split_is_no_command(shards, monkeypatch, split):
    root = shards([2])
    monkeypatch.chdir(root)
    refused(lambda: list(open_photos("wds/.", SEVEN, split=split).photos()))
    refused(lambda: list(open_photos("wds/pipe:touch PWNED #", SEVEN, split="train").photos()), "no such folder")
    assert not (root / "PWNED").exists()


def test_shards_are_never_opened_by_webdataset(shards, monkeypatch):
    found = stream_of(shards([2, 2]))
    monkeypatch.setattr("webdataset.tariterators.gopen", None)
    assert len(list(found.photos())) == 4
    found.items = partial(items_of_shards, ["pipe:touch PWNED"], ["png"], "")
    refused(lambda: list(found.photos()), "breaks off after 0 photos", "No such file")


@pytest.mark.parametrize(
    "changes", [{"num_samples": v} for v in ("4", -4, 1.5, True, [4], 1e300)] + [{"alt_label": 3}, {"alt_label": None}]
)
def test_a_broken_index_is_told(shards, changes):
    root = index(shards([4]), **changes)
    refused(lambda: list(stream_of(root).photos()), str(root), "broken index")


def test_an_index_that_is_no_file_is_not_waited_for(shards):
    root = shards([2])
    (root / "_info.json").unlink()
    os.mkfifo(root / "_info.json")
    refused(lambda: stream_of(root), "_info.json: not a regular file")


@pytest.mark.parametrize("kind", ["hfds", "hfids"])
@pytest.mark.parametrize("path", ["{outside}", "../outside.png", "/dev/zero", "simplecache::{outside}", "file://{outside}",
                                  "http://localhost:9/x.png", "hf://datasets/other/set@main/x.png", "{fifo}", "zip://a.png::{outside}",
                                  "github://a:b@main/x.png", ""])  # fmt: skip
def test_a_table_names_only_files_of_its_own(tmp_path, kind, path):
    """Rows of a table may have an image by its path, and that may be any file of this machine, or an address."""
    import pyarrow
    import pyarrow.parquet

    root, outside = tmp_path / "set", tmp_path / "outside.png"
    root.mkdir()
    outside.write_bytes(encoded(1))
    (root / "own.png").write_bytes(encoded(2))
    os.mkfifo(root / "fifo.png")
    rows = [str(root / "own.png"), path.format(outside=outside, fifo=root / "fifo.png")]
    table = {"image": [{"bytes": None, "path": row} for row in rows], "label": [0, 1]}
    pyarrow.parquet.write_table(pyarrow.table(table), root / "train.parquet")
    options = {"samples": 2} if kind == "hfids" else {}
    found = open_photos(f"{kind}/{root}", SEVEN, split="train", root=tmp_path / "cache", **options)
    if kind == "hfds":
        assert number_in(found[0].read("RGB")) == 2
        refused(lambda: found[1], "photo 1: cannot be read", kind=BadImage)
    else:
        photos = found.photos()
        assert number_in(next(photos).read("RGB")) == 2
        refused(lambda: next(photos), "breaks off after 1 photos")

"""Photos from a folder, or from a data set that timm opens by its name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from timm.data import create_dataset

from tntprune.data.folders import all_photos, class_index, classes_of, labelled_photos, photos_in
from tntprune.data.images import BadImage
from tntprune.data.photo import Photo, PhotoList
from tntprune.data.streams import Stream, items_of_shards, number_of, plain_file, remote_items
from tntprune.errors import UsageError, UserError
from tntprune.methods.checks import is_int
from tntprune.system.messages import first_line

NEEDS = {"hfds": "datasets", "hfids": "datasets", "wds": "webdataset", "torch": "torchvision"}
EXPECTED = {
    "hfds": "expected a set with image and label, at hand or on the Hub",
    "hfids": "expected a set with image and label; where it does not tell how many it has, give samples (--samples)",
    "wds": "expected a split of its _info.json, or names and number, such as 'train-{0000..0009}.tar|12000'",
    "torch": "expected a set that torchvision finds in root",
}


def open_photos(
    spec: str | Path,
    model: Any,
    *,
    split: str | None = None,
    training: bool = False,
    labelled: bool | None = True,
    root: Path | None = None,
    samples: int | None = None,
) -> Sequence[Photo] | Stream:
    """Open photos by the name of a folder or of a data set.

    Args:
        spec: A folder; or "hfds/NAME", a set of Hugging Face datasets, fetched and kept; "hfids/NAME", the same, read
            from where it is photo by photo; "wds/FOLDER", tar files of webdataset; "torch/NAME", one of torchvision's.
            A `Path` is always a folder.
        model: Whose class indices the labels become.
        split: Of the data set, "train" or "validation" if not given; of a folder, the folder in it. For tar files also
            their names and the number of photos in them, such as "train-{0000..0009}.tar|12000".
        training: Which split it is if none is given.
        labelled: Whether labels are wanted; None: if there are any, see `photos_in`.
        root: Where "torch/" data lies, and where "hfds/" data is kept.
        samples: How many photos a stream has, where it does not tell.

    Returns:
        Photos that can be asked for by position, or a stream of them.

    Raises:
        UserError: there are no such photos, a package is missing, or the classes are not the model's.
        UsageError: an option is of no use there.
    """
    kind, _, name = str(spec).partition("/") if isinstance(spec, str) else ("", "", "")
    if kind == "tfds":
        raise UserError(f"{spec}: tensorflow-datasets is not read; expected a folder, hfds/NAME or wds/FOLDER")
    if kind not in NEEDS or not name:
        folder = Path(spec) if split is None else Path(spec, split)
        if root is not None or samples is not None:
            raise UsageError(f"{spec}: a folder needs no {'root' if root is not None else 'samples'}; leave it out")
        if labelled is None:
            return photos_in(folder, model)
        return labelled_photos(folder, model) if labelled else all_photos(folder)
    if samples is not None and kind not in ("hfids", "wds"):
        raise UsageError(f"samples={samples}: {kind}/ tells how many photos it has; leave it out")
    if find_spec(NEEDS[kind]) is None:
        raise UserError(f"{spec}: needs {NEEDS[kind]}; install it with: pip install 'tntprune[data]'")
    split = split or ("train" if training else "validation")
    opened = _open(str(spec), kind, name, split, root, samples)
    title = f"{spec} {split.split('|')[0]}"
    remote = opened.reader.builder.as_streaming_dataset(split=split) if kind == "hfids" else None
    numbers = None  # the model's class for each class of the data
    if labelled or (labelled is None and classes_of(model)):
        names = _names(opened if remote is None else remote)
        index = class_index(names, model, str(spec), "classes")
        numbers = [index[name] for name in names] or list(range(classes_of(model)))
    elif labelled is None:  # of a model without classes
        numbers = list(range(len(_names(opened if remote is None else remote)))) or None
    if kind == "wds":
        return _shards(opened.reader, title, numbers)
    if kind == "torch":
        return Listed(partial(_from_torch, opened), title, numbers, len(opened))
    own = _places(name, root)
    if remote is not None:
        items = partial(remote_items, title, remote, own, f"hf://datasets/{name}@")
        return Stream(title, opened.reader.num_samples, numbers, items)
    return Listed(partial(_from_table, opened.reader.dataset, own), title, numbers, len(opened))


def _open(spec: str, kind: str, name: str, split: str, root: Path | None, samples: int | None) -> Any:
    """Have timm open a data set."""
    if kind == "torch" and root is None:
        raise UserError(f"{spec}: needs the folder it lies in; give root (--root)")
    if kind == "wds":
        if not Path(name).is_dir():
            raise UserError(f"{spec}: no such folder; {EXPECTED['wds']}")
        for index in (Path(name, "_info.json"), Path(name, "info.json")):
            if index.exists() and not index.is_file():
                raise UserError(f"{index}: not a regular file; expected webdataset's index")
    where: dict[str, Any] = {"num_samples": samples} if kind in ("wds", "hfids") else {}
    logger = logging.getLogger("timm.data.readers.reader_wds")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that there is no _info.json also where the split makes up for it
    try:
        opened = create_dataset(spec, split=split, root=name if kind == "wds" else root, **where)
    except Exception as error:  # each library raises its own
        raise UserError(f"{spec}: {split} cannot be opened ({first_line(error)}); {EXPECTED[kind]}") from None
    finally:
        logger.setLevel(level)
    if kind == "wds" and not opened.reader.num_samples:
        raise UserError(
            f"{spec}: does not tell how many photos it has; expected samples (--samples), or the number in the split, "
            f"such as {split!r} with |12000 after it"
        )
    return opened


def _names(opened: Any) -> list[str]:
    """Name a data set's classes, where it has names: of torchvision, of Hugging Face, or of timm's reader."""
    features = getattr(getattr(opened, "reader", None), "dataset", opened)
    label = (getattr(features, "features", None) or {}).get("label")
    found = getattr(opened, "wnids", None) or getattr(opened, "classes", None) or getattr(label, "names", None)
    return [str(name) for name in found or []]


class Listed(PhotoList):
    """Photos of a data set, read from it when they are asked for.

    Args:
        read: From a position to an image, or its bytes, or its file, and its label; sent to the processes that read.
        title: For messages.
        numbers: The model's class for each class of the data; None where labels are not asked for.
        count: How many there are.
    """

    def __init__(
        self, read: Callable[[int], tuple[Any, Any]], title: str, numbers: list[int] | None, count: int
    ) -> None:
        self.read, self.title, self.numbers, self.length = read, title, numbers, count

    def __len__(self) -> int:
        return self.length

    def photo(self, place: int) -> Photo:
        name = f"{self.title} photo {place}"
        try:
            image, label = self.read(place)
        except Exception as error:  # files that are gone, and images that a library fails to decode
            raise BadImage(f"{name}: cannot be read ({str(error) or type(error).__name__})") from None
        try:
            number = -1 if self.numbers is None else number_of(label, self.numbers, name)
        except UserError as error:  # one of no class is left out, or stops everything, as one that cannot be read
            raise BadImage(str(error)) from None
        return Photo(image, number) if isinstance(image, Path) else Photo(Path(name), number, image)


def _from_table(table: Any, own: tuple[Path, ...], position: int) -> tuple[Any, Any]:
    item = table[position]
    image = item["image"] or {}
    content = image.get("bytes") or plain_file(str(image.get("path") or ""), own).read_bytes()
    return content, item["label"]


def _from_torch(opened: Any, position: int) -> tuple[Any, Any]:
    samples = getattr(opened, "samples", None)  # of its folders, so that it is our reader that opens the files
    return (Path(samples[position][0]), samples[position][1]) if samples else opened[position]


def _places(name: str, root: Path | None) -> tuple[Path, ...]:
    """List the folders in which the files of a set of Hugging Face datasets lie: its own folder and the caches."""
    import datasets
    import huggingface_hub

    folders = [datasets.config.HF_DATASETS_CACHE, huggingface_hub.constants.HF_HUB_CACHE]
    folders += [folder for folder in (root, name) if folder is not None and Path(folder).is_dir()]
    return tuple(Path(folder).resolve() for folder in folders)


def _shards(reader: Any, title: str, numbers: list[int] | None) -> Stream:
    """Open the shards of webdataset. Their names come from a file, so each must be a regular file in the folder."""
    info, count = reader.split_info, reader.num_samples
    if not is_int(count) or count < 1 or not isinstance(info.alt_label, str):
        raise UserError(f"{title}: a broken index; expected num_samples as a whole number and alt_label as text")
    root = Path(reader.root).resolve()
    try:
        shards = [str(plain_file(str(root / str(name)), (root,))) for name in info.filenames]
    except OSError as error:
        raise UserError(f"{title}: {error}; expected tar files in {root}") from None
    items = partial(items_of_shards, shards, reader.input_key.split(";"), info.alt_label)
    return Stream(title, count, numbers, items)

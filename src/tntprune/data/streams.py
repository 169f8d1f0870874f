"""Photos that come one after another, and cannot be asked for by number: webdataset's shards, remote data sets."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tntprune.data.photo import Photo
from tntprune.errors import UserError
from tntprune.system.messages import first_line

BUFFER = 2000  # photos among which the next one is drawn; about 200 MB of ImageNet's
Item = tuple[str, bytes, Any]  # a name, the bytes of an image, its label
Key = tuple[int, ...] | None


class Stream:
    """Photos that come one after another.

    Args:
        name: For messages.
        samples: How many there are.
        numbers: The model's class for each class of the data; None where labels are not asked for.
        items: Yields all there is, in an order that follows from a key, or with None as it lies there.
    """

    def __init__(
        self, name: str, samples: int, numbers: list[int] | None, items: Callable[[Key], Iterator[Item]]
    ) -> None:
        self.name, self.samples, self.numbers, self.items = name, samples, numbers, items

    def __len__(self) -> int:
        return self.samples

    def photos(self, key: Key = None) -> Iterator[Photo]:
        """Yield as many photos as there should be, not yet decoded, in an order that follows from the key.

        Raises:
            UserError: the stream breaks off, is too short, or a label is none of the model's classes.
        """
        items = self.items(key)
        for count in range(self.samples):
            try:
                name, data, label = next(items)
            except StopIteration:
                raise UserError(
                    f"{self.name}: ends after {count} photos and should have {self.samples}; expected the true number"
                ) from None
            except UserError:
                raise
            except Exception as error:  # what tar, the network and the libraries raise
                raise UserError(f"{self.name}: breaks off after {count} photos ({first_line(error)})") from None
            yield Photo(Path(name), -1 if self.numbers is None else number_of(label, self.numbers, name), data)


def number_of(label: Any, numbers: list[int], name: str) -> int:
    """Return the model's class for a class of the data, or raise a UserError."""
    try:
        index = int(label)
    except (TypeError, ValueError):
        raise UserError(f"{name}: has no label; expected a class index from 0 to {len(numbers) - 1}") from None
    if not 0 <= index < len(numbers):
        raise UserError(f"{name}: has the label {index}; expected a class index from 0 to {len(numbers) - 1}")
    return numbers[index]


def plain_file(path: str, folders: tuple[Path, ...]) -> Path:
    """Resolve the path of a file that a data set names, which may be anybody's: it must lie in one of some folders.

    Raises:
        OSError: it is no regular file, or lies elsewhere once links are followed.
    """
    try:
        real = Path(path).resolve()
    except (ValueError, RuntimeError) as error:  # a NUL in it, or links that lead to each other
        raise OSError(f"{path!r} is no path ({error})") from None
    if not any(real.is_relative_to(folder) for folder in folders):
        raise OSError(f"{path} lies outside of the data set, and is not opened")
    if not real.is_file():
        raise OSError(f"{path} {'is not a regular file' if real.exists() else 'does not exist'}")
    return real


def items_of_shards(shards: list[str], suffixes: list[str], field: str, key: Key) -> Iterator[Item]:
    """Yield what is in tar files of webdataset: images, by their suffixes, and their classes, in files of one name.

    The class is in the field of a .json, or in a .cls where no field is named.
    """
    from webdataset.filters import shuffle
    from webdataset.tariterators import group_by_keys, tar_file_expander

    shards, rng = list(shards), random.Random(repr(key))
    if key is not None:
        rng.shuffle(shards)
    samples = group_by_keys(tar_file_expander(_opened(shards)))
    if key is not None:
        samples = shuffle(BUFFER, initial=BUFFER, rng=rng)(samples)
    for sample in samples:
        name = f"{Path(sample['__url__']).name}/{sample['__key__']}"
        suffix = next((suffix for suffix in suffixes if suffix in sample), None)
        if suffix is None:
            raise UserError(f"{name}: has no image; expected one of {', '.join(suffixes)}")
        label = json.loads(sample.get("json", b"{}")).get(field) if field else sample.get("cls")
        yield f"{name}.{suffix}", sample[suffix], label


def _opened(shards: list[str]) -> Iterator[dict[str, Any]]:
    """Open shards as files: webdataset's own opener runs names that begin with "pipe:" as commands."""
    for shard in shards:
        with open(shard, "rb") as stream:
            yield {"url": shard, "stream": stream}


def remote_items(title: str, data: Any, folders: tuple[Path, ...], origin: str, key: Key) -> Iterator[Item]:
    """Yield what is in a set of Hugging Face datasets, read from where it is without being fetched as a whole.

    Args:
        title: For messages.
        data: datasets' IterableDataset with `image` and `label`.
        folders: Where its files lie on this machine.
        origin: What the addresses of its files on the Hub begin with.
        key: See `Stream`.
    """
    import datasets

    data = data.cast_column("image", datasets.Image(decode=False))
    if key is not None:
        data = data.shuffle(seed=random.Random(repr(key)).getrandbits(32), buffer_size=BUFFER)
    for number, sample in enumerate(data):
        image = sample["image"] or {}
        content = image.get("bytes")
        if content is None:
            content = _fetched(str(image["path"]), folders, origin)
        yield f"{title} {image.get('path') or f'photo {number}'}", content, sample.get("label")


def _fetched(path: str, folders: tuple[Path, ...], origin: str) -> bytes:
    """Read an image that is a file of its own, here, on the Hub or in a zip archive, or raise an OSError."""
    import fsspec

    *inner, outer = path.split("::")
    if any(not link.startswith("zip://") for link in inner):
        raise OSError(f"{path} is neither a file nor in a zip archive, and is not opened")
    if not outer.startswith(origin):
        outer = str(plain_file(outer, folders))
    with fsspec.open("::".join([*inner, outer])) as file:
        content: bytes = file.read()
    return content

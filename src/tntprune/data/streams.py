"""Photos that come one after another, and cannot be asked for by number: webdataset's shards, remote data sets."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tntprune.data.folders import Photo
from tntprune.errors import UserError

BUFFER = 2000  # photos among which the next one is drawn; about 200 MB of ImageNet's
Item = tuple[str, bytes, Any]  # a name, the bytes of an image, its label


class Stream(ABC):
    """Photos that come one after another.

    Args:
        name: For messages.
        samples: How many there are.
        numbers: The model's class for each class of the data; None where labels are not asked for.
    """

    def __init__(self, name: str, samples: int, numbers: list[int] | None) -> None:
        self.name, self.samples, self.numbers = name, samples, numbers

    def __len__(self) -> int:
        return self.samples

    @abstractmethod
    def items(self, key: tuple[int, ...] | None) -> Iterator[Item]:
        """All there is, in an order that follows from the key, or as it lies there."""

    def photos(self, key: tuple[int, ...] | None = None) -> Iterator[Photo]:
        """As many photos as there should be, not yet decoded.

        Args:
            key: What their order follows from; None for the order in which they lie there.

        Raises:
            UserError: the stream breaks off, is too short, or a label is none of the model's classes.
        """
        count = 0
        items = self.items(key)
        while count < self.samples:
            try:
                name, data, label = next(items)
            except StopIteration:
                raise UserError(
                    f"{self.name}: ends after {count} photos and should have {self.samples}; expected the true number"
                ) from None
            except UserError:
                raise
            except Exception as error:  # what tar, the network and the libraries raise
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise UserError(f"{self.name}: breaks off after {count} photos ({reason[:200]})") from None
            count += 1
            yield Photo(Path(name), self.label(name, label), data)

    def label(self, name: str, label: Any) -> int:
        """The model's class.

        Raises:
            UserError: there is none.
        """
        if self.numbers is None:
            return -1
        return number_of(label, self.numbers, name)


def number_of(label: Any, numbers: list[int], name: str) -> int:
    """The model's class for a class of the data.

    Raises:
        UserError: there is none.
    """
    try:
        index = int(label)
    except (TypeError, ValueError):
        raise UserError(f"{name}: has no label; expected a class index from 0 to {len(numbers) - 1}") from None
    if not 0 <= index < len(numbers):
        raise UserError(f"{name}: has the label {index}; expected a class index from 0 to {len(numbers) - 1}")
    return numbers[index]


def plain_file(path: str, folders: tuple[Path, ...]) -> Path:
    """Resolve the path of a file that a data set names, which may be anybody's: it must lie in one of the folders.

    Args:
        path: As the data set has it.
        folders: Resolved ones.

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


class Shards(Stream):
    """Tar files of webdataset: each photo is an image and its class, in files of one name.

    Args:
        name: For messages.
        samples: How many photos there are.
        numbers: See `Stream`.
        shards: Paths of tar files.
        suffixes: Of images.
        field: Of the class in a photo's .json; it is in its .cls where this is empty.
    """

    def __init__(
        self, name: str, samples: int, numbers: list[int] | None, shards: list[str], suffixes: list[str], field: str
    ) -> None:
        super().__init__(name, samples, numbers)
        self.shards, self.suffixes, self.field = shards, suffixes, field

    def items(self, key: tuple[int, ...] | None) -> Iterator[Item]:
        from webdataset.filters import shuffle
        from webdataset.tariterators import group_by_keys, tar_file_expander

        shards, rng = list(self.shards), random.Random(repr(key))
        if key is not None:
            rng.shuffle(shards)
        samples = group_by_keys(tar_file_expander(_opened(shards)))
        if key is not None:
            samples = shuffle(BUFFER, initial=BUFFER, rng=rng)(samples)
        for sample in samples:
            name = f"{Path(sample['__url__']).name}/{sample['__key__']}"
            suffix = next((suffix for suffix in self.suffixes if suffix in sample), None)
            if suffix is None:
                raise UserError(f"{name}: has no image; expected one of {', '.join(self.suffixes)}")
            label = json.loads(sample.get("json", b"{}")).get(self.field) if self.field else sample.get("cls")
            yield f"{name}.{suffix}", sample[suffix], label


def _opened(shards: list[str]) -> Iterator[dict[str, Any]]:
    """Open shards as files: webdataset's own opener runs names that begin with "pipe:" as commands."""
    for shard in shards:
        with open(shard, "rb") as stream:
            yield {"url": shard, "stream": stream}


class Remote(Stream):
    """A set of Hugging Face datasets, read from where it is without being fetched as a whole.

    Args:
        name: For messages.
        samples: How many photos there are.
        numbers: See `Stream`.
        data: datasets' IterableDataset with `image` and `label`.
        folders: Where its files lie on this machine.
        origin: What the addresses of its files on the Hub begin with.
    """

    def __init__(
        self, name: str, samples: int, numbers: list[int] | None, data: Any, folders: tuple[Path, ...], origin: str
    ) -> None:
        import datasets

        super().__init__(name, samples, numbers)
        self.folders, self.origin = folders, origin
        self.data = data.cast_column("image", datasets.Image(decode=False))

    def items(self, key: tuple[int, ...] | None) -> Iterator[Item]:
        data = self.data
        if key is not None:
            data = data.shuffle(seed=random.Random(repr(key)).getrandbits(32), buffer_size=BUFFER)
        for number, sample in enumerate(data):
            image = sample["image"] or {}
            name = f"{self.name} {image.get('path') or f'photo {number}'}"
            content = image.get("bytes")
            if content is None:
                content = self.fetch(str(image["path"]))
            yield name, content, sample.get("label")

    def fetch(self, path: str) -> bytes:
        """Read an image that the set names by its path: a file of its own, here, on the Hub or in an archive.

        Raises:
            OSError: it is none of these.
        """
        import fsspec

        *inner, outer = path.split("::")
        if any(not link.startswith("zip://") for link in inner):
            raise OSError(f"{path} is neither a file nor in a zip archive, and is not opened")
        if not outer.startswith(self.origin):
            outer = str(plain_file(outer, self.folders))
        with fsspec.open("::".join([*inner, outer])) as file:
            content: bytes = file.read()
        return content

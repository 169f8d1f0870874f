"""Photos that come one after another, and cannot be asked for by number: webdataset's shards, remote data sets."""

from __future__ import annotations

import json
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tntprune.data import Photo
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


class Shards(Stream):
    """Tar files of webdataset: each photo is an image and its class, in files of one name.

    Args:
        name: For messages.
        samples: How many photos there are.
        numbers: See `Stream`.
        shards: The tar files, or whatever else webdataset opens.
        suffixes: Of images.
        field: Of the class in a photo's .json; it is in its .cls where this is empty.
    """

    def __init__(
        self, name: str, samples: int, numbers: list[int] | None, shards: list[str], suffixes: list[str], field: str
    ) -> None:
        super().__init__(name, samples, numbers)
        self.shards, self.suffixes, self.field = shards, suffixes, field

    def items(self, key: tuple[int, ...] | None) -> Iterator[Item]:
        from webdataset import DataPipeline, SimpleShardList, tarfile_to_samples
        from webdataset.filters import shuffle

        shards, rng, mixed = list(self.shards), random.Random(repr(key)), []
        if key is not None:
            rng.shuffle(shards)
            mixed = [shuffle(BUFFER, initial=BUFFER, rng=rng)]
        for sample in DataPipeline(SimpleShardList(shards), tarfile_to_samples(), *mixed):
            name = f"{os.path.basename(sample['__url__'])}/{sample['__key__']}"  # noqa: PTH119 - it may be an address
            suffix = next((suffix for suffix in self.suffixes if suffix in sample), None)
            if suffix is None:
                raise UserError(f"{name}: has no image; expected one of {', '.join(self.suffixes)}")
            label = json.loads(sample.get("json", b"{}")).get(self.field) if self.field else sample.get("cls")
            yield f"{name}.{suffix}", sample[suffix], label


class Remote(Stream):
    """A set of Hugging Face datasets, read from where it is without being fetched as a whole.

    Args:
        name: For messages.
        samples: How many photos there are.
        numbers: See `Stream`.
        data: datasets' IterableDataset with `image` and `label`.
    """

    def __init__(self, name: str, samples: int, numbers: list[int] | None, data: Any) -> None:
        import datasets

        super().__init__(name, samples, numbers)
        self.data = data.cast_column("image", datasets.Image(decode=False))

    def items(self, key: tuple[int, ...] | None) -> Iterator[Item]:
        import fsspec

        data = self.data
        if key is not None:
            data = data.shuffle(seed=random.Random(repr(key)).getrandbits(32), buffer_size=BUFFER)
        for number, sample in enumerate(data):
            image = sample["image"] or {}
            name = f"{self.name} {image.get('path') or f'photo {number}'}"
            content = image.get("bytes")
            if content is None:
                with fsspec.open(image["path"]) as file:
                    content = file.read()
            yield name, content, sample.get("label")

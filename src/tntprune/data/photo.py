"""A photo and its class, and many of them in little memory."""

from __future__ import annotations

import hashlib
import os
import random
import stat
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from tntprune.data.images import read_image

READ = 1000  # photos whose contents are in a digest; of more, so many spread evenly


@dataclass(frozen=True)
class Photo:
    """A photo and its class.

    Args:
        path: The file; or the name, for messages, where the photo is not in a file of its own.
        label: A class index, or -1 where no labels are asked for.
        image: Its bytes or itself, where it is not in a file of its own.
    """

    path: Path
    label: int
    image: bytes | Image.Image | None = None

    def read(self, mode: Literal["RGB", "L"]) -> Image.Image:
        """Read the image, or raise `BadImage`."""
        return read_image(self.path if self.image is None else self.image, mode, name=str(self.path))


class PhotoList(Sequence[Photo]):
    """Photos that are made when they are asked for; a slice of them is no more than a list of positions."""

    @abstractmethod
    def photo(self, place: int) -> Photo:
        """Return the photo at a position from 0."""

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        return Chosen(self, place) if isinstance(place, range) else self.photo(place)


class Chosen(PhotoList):
    """The photos at some places of others."""

    def __init__(self, photos: Sequence[Photo], places: Sequence[int]) -> None:
        self.photos, self.places = photos, places

    def __len__(self) -> int:
        return len(self.places)

    def photo(self, place: int) -> Photo:
        return self.photos[self.places[place]]


class Packed(PhotoList):
    """Files and their classes, as two arrays: a list of a million photos would take ten times the memory, and that
    again in each process that reads, for counting references is writing.
    """

    def __init__(self, photos: Sequence[Photo]) -> None:
        self.names = np.array([os.fsencode(photo.path) for photo in photos], dtype=np.bytes_)
        self.labels = np.array([photo.label for photo in photos], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def photo(self, place: int) -> Photo:
        return Photo(Path(os.fsdecode(bytes(self.names[place]))), int(self.labels[place]))

    def digest(self, root: Path) -> str:
        """Return SHA-256 of names below a folder, sizes and labels of all photos, and of what is in `READ` of them."""
        found, above = hashlib.sha256(), os.fsencode(root)
        every = -(-len(self) // READ)
        for place, (name, label) in enumerate(zip(self.names.tolist(), self.labels.tolist(), strict=True)):
            size, content, file = -1, b"", Path(os.fsdecode(name))
            try:
                about = file.stat()
                size = about.st_size
                if place % every == 0 and stat.S_ISREG(about.st_mode):
                    content = file.read_bytes()
            except OSError:  # whoever reads it says so
                pass
            found.update(b"%b\0%d\0%d\0" % (name.removeprefix(above), label, size) + content)
        return found.hexdigest()


def packed(photos: Sequence[Photo]) -> Sequence[Photo]:
    """Return the same photos, in little memory where they are a list of files."""
    return Packed(photos) if isinstance(photos, list) and all(photo.image is None for photo in photos) else photos


def some_of(count: int, limit: int | None) -> list[int]:
    """Draw positions of at most `limit` of `count` photos, in order and always the same; fewer are some of more."""
    places = list(range(count))
    random.Random(0).shuffle(places)
    return sorted(places[:limit])


def limited(photos: Sequence[Photo], limit: int) -> Sequence[Photo]:
    """Return at most so many of the photos; see `some_of`."""
    places = some_of(len(photos), limit)
    return [photos[place] for place in places] if isinstance(photos, list) else Chosen(photos, places)

"""A photo and its class, and many of them in little memory."""

from __future__ import annotations

import hashlib
import os
import random
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

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
        """The image.

        Raises:
            BadImage: it cannot be read.
        """
        return read_image(self.path if self.image is None else self.image, mode, name=str(self.path))


class Packed(Sequence[Photo]):
    """Files and their classes, as three arrays: a list of a million photos would take ten times the memory, and that
    again in each process that reads, for counting references is writing.

    Args:
        photos: Each in a file of its own.
    """

    def __init__(self, photos: Sequence[Photo]) -> None:
        names = [os.fsencode(photo.path) for photo in photos]
        self.names = b"".join(names)
        self.ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self.labels = np.array([photo.label for photo in photos], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> Photo: ...

    @overload
    def __getitem__(self, index: slice) -> list[Photo]: ...

    def __getitem__(self, index: int | slice) -> Photo | list[Photo]:
        place = range(len(self))[index]
        if isinstance(place, range):
            return [self[i] for i in place]
        return Photo(Path(os.fsdecode(self.name(place))), int(self.labels[place]))

    def name(self, place: int) -> bytes:
        """The path of one file."""
        return self.names[self.ends[place - 1] if place else 0 : self.ends[place]]

    def digest(self, root: Path) -> str:
        """SHA-256 of the names, sizes and labels of all photos, and of the contents of `READ` of them.

        Args:
            root: The folder that names are taken from.
        """
        found, above = hashlib.sha256(), os.fsencode(root)
        every = -(-len(self) // READ)
        for place in range(len(self)):
            name, size, content = self.name(place), -1, b""
            try:
                about = Path(os.fsdecode(name)).stat()
                size = about.st_size
                if place % every == 0 and stat.S_ISREG(about.st_mode):
                    content = Path(os.fsdecode(name)).read_bytes()
            except OSError:  # whoever reads it says so
                pass
            found.update(b"%b\0%d\0%d\0" % (name.removeprefix(above), self.labels[place], size) + content)
        return found.hexdigest()


def packed(photos: Sequence[Photo]) -> Sequence[Photo]:
    """The same photos, in little memory where they are a list of files."""
    return Packed(photos) if isinstance(photos, list) and all(photo.image is None for photo in photos) else photos


def some_of(count: int, limit: int | None) -> list[int]:
    """Positions of at most `limit` of `count` photos, in order: drawn at random and always the same ones.

    A smaller limit gives a part of what a larger one gives; None gives all.
    """
    places = list(range(count))
    random.Random(0).shuffle(places)
    return sorted(places[:limit])


class Chosen(Sequence[Photo]):
    """Some photos of a data set, read from it when they are asked for.

    Args:
        photos: The data set.
        places: Positions in it.
    """

    def __init__(self, photos: Sequence[Photo], places: Sequence[int]) -> None:
        self.photos, self.places = photos, places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Photo: ...

    @overload
    def __getitem__(self, index: slice) -> Chosen: ...

    def __getitem__(self, index: int | slice) -> Photo | Chosen:
        if isinstance(index, slice):
            return Chosen(self.photos, self.places[index])
        return self.photos[self.places[index]]


def limited(photos: Sequence[Photo], limit: int) -> Sequence[Photo]:
    """At most so many of the photos; see `some_of`."""
    places = some_of(len(photos), limit)
    return [photos[place] for place in places] if isinstance(photos, list) else Chosen(photos, places)

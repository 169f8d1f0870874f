"""The photos of a sweep: listed once for all models, and named by a hash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from torch import nn

from tntprune.data.folders import class_index, labelled_photos
from tntprune.data.photo import Photo, some_of
from tntprune.errors import UserError
from tntprune.sweep.request import digest


class Listing:
    """The photos of a folder of class folders, listed once, with the classes of whichever model.

    Args:
        folder: With one subfolder a class.
        model: One of the models.
        limit: Take only so many, chosen at random and always the same; fewer are among those that more would be.

    Raises:
        UserError: see `labelled_photos`.
    """

    def __init__(self, folder: Path, model: nn.Module, limit: int | None = None) -> None:
        self.folder = folder
        self._read: dict[Path, bytes] = {}  # SHA-256 of contents
        paths = [photo.path for photo in labelled_photos(folder, model)]
        self.classes = sorted({path.relative_to(folder).parts[0] for path in paths})
        self.paths = [paths[place] for place in some_of(len(paths), limit)]

    def photos(self, model: nn.Module) -> list[Photo]:
        """Return them with class indices of a model."""
        index = class_index(self.classes, model, self.folder)
        return [Photo(path, index[path.relative_to(self.folder).parts[0]]) for path in self.paths]

    def digest(self, photos: list[Photo]) -> str:
        """Return the SHA-256 of their paths below the folder, in order, with their labels and contents."""
        found = hashlib.sha256()
        for photo in photos:
            name = "/".join(photo.path.relative_to(self.folder).parts)
            found.update(os.fsencode(name) + b"\0%d\0" % photo.label)
            found.update(self._content(photo.path))
        return found.hexdigest()

    def _content(self, path: Path) -> bytes:
        """Return the SHA-256 of a file, read once for all models; of one that cannot be read, nothing."""
        if path not in self._read:
            try:
                self._read[path] = digest(path).encode() if path.is_file() else b""
            except UserError:  # what is done with such a photo is decided when it is measured
                self._read[path] = b""
        return self._read[path]

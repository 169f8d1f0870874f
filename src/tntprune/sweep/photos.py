"""The photos of a sweep: listed once for all models, and named by a hash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from torch import nn

from tntprune.data import Photo, class_index, labelled_photos
from tntprune.photo import some_of


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
        paths = [photo.path for photo in labelled_photos(folder, model)]
        self.classes = sorted({self._below(path)[0] for path in paths})
        self.paths = [paths[place] for place in some_of(len(paths), limit)]

    def photos(self, model: nn.Module) -> list[Photo]:
        """Them, with class indices of a model."""
        index = class_index(self.classes, model, self.folder)
        return [Photo(path, index[self._below(path)[0]]) for path in self.paths]

    def digest(self, photos: list[Photo]) -> str:
        """SHA-256 of their paths below the folder, in order, with their labels."""
        found = hashlib.sha256()
        for photo in photos:
            found.update(os.fsencode("/".join(self._below(photo.path))) + b"\0%d\n" % photo.label)
        return found.hexdigest()

    def _below(self, path: Path) -> tuple[str, ...]:
        return path.relative_to(self.folder).parts

"""Folders of photos, and which class of the model each belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from tntprune.backbones.classnames import class_names, projects
from tntprune.data.images import find_images
from tntprune.data.photo import Photo
from tntprune.errors import UserError

SPLITS = {"test", "train", "training", "val", "valid", "validation"}  # folders of class folders


def labelled_photos(folder: Path, model: nn.Module) -> list[Photo]:
    """List the photos of a folder with one subfolder a class, with class indices of the model.

    Folders named by WordNet ids are mapped to the model's ImageNet classes, whatever their number; otherwise there must
    be exactly one folder for each class, numbered in the order of their names.

    Raises:
        UserError: the folder is missing or empty, or its subfolders are not classes of the model.
    """
    return _labelled(find_images(folder), folder, model)


def photos_in(folder: Path, model: nn.Module) -> list[Photo]:
    """List the photos of a folder, with labels unless they lie in the folder itself.

    For a model without classes the folders in it are numbered in the order of their names.

    Raises:
        UserError: see `labelled_photos`; some photos lie in the folder itself, and some in folders.
    """
    paths = find_images(folder)
    loose = [path.parent == folder for path in paths]
    if classes_of(model) and not all(loose):
        return _labelled(paths, folder, model)
    if any(loose):
        return [Photo(path, -1) for path in paths]
    names = [path.relative_to(folder).parts[0] for path in paths]
    if set(names) <= SPLITS:  # and no classes
        return [Photo(path, -1) for path in paths]
    index = {name: number for number, name in enumerate(sorted(set(names)))}
    return [Photo(path, index[name]) for path, name in zip(paths, names, strict=True)]


def _labelled(paths: Sequence[Path], folder: Path, model: nn.Module) -> list[Photo]:
    if loose := next((path for path in paths if path.parent == folder), None):
        raise UserError(f"{loose}: not in a class folder; expected {folder}/CLASS/{loose.name}")
    names = [path.relative_to(folder).parts[0] for path in paths]
    index = class_index(sorted(set(names)), model, folder)
    return [Photo(path, index[name]) for path, name in zip(paths, names, strict=True)]


def all_photos(folder: Path) -> list[Photo]:
    """List the photos anywhere under a folder, without labels."""
    return [Photo(path, -1) for path in find_images(folder)]


def class_folders(folder: Path) -> list[str]:
    """Name the class folders that have photos in them, in order."""
    parts = (path.relative_to(folder).parts for path in find_images(folder))
    return sorted({names[0] for names in parts if len(names) > 1})


def classes_of(model: Any) -> int:
    """Count the classes that a model of timm or transformers tells apart; 0 where it gives an embedding."""
    return 0 if projects(model) else int(getattr(model, "num_classes", getattr(model, "num_labels", 0)))


def class_index(
    names: list[str], model: Any, place: Path | str, what: Literal["folders", "classes"] = "folders"
) -> dict[str, int]:
    """Map class names to class indices of the model.

    Args:
        names: Of the classes, different ones.
        model: With `num_classes`, or `num_labels`.
        place: Where they are, for messages.
        what: They are, for messages.

    Raises:
        UserError: some of them are not classes of the model.
    """
    classes = classes_of(model)
    if not classes:
        raise UserError(f"{type(model).__name__} has no classes to tell apart; expected a model with a classifier")
    own = class_names(model)
    subset = infer_imagenet_subset({"num_classes": classes})
    known = {name: i for i, name in enumerate(ImageNetInfo(subset).label_names())} if subset else {}
    for index in ({name: i for i, name in reversed(list(enumerate(own)))}, known):
        if index.keys() >= set(names):
            return {name: index[name] for name in names}
    if own and set(names) & set(own):
        strange = sorted(set(names) - set(own))
        raise UserError(
            f"{place}: {len(strange)} of {len(names)} {what} are no class of the model, {strange[0]!r} for one; "
            f"expected some of those that it was trained on, such as {own[0]!r}"
        )
    unknown = [name for name in names if name not in known]
    if len(names) == classes and len(unknown) == len(names):
        return {name: i for i, name in enumerate(names)}
    kind = "class folders" if what == "folders" else what
    if splits := sorted(SPLITS & set(names)):
        raise UserError(
            f"{place}: {' and '.join(splits)} are not class folders; expected {Path(place) / splits[-1]}, for example"
        )
    if not subset or len(unknown) == len(names):
        ids = f"names that are WordNet ids of {subset}, or " if subset else ""
        raise UserError(
            f"{place}: {len(names)} {kind} ({names[0]!r} for one), but the model has {classes} classes; expected "
            f"{ids}one for each class; or other weights, fine-tuned on these {what}"
        )
    raise UserError(
        f"{place}: {len(unknown)} of {len(names)} {what} are no class of the model, {unknown[0]!r} for one; "
        f"expected WordNet ids of {subset}"
    )

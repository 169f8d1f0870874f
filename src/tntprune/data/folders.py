"""Folders of photos, and which class of the model each belongs to."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset, resolve_model_data_config
from torch import nn
from torch.utils.data import Dataset

from tntprune.backbones.base import find_backbone
from tntprune.backbones.classnames import class_names
from tntprune.data.augment import Augmentation, fixed_randomness, mend
from tntprune.data.images import BadImage, find_images
from tntprune.data.photo import Photo as Photo
from tntprune.data.photo import packed
from tntprune.data.processor import Processor
from tntprune.errors import UsageError, UserError
from tntprune.system.distributed import count_of

if TYPE_CHECKING:
    from tntprune.data.streams import Stream


def labelled_photos(folder: Path, model: nn.Module) -> list[Photo]:
    """List the photos of a folder with one subfolder a class, with class indices of the model.

    Folders named by WordNet ids are mapped to the model's ImageNet classes, whatever their number; otherwise there must
    be exactly one folder for each class, numbered in the order of their names.

    Raises:
        UserError: the folder is missing or empty, or its subfolders are not classes of the model.
    """
    return _labelled(find_images(folder), folder, model)


def photos_in(folder: Path, model: nn.Module) -> list[Photo]:
    """List the photos of a folder, with labels unless the model has no classes or all lie in the folder itself.

    Raises:
        UserError: see `labelled_photos`; some photos lie in the folder itself, and some in folders.
    """
    paths = find_images(folder)
    if not classes_of(model) or all(path.parent == folder for path in paths):
        return [Photo(path, -1) for path in paths]
    return _labelled(paths, folder, model)


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
    return int(getattr(model, "num_classes", getattr(model, "num_labels", 0)))


def _own_names(model: Any) -> list[str]:
    names = getattr(getattr(model, "config", None), "id2label", None) or {}
    found = [str(names[number]) for number in sorted(names)]
    return class_names(model) or ([] if all(name.startswith("LABEL_") for name in found) else found)


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
    own = _own_names(model)
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
    expected = f"WordNet ids of {subset}" if subset else f"{classes} {kind}, as many as the model has"
    raise UserError(
        f"{place}: {len(unknown)} of {len(names)} {what} are no class of the model, {unknown[0]!r} for one; "
        f"expected {expected}"
    )


def transform_for(model: Any, augment: Augmentation | None = None) -> Callable[[Any], torch.Tensor]:
    """Make the model's own transform of photos: its size, crop, interpolation, mean and standard deviation.

    Of timm's models it is timm's; of those of transformers the image processor that lies beside their weights. With
    `augment` it is for training: what is done to images one by one, instead of the centre crop.

    Raises:
        UserError: there is no processor beside a model of transformers, or its images do not fit the model.
        UsageError: timm does not know the `auto_augment`.
    """
    if hasattr(model, "from_pretrained"):
        processor = Processor(model)
        if augment is None:
            return processor
        config = processor.pixels()
    else:
        size = getattr(getattr(model, "patch_embed", None), "img_size", None)  # timm's default may be another one
        config = resolve_model_data_config(model, {"input_size": (model.in_chans, *size)} if size else {})
        if augment is None:
            return create_transform(**config)  # type: ignore[no-any-return]
    try:
        transform = create_transform(
            config["input_size"], is_training=True, interpolation=config["interpolation"], mean=config["mean"],
            std=config["std"], scale=(augment.crop, 1.0), hflip=augment.hflip, auto_augment=augment.auto_augment,
            color_jitter=augment.color_jitter or None, re_prob=augment.random_erasing, re_mode="pixel",
        )  # fmt: skip
    except (AssertionError, ValueError, KeyError, IndexError):  # what timm's parser of such texts raises
        raise UsageError(
            f"auto_augment={augment.auto_augment!r}: unknown to timm; expected text such as 'rand-m9-mstd0.5-inc1'"
        ) from None
    return mend(transform)  # type: ignore[no-any-return]


class Batch(NamedTuple):
    """What a loader of `Photos` yields: images (B, C, H, W) that could be read, their labels (B,), class indices or -1,
    their positions (B,) in the list of photos, and a line for each image that could not be read.
    """

    images: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    bad: list[str]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave a process that reads through shared memory, or through the pipe where that has no room (Docker gives it
        64 MB): torch itself would fail out of sight, and the reader would wait for good.
        """
        try:
            images: Any = self.images.share_memory_()
        except RuntimeError:
            images = self.images.numpy()
        return _arrived, (images, self.labels.numpy(), self.positions.numpy(), self.bad)


def _arrived(images: Any, labels: Any, positions: Any, bad: list[str]) -> Batch:
    return Batch(torch.as_tensor(images), torch.from_numpy(labels), torch.from_numpy(positions), bad)


class Sent(NamedTuple):
    """A photo that is sent to where it is read, with what its augmentation follows from."""

    photo: Photo
    epoch: int
    position: int
    copy: int


class Photos(Dataset[Any]):
    """Photos as the model wants them. One that cannot be read comes back as its `BadImage`, out of another process too.

    Items are asked for by position, by (epoch, position), by (epoch, position, copy), or by a photo that is `Sent`; the
    transform's random choices follow from the seed and from these, not from workers or from where a job was resumed.
    """

    def __init__(
        self,
        photos: Sequence[Photo] | Stream,
        transform: Callable[[Any], torch.Tensor],
        mode: Literal["RGB", "L"] = "RGB",
        seed: int = 0,
    ) -> None:
        self.photos = packed(photos) if isinstance(photos, Sequence) else photos
        self.transform, self.mode, self.seed = transform, mode, seed

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, key: int | tuple[int, ...] | Sent) -> tuple[torch.Tensor, int, int] | BadImage:
        try:
            if isinstance(key, Sent):
                photo, epoch, position, copy = key
            else:
                assert isinstance(self.photos, Sequence)  # those of a stream are sent
                epoch, position, copy = (*key, 0)[:3] if isinstance(key, tuple) else (0, key, 0)
                photo = self.photos[position]
            image = photo.read(self.mode)
        except BadImage as bad:
            return bad
        with fixed_randomness(self.seed, epoch, position, *((copy,) if copy else ())):
            return self.transform(image), photo.label, position


def collate(items: list[tuple[torch.Tensor, int, int] | BadImage]) -> Batch:
    """Make a batch of items of `Photos`."""
    good = [item for item in items if not isinstance(item, BadImage)]
    images = torch.stack([item[0] for item in good]) if good else torch.empty(0)
    labels, positions = (torch.tensor([item[i] for item in good], dtype=torch.long) for i in (1, 2))
    return Batch(images, labels, positions, [str(item) for item in items if isinstance(item, BadImage)])


def default_workers() -> int:
    """Count the processes that read images: half the processors, at most 8, shared with the other processes that
    torchrun or accelerate launch started on this machine.
    """
    return max(1, min(8, (os.cpu_count() or 2) // 2 // count_of("LOCAL_WORLD_SIZE")))


def input_mode(model: Any) -> Literal["RGB", "L"]:
    """Say how images are read for a model."""
    channels = getattr(model, "in_chans", None)
    if channels is None and hasattr(model, "from_pretrained"):
        channels = find_backbone(model).input_size(model)[0]
    return "L" if channels == 1 else "RGB"

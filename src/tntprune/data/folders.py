"""Folders of photos, and which class of the model each belongs to."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset, resolve_model_data_config
from torch import nn
from torch.utils.data import Dataset

from tntprune.backbones.base import find_backbone
from tntprune.backbones.classnames import class_names
from tntprune.data.augment import Augmentation
from tntprune.data.images import BadImage, find_images
from tntprune.data.photo import Photo as Photo
from tntprune.data.photo import packed
from tntprune.data.posterize import mend
from tntprune.data.processor import Processor
from tntprune.errors import UsageError, UserError
from tntprune.system.distributed import count_of

if TYPE_CHECKING:
    from tntprune.data.streams import Stream


def labelled_photos(folder: Path, model: nn.Module) -> list[Photo]:
    """The photos of a folder with one subfolder a class, with class indices of the model.

    Folders named by WordNet ids are mapped to the model's ImageNet classes, whatever their number; otherwise there must
    be exactly one folder for each class, numbered in the order of their names.

    Raises:
        UserError: the folder is missing or empty, or its subfolders are not classes of the model.
    """
    return _labelled(find_images(folder), folder, model)


def photos_in(folder: Path, model: nn.Module) -> list[Photo]:
    """The photos of a folder, with labels where there are any.

    There are none where the model has no classes, or where every photo lies in the folder itself.

    Raises:
        UserError: see `labelled_photos`; some photos lie in the folder itself, and some in folders.
    """
    paths = find_images(folder)
    if not classes_of(model) or all(path.parent == folder for path in paths):
        return [Photo(path, -1) for path in paths]
    return _labelled(paths, folder, model)


def _labelled(paths: Sequence[Path], folder: Path, model: nn.Module) -> list[Photo]:
    loose = next((path for path in paths if path.parent == folder), None)
    if loose is not None:
        raise UserError(f"{loose}: not in a class folder; expected {folder}/CLASS/{loose.name}")
    names = sorted({path.relative_to(folder).parts[0] for path in paths})
    index = class_index(names, model, folder)
    return [Photo(path, index[path.relative_to(folder).parts[0]]) for path in paths]


def class_folders(folder: Path) -> list[str]:
    """The names of the class folders that have photos in them, in order.

    Raises:
        UserError: the folder is missing or empty.
    """
    parts = (path.relative_to(folder).parts for path in find_images(folder))
    return sorted({names[0] for names in parts if len(names) > 1})


def classes_of(model: Any) -> int:
    """How many classes a model of timm or transformers tells apart; 0 where it gives an embedding."""
    return int(getattr(model, "num_classes", getattr(model, "num_labels", 0)))


def _label_names(model: Any) -> list[str]:
    """The names of the classes in the config of a transformers model, in their order; none where it has no own."""
    names = getattr(getattr(model, "config", None), "id2label", None) or {}
    found = [str(names[number]) for number in sorted(names)]
    return [] if all(name.startswith("LABEL_") for name in found) else found


def class_index(
    names: list[str], model: Any, place: Path | str, what: Literal["folders", "classes"] = "folders"
) -> dict[str, int]:
    """Class names to class indices of the model.

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
    own = class_names(model) or _label_names(model)
    if own and set(names) <= set(own):
        return {name: own.index(name) for name in names}
    subset = infer_imagenet_subset({"num_classes": classes})
    known = {name: i for i, name in enumerate(ImageNetInfo(subset).label_names())} if subset else {}
    unknown = [name for name in names if name not in known]
    if not unknown:
        return {name: known[name] for name in names}
    if own and set(names) & set(own):
        strange = sorted(set(names) - set(own))
        raise UserError(
            f"{place}: {len(strange)} of {len(names)} {what} are no class of the model, {strange[0]!r} for one; "
            f"expected some of those that it was trained on, such as {own[0]!r}"
        )
    if len(names) == classes and len(unknown) == len(names):
        return {name: i for i, name in enumerate(names)}
    kind = "class folders" if what == "folders" else what
    expected = f"WordNet ids of {subset}" if subset else f"{classes} {kind}, as many as the model has"
    raise UserError(
        f"{place}: {len(unknown)} of {len(names)} {what} are no class of the model, {unknown[0]!r} for one; "
        f"expected {expected}"
    )


def all_photos(folder: Path) -> list[Photo]:
    """The photos anywhere under a folder, without labels."""
    return [Photo(path, -1) for path in find_images(folder)]


def transform_for(model: Any, augment: Augmentation | None = None) -> Callable[[Any], torch.Tensor]:
    """The model's own transform of photos: its size, crop, interpolation, mean and standard deviation.

    Of timm's models it is timm's; of those of transformers the image processor that lies beside their weights.

    Args:
        model: With timm's `pretrained_cfg`, or made by transformers' `from_pretrained`.
        augment: For training: what is done to images one by one, instead of the centre crop.

    Raises:
        UserError: there is no processor beside a model of transformers, or its images do not fit the model.
        UsageError: timm does not know the `auto_augment`.
    """
    if hasattr(model, "from_pretrained"):
        processor = Processor(model)
        if augment is None:
            return processor
        made = processor.pixels()
        config = {**made._asdict(), "input_size": (len(made.mean), *made.size)}
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
    """What a loader of `Photos` yields.

    Args:
        images: (B, C, H, W), those that could be read.
        labels: (B,), class indices or -1.
        positions: (B,), where they stand in the list of photos.
        bad: One line for each image that could not be read.
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
    """A batch that another process has read."""
    return Batch(torch.as_tensor(images), torch.from_numpy(labels), torch.from_numpy(positions), bad)


class Sent(NamedTuple):
    """A photo that is sent to where it is read, with what its augmentation follows from."""

    photo: Photo
    epoch: int
    position: int
    copy: int


class Photos(Dataset[Any]):
    """Photos as the model wants them. An image that cannot be read comes back as its `BadImage`, so that the error
    survives the way out of a worker process.

    Items are asked for by position, by (epoch, position), by (epoch, position, copy), or by a photo that is `Sent`; the
    transform's random choices follow from the seed and from these, not from workers or from where a job was resumed.

    Args:
        photos: What to read.
        transform: From a PIL image to a tensor.
        mode: "L" for models with one input channel.
        seed: For random transforms.
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
            photo, epoch, position, copy = key if isinstance(key, Sent) else self.find(key)
            image = photo.read(self.mode)
        except BadImage as bad:
            return bad
        with fixed_randomness(self.seed, epoch, position, *((copy,) if copy else ())):
            return self.transform(image), photo.label, position

    def find(self, key: int | tuple[int, ...]) -> Sent:
        """The photo that is asked for by position; never of a stream."""
        epoch, position, copy = (*key, 0)[:3] if isinstance(key, tuple) else (0, key, 0)
        assert isinstance(self.photos, Sequence)
        return Sent(self.photos[position], epoch, position, copy)


def collate(items: list[tuple[torch.Tensor, int, int] | BadImage]) -> Batch:
    """Items of `Photos` to a batch."""
    good = [item for item in items if not isinstance(item, BadImage)]
    images = torch.stack([item[0] for item in good]) if good else torch.empty(0)
    labels, positions = (torch.tensor([item[i] for item in good], dtype=torch.long) for i in (1, 2))
    return Batch(images, labels, positions, [str(item) for item in items if isinstance(item, BadImage)])


@contextmanager
def fixed_randomness(*key: int) -> Iterator[None]:
    """Python's, numpy's and torch's random choices follow from the key alone inside, and go on as before outside."""
    state, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed = random.Random(repr(key)).getrandbits(63)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # timm's RandAugment and Mixup draw from it
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPU's, for good
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numbers)


def default_workers() -> int:
    """Processes that read images: half the processors, at most 8, shared with the other processes that torchrun or
    accelerate launch started on this machine.
    """
    together = count_of("LOCAL_WORLD_SIZE")
    return max(1, min(8, (os.cpu_count() or 2) // 2 // together))


def input_mode(model: Any) -> Literal["RGB", "L"]:
    """How images are read for a model."""
    channels = getattr(model, "in_chans", None)
    if channels is None and hasattr(model, "from_pretrained"):
        channels = find_backbone(model).input_size(model)[0]
    return "L" if channels == 1 else "RGB"

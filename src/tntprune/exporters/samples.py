"""Images for calibration and for the check, and how a model wants them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_model_data_config
from torch import nn

from tntprune.backbones.base import find_backbone
from tntprune.backbones.classnames import class_names
from tntprune.data.batches import pair_in
from tntprune.data.folders import all_photos
from tntprune.data.loading import Photos, collate
from tntprune.data.photo import Photo
from tntprune.data.transforms import input_mode, transform_for
from tntprune.errors import UserError


def preprocessing(model: Any) -> dict[str, Any]:
    """Return how a photo becomes the input, as JSON values, and what the outputs are called."""
    shape = find_backbone(model).input_size(model)
    about: dict[str, Any] = {"channels": input_mode(model), "input_size": list(shape)}
    if hasattr(model, "from_pretrained"):  # transformers keeps this elsewhere
        return {**about, "preprocessing": "as the image processor that transformers has for this model"}
    config = resolve_model_data_config(model, {"input_size": shape})
    subset = infer_imagenet_subset(model)
    order = f"{subset}, ascending by WordNet id" if subset else "the model's own; photos in class folders: by name"
    return {
        **about,
        "scale": "pixels from 0 to 1, then (x - mean) / std in each channel",
        "mean": list(config["mean"]),
        "std": list(config["std"]),
        **{name: config[name] for name in ("interpolation", "crop_pct", "crop_mode")},
        "class_order": order,
    }


def class_list(model: Any) -> list[str] | None:
    """Return the names of a model's classes in the order of its logits; None where it has none or nobody named them."""
    names = class_names(model)
    if not names and (subset := infer_imagenet_subset(model)):
        told = ImageNetInfo(subset)
        names = [f"{name} {told.label_name_to_description(name)}" for name in told.label_names()]
    return names if names and len(names) == find_backbone(model).classes(model) else None


def choose_photos(folder: Path, first: int, second: int) -> tuple[list[Photo], list[Photo]]:
    """Choose photos from all over a folder for two uses, the same ones every time.

    Args:
        folder: With photos at any depth.
        first: How many for the first use.
        second: How many for the second use.

    Returns:
        The photos of each use. None has both uses: where there are too few, the first use gets a quarter of them, and
        at least one. The second use gets at least one photo, even if that is the only one, which then has both.
    """
    photos = all_photos(folder)
    order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(0)).tolist()
    if second and len(photos) < first + second:
        first = min(first, max(1, len(photos) // 4))
        second = min(second, max(1, len(photos) - first))
    return [photos[i] for i in order[:first]], [photos[i] for i in order[len(order) - second :]]


def read_photos(model: nn.Module, photos: list[Photo]) -> torch.Tensor:
    """Return photos as the model takes them, (n, C, H, W).

    Raises:
        UserError: one of them cannot be read.
    """
    dataset = Photos(photos, transform_for(model), input_mode(model))
    batch = collate([dataset[position] for position in range(len(dataset))])
    if batch.bad:
        raise UserError(batch.bad[0])
    return batch.images


def as_tensor(
    model: nn.Module, given: str | Path | torch.Tensor | Iterable[Any], count: int, least: int
) -> torch.Tensor:
    """Return images (n, C, H, W), at most `count` of them, in whole batches of `least`.

    Raises:
        UserError: there are fewer than `least`, they cannot be read, or the model does not take them.
    """
    if isinstance(given, str | Path):
        images = read_photos(model, choose_photos(Path(given), count, 0)[0])
    elif isinstance(given, torch.Tensor):
        images = given
    else:
        images = torch.cat([pair_in(item)[0] for item in given] or [torch.empty(0)])
    shape = find_backbone(model).input_size(model)
    if images.ndim != 4 or images.shape[1:] != shape:
        raise UserError(
            f"calibration images of shape {tuple(images.shape)}; expected (n, {', '.join(map(str, shape))})"
        )
    images = images[:count]
    if len(images) < least:
        raise UserError(f"{len(images)} calibration images; expected at least {least}, one batch")
    return images[: len(images) // least * least].float().cpu()

"""The embeddings of images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from tntprune.analysis.batches import photo_batches, pixel_batches
from tntprune.backbones.attach import device_of
from tntprune.backbones.base import find_backbone
from tntprune.data.folders import all_photos
from tntprune.data.photo import Photo
from tntprune.errors import UserError
from tntprune.methods.checks import check_whole


@torch.inference_mode()
def embed(
    model: nn.Module,
    images: str | Path | torch.Tensor | Sequence[Photo] | Iterable[Any],
    *,
    batch_size: int = 32,
    workers: int | None = None,
    progress: bool = True,
) -> torch.Tensor:
    """Embed images with a model, reduced or not, and keep all embeddings in memory.

    `tntprune embed` writes those of many photos into a file, and goes on after it was killed.

    Args:
        model: In eval mode, without classes: it gives one vector per image.
        images: A folder of photos, which are taken in the order of their names; or images (n, C, H, W), normalised as
            the model wants them; or a Dataset or DataLoader of images.
        batch_size: Images per batch; a DataLoader has its own.
        workers: Processes that read photos; None for half the processors.
        progress: Show a bar.

    Returns:
        The embeddings (n, D) in the order of the images, as the model gives them, in fp32 on the CPU.

    Raises:
        UserError: the images cannot be used, a photo cannot be read, an embedding is not finite, or the model has
            classes or is in training mode.
    """
    check_whole("batch_size", batch_size, 1)
    check_embeds(model)
    if isinstance(images, str | Path):
        images = all_photos(Path(images))
    if isinstance(images, list) and images and all(isinstance(item, Photo) for item in images):
        batches = photo_batches(model, images, batch_size, workers, progress, doing="embedding")
    else:
        batches = pixel_batches(model, images, None, batch_size)
        batches = iter(tqdm(batches, unit="batch", desc="embedding", disable=not progress))
    device = device_of(model)
    found = [vectors_of(model, part.to(device)).cpu() for part, _ in batches]
    if not found:
        raise UserError("no images given; expected at least one")
    return torch.cat(found)


def check_embeds(model: nn.Module) -> None:
    """Refuse a model that gives no embeddings, or none that can be told again.

    Raises:
        UserError: it has classes, or is in training mode.
    """
    if classes := find_backbone(model).classes(model):
        raise UserError(
            f"{type(model).__name__} has {classes} classes and gives logits; expected a model that gives embeddings, "
            "such as timm.create_model(..., num_classes=0)"
        )
    if model.training:
        raise UserError("the model is in training mode; expected model.eval() before images are embedded")


def vectors_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Embed one batch (B, C, H, W) that is on the model's device: (B, D) in fp32.

    Raises:
        UserError: the model gives no single vector per image, or one that is not finite.
    """
    output = find_backbone(model).output(model, images)
    check_pooled(output)
    vectors = output.float()
    if odd := int((~vectors.isfinite().all(1)).sum()):
        raise UserError(
            f"{odd} of {len(images)} embeddings are NaN or infinite; expected finite weights and images, or another "
            "precision"
        )
    return vectors


def check_pooled(output: torch.Tensor) -> None:
    """Refuse what is not one vector per image, (B, D), with a UserError."""
    if output.ndim != 2:
        raise UserError(
            f"the model gives {tuple(output.shape)}, and not one vector per image; expected one that pools its "
            "tokens, such as timm.create_model(..., global_pool='token')"
        )

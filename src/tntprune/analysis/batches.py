"""Images and labels as a model takes them, batch by batch: pixels that are there, or photos that are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from tntprune.backbones.attach import device_of
from tntprune.backbones.base import find_backbone
from tntprune.data.batches import pair_in
from tntprune.data.loading import Photos, default_workers, in_order
from tntprune.data.photo import Photo
from tntprune.data.streams import Stream
from tntprune.data.transforms import input_mode, transform_for
from tntprune.errors import UserError
from tntprune.methods.checks import check_whole
from tntprune.system.distributed import ALONE, ProcessGroup


def pixel_batches(
    model: nn.Module, data: Any, labels: torch.Tensor | None, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield images (B, C, H, W) and labels (B,) of a tensor, a Dataset or a loader, checked; see `evaluate`."""
    backbone = find_backbone(model)
    classes, dtype = backbone.classes(model), next(model.parameters()).dtype
    if isinstance(data, torch.Tensor):
        backbone.check_images(model, data)
        if labels is not None and labels.shape != data.shape[:1]:
            raise UserError(f"labels of shape {tuple(labels.shape)} for {len(data)} images; expected ({len(data)},)")
        parts = [None] * len(data) if labels is None else labels.split(batch_size)
        data = zip(data.split(batch_size), parts, strict=False)
    elif isinstance(data, Dataset):
        data = DataLoader(data, batch_size=batch_size)
    elif not isinstance(data, Iterable):
        raise UserError(f"{type(data).__name__} given; expected a folder, a tensor, a Dataset or a DataLoader")
    for item in data:
        images, own = pair_in(item)
        backbone.check_images(model, images)
        if own is None:
            own = torch.full((len(images),), -1)
        elif own.shape != images.shape[:1] or not bool(((own >= 0) & (own < (classes or torch.inf))).all()):
            known = f"classes from 0 to {classes - 1}" if classes else "whole numbers from 0"
            raise UserError(
                f"labels of shape {tuple(own.shape)}, from {own.min()} to {own.max()}, for {len(images)} images; "
                f"expected ({len(images)},), {known}"
            )
        yield images.to(dtype), own


def photo_batches(
    model: nn.Module,
    photos: Sequence[Photo] | Stream,
    batch_size: int,
    workers: int | None,
    progress: bool,
    *,
    bad: list[str] | None = None,
    group: ProcessGroup = ALONE,
    hint: str = "",
    doing: str = "evaluating",
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the images and labels of photos as a model takes them, in order, while other processes read the next ones.

    Args:
        model: Whose photos they are to be.
        photos: What to read.
        batch_size: Images at a time.
        workers: Processes that read; None for half the processors.
        progress: Show a bar.
        bad: Gets one line for each photo that cannot be read, which is left out; None refuses such photos.
        group: Processes that share the batches, which are those of a single process.
        hint: More to say of a photo that cannot be read.
        doing: What the bar says.

    Raises:
        UserError: a photo cannot be read.
    """
    workers = default_workers() if workers is None else workers
    check_whole("workers", workers, 0)
    reader = Photos(photos, transform_for(model), input_mode(model))
    loader = in_order(reader, batch_size, workers, group.rank, group.size, pin=device_of(model).type == "cuda")
    with tqdm(total=len(photos), unit="image", desc=doing, disable=not progress or not group.main) as bar:
        for batch in loader:
            if batch.bad and bad is None:
                raise UserError(f"{batch.bad[0]}{hint}")
            if bad is not None:
                bad += batch.bad
            if len(batch.images):
                yield batch.images, batch.labels
            bar.update(min(len(photos) - bar.n, (len(batch.labels) + len(batch.bad)) * group.size))

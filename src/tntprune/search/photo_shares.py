"""The photos of a search: some to search on, others to verify on, and the rest only to train on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from tntprune.backbones.base import find_backbone
from tntprune.data.datasets import open_photos
from tntprune.data.loading import Photos, default_workers, in_order
from tntprune.data.photo import Photo
from tntprune.data.streams import Stream
from tntprune.data.transforms import input_mode, transform_for
from tntprune.errors import UsageError, UserError

LEAST = 8  # photos, of which half are searched on


class Part(NamedTuple):
    """Photos in memory.

    Args:
        images: (n, C, H, W), normalised as the model wants them.
        labels: (n,), or None.
    """

    images: torch.Tensor
    labels: torch.Tensor | None

    def some(self, places: list[int] | slice) -> Part:
        """Return those at some places."""
        return Part(self.images[places], None if self.labels is None else self.labels[places])


class Shares(NamedTuple):
    """Photos by what they are for.

    Args:
        searched: Schedules are chosen on these.
        held_out: The chosen ones are verified on these, which nothing is chosen or trained on.
        training: Those that a method that learns may be trained on: all but the held-out ones.
        note: Why there are no labels, where a folder has none that the model knows.
    """

    searched: Part
    held_out: Part
    training: list[Photo] | Part
    note: str = ""


def shares(
    model: nn.Module,
    data: str | Path | torch.Tensor,
    labels: torch.Tensor | None,
    count: int,
    seed: int,
    workers: int | None = None,
    progress: bool = True,
) -> Shares:
    """Deal photos out, in an order that follows from the seed, and decode those that are looked at.

    Args:
        model: Whose transform and classes are used.
        data: A folder, or what timm's `create_dataset` opens; or images (n, C, H, W), normalised.
        labels: (n,), with a tensor of images.
        count: Photos to look at in all.
        seed: Of the order.
        workers: Processes that read.
        progress: Show a bar.

    Raises:
        UserError: there are no such photos, too few, one cannot be read, or there is not a label for each image.
        UsageError: labels without images.
    """
    photos: Sequence[Photo] = []
    note, total = "", len(data) if isinstance(data, torch.Tensor) else 0
    if not isinstance(data, torch.Tensor):
        if labels is not None:
            raise UsageError("labels go with a tensor of images; a folder's are its subfolders")
        photos, note = _listed(model, data)
        total = len(photos)
    elif labels is not None and labels.shape != data.shape[:1]:
        raise UserError(f"labels of shape {tuple(labels.shape)} for {total} images; expected ({total},)")
    if total < LEAST:
        raise UserError(f"{total} photos; expected {LEAST} or more, half to search on and half to verify on")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = order[: min(count, total)]
    half = len(chosen) // 2
    out = set(chosen[half:])
    rest = [place for place in range(total) if place not in out]
    if isinstance(data, torch.Tensor):
        given = Part(data, labels)
        return Shares(given.some(chosen[:half]), given.some(chosen[half:]), given.some(rest))
    looked = _decoded(model, [photos[place] for place in chosen], workers, progress)
    training = [photos[place] for place in rest]
    return Shares(looked.some(slice(half)), looked.some(slice(half, None)), training, note)


def _listed(model: nn.Module, data: str | Path) -> tuple[Sequence[Photo], str]:
    """List the photos, with labels where they lie in folders of the model's classes, or a note on why there are none.

    A model without classes needs no labels.
    """
    note, labelled = "", bool(find_backbone(model).classes(model))
    try:
        found = open_photos(data, model, training=True, labelled=labelled)
    except UserError as error:
        if not labelled:
            raise
        note = f"The photos were judged without labels ({str(error).partition(';')[0]})."
        found = open_photos(data, model, training=True, labelled=False)  # refuses what is no folder of photos at all
    if isinstance(found, Stream):
        raise UserError(f"{data}: a stream; expected a folder, or a data set whose photos can be asked for by number")
    return found, note


def _decoded(model: nn.Module, photos: list[Photo], workers: int | None, progress: bool) -> Part:
    reader = Photos(photos, transform_for(model), input_mode(model))
    images, labels = [], []
    with tqdm(total=len(photos), unit="photo", desc="reading", disable=not progress) as bar:
        for batch in in_order(reader, 32, default_workers() if workers is None else workers):
            if batch.bad:
                raise UserError(batch.bad[0])
            images.append(batch.images)
            labels.append(batch.labels)
            bar.update(len(batch.labels))
    answers = torch.cat(labels)
    return Part(torch.cat(images), answers if bool((answers >= 0).all()) else None)

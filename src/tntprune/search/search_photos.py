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
from tntprune.data.folders import Photo, Photos, default_workers, input_mode, transform_for
from tntprune.data.loading import in_order
from tntprune.data.streams import Stream
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
    if labels is not None and not isinstance(data, torch.Tensor):
        raise UsageError("labels go with a tensor of images; a folder's are its subfolders")
    if isinstance(data, torch.Tensor) and labels is not None and labels.shape != data.shape[:1]:
        raise UserError(f"labels of shape {tuple(labels.shape)} for {len(data)} images; expected ({len(data)},)")
    found, note = (data, "") if isinstance(data, torch.Tensor) else _listed(model, data)
    if len(found) < LEAST:
        raise UserError(f"{len(found)} photos; expected {LEAST} or more, half to search on and half to verify on")
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = order[: min(count, len(found))]
    half = len(chosen) // 2
    out = set(chosen[half:])
    rest = [place for place in range(len(found)) if place not in out]
    if isinstance(found, torch.Tensor):
        parts = [Part(found[own], None if labels is None else labels[own]) for own in (chosen[:half], chosen[half:])]
        return Shares(parts[0], parts[1], Part(found[rest], None if labels is None else labels[rest]))
    looked = _decoded(model, [found[place] for place in chosen], workers, progress)
    parts = [Part(looked.images[own], None if looked.labels is None else looked.labels[own])
             for own in (slice(half), slice(half, None))]  # fmt: skip
    return Shares(parts[0], parts[1], [found[place] for place in rest], note)


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
        note = f"The photos were judged without labels: {error}"
        found = open_photos(data, model, training=True, labelled=False)  # refuses what is no folder of photos at all
    if isinstance(found, Stream):
        raise UserError(f"{data}: a stream; expected a folder, or a data set whose photos can be asked for by number")
    return found, note


def _decoded(model: nn.Module, photos: list[Photo], workers: int | None, progress: bool) -> Part:
    reader = Photos(photos, transform_for(model), input_mode(model))
    images, labels = [], []
    bar = tqdm(total=len(photos), unit="photo", desc="reading", disable=not progress)
    with bar:
        for batch in in_order(reader, 32, default_workers() if workers is None else workers):
            if batch.bad:
                raise UserError(batch.bad[0])
            images.append(batch.images)
            labels.append(batch.labels)
            bar.update(len(batch.labels))
    answers = torch.cat(labels)
    return Part(torch.cat(images), answers if bool((answers >= 0).all()) else None)

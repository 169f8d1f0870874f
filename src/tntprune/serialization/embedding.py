"""Embed a folder of photos into a folder of embeddings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from tntprune.analysis.embed import check_embeds, vectors_of
from tntprune.backbones.attach import device_of, is_reduced, reduction_of
from tntprune.backbones.base import find_backbone
from tntprune.data.folders import all_photos
from tntprune.data.loading import Photos, default_workers, load
from tntprune.data.photo import Packed
from tntprune.data.transforms import input_mode, transform_for
from tntprune.errors import UserError
from tntprune.methods import to_dict
from tntprune.methods.checks import check_whole
from tntprune.serialization.fingerprint import digest_of
from tntprune.serialization.vectors import FILES, PIECE, VECTORS, VectorFolder, VectorType
from tntprune.system.distributed import ALONE, ProcessGroup
from tntprune.system.precision import Precision, autocast
from tntprune.system.storage import alone, make_folder


class Embedded(NamedTuple):
    """What `embed_folder` has written.

    Args:
        vectors: The array (n, D).
        files: The names of the n photos, one per line.
        images: n.
        skipped: Photos that could not be read.
        dimensions: D.
        images_per_s: Photos per second of this call, reading and writing included; None if all was there before.
        bad: A line for each photo that was skipped.
    """

    vectors: Path
    files: Path
    images: int
    skipped: int
    dimensions: int
    images_per_s: float | None
    bad: tuple[str, ...]


@torch.inference_mode()
def embed_folder(
    model: nn.Module,
    photos: Path,
    out: Path,
    *,
    name: str = "",
    dtype: VectorType = "float32",
    precision: Precision = "fp32",
    batch_size: int = 32,
    workers: int | None = None,
    on_bad_image: Literal["error", "skip"] = "error",
    group: ProcessGroup = ALONE,
    progress: bool = True,
) -> Embedded:
    """Embed all photos of a folder; killed at any moment, the same call goes on where it stopped.

    Args:
        model: In eval mode, without classes, reduced or not.
        photos: The folder, with photos anywhere in it.
        out: The folder to write: `vectors.npy`, `files.txt` and `index.json`, which says what they were made with.
        name: Of the model, for the index.
        dtype: Of the written array.
        precision: Of the forward pass.
        batch_size: Photos at a time, at most `PIECE`.
        workers: Processes that read photos; None for half the processors.
        on_bad_image: "error" stops at a photo that cannot be read; "skip" leaves it out.
        group: The processes that share the photos. The folder must be visible to all of them.
        progress: Show a bar.

    Raises:
        UserError: photos cannot be read, the folder cannot be written or holds something else, or an embedding is not
            finite or beyond the range of the dtype.
        UsageError: embeddings of other photos, or made in another way, are there; or a number is out of range.
    """
    check_whole("batch_size", batch_size, 1, PIECE)
    workers = default_workers() if workers is None else workers
    check_whole("workers", workers, 0)
    check_embeds(model)
    listed = group.agree(lambda: Packed(all_photos(photos)))
    settings = group.agree(lambda: _settings(model, name, listed, photos, dtype, precision))
    folder = VectorFolder(out, listed, photos, settings)
    with ExitStack() as stack:

        def begun() -> dict[str, Any] | list[int]:
            make_folder(out)
            stack.enter_context(alone(out))
            return folder.begin()

        state = group.agree(begun)
        begin, done = time.perf_counter(), 0
        if isinstance(state, list):
            with tqdm(
                total=len(listed), initial=len(listed) - sum(len(folder.places(piece)) for piece in state),
                unit="image", desc="embedding", disable=not progress or not group.main,
            ) as bar:  # fmt: skip
                for count in _pieces(model, folder, group.share(state), workers, batch_size, precision, on_bad_image):
                    done += count
                    bar.update(min(count * group.size, len(listed) - bar.n))
            done = sum(group.gather(done))  # and wait for all
            state = group.agree(lambda: folder.finish(on_bad_image == "skip"))
        seconds = time.perf_counter() - begin
    return Embedded(
        out / VECTORS, out / FILES, state["images"], len(state["skipped"]), state["dimensions"],
        done / seconds if done else None, tuple(state["skipped"]),
    )  # fmt: skip


def _settings(
    model: nn.Module, name: str, listed: Packed, photos: Path, dtype: VectorType, precision: Precision
) -> dict[str, Any]:
    """Return what embeddings depend on."""
    return {
        "model": name,
        "img_size": find_backbone(model).input_size(model)[1:],
        "reduction": to_dict(reduction_of(model).config) if is_reduced(model) else None,
        "dtype": dtype,
        "precision": precision,
        "photos": len(listed),
        "model_digest": digest_of(model),
        "photos_digest": listed.digest(photos),
    }


def _pieces(
    model: nn.Module,
    folder: VectorFolder,
    pieces: list[int],
    workers: int,
    batch_size: int,
    precision: Precision,
    on_bad_image: Literal["error", "skip"],
) -> Iterator[int]:
    """Embed and write some pieces, while other processes read the next photos; yield the photos of each batch."""
    device = device_of(model)
    batches = [
        [list(places[first : first + batch_size]) for first in range(0, len(places), batch_size)]
        for places in map(folder.places, pieces)
    ]
    reader = Photos(folder.photos, transform_for(model), input_mode(model))
    turns = list(chain.from_iterable(batches))
    loader = iter(load(reader, turns, min(workers, len(turns)), device.type == "cuda"))
    for piece, own in zip(pieces, batches, strict=True):
        vectors, positions, bad = [], [], []
        for keys in own:
            batch = next(loader)
            if batch.bad and on_bad_image == "error":
                raise UserError(f"{batch.bad[0]} (or leave such images out with --on-bad-image skip)")
            bad += batch.bad
            positions.append(batch.positions)
            if len(batch.images):
                with autocast(device, precision):
                    found = vectors_of(model, batch.images.to(device, non_blocking=True))
                vectors.append(found.cpu())
            yield len(keys)
        made = torch.cat(vectors) if vectors else torch.empty(0, 0)
        folder.add(piece, _stored(made, folder.settings["dtype"]), torch.cat(positions), bad)


def _stored(vectors: torch.Tensor, dtype: VectorType) -> torch.Tensor:
    """Return embeddings in the type that they are written in, or raise a UserError if it is too small for them."""
    stored = vectors.to(getattr(torch, dtype))
    if not stored.isfinite().all():
        raise UserError(f"embeddings up to {vectors.abs().max():.3g} do not fit {dtype}; expected --dtype float32")
    return stored

"""`tntprune embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from tntprune.cli.console import tell
from tntprune.cli.flags import GROUP, HostFlags, Json, Model, OnBadImage, Reduction, Workers, flag
from tntprune.system.flags import Whole, Written
from tntprune.system.messages import warn

PIECE = 512  # photos that are written at a time; see serialization/vectors.py


def embed(
    model: Model,
    photos: Annotated[tyro.conf.Positional[Path], flag("a folder of photos, with or without subfolders", "DIR")],
    out: Annotated[Path, flag("folder for vectors.npy, files.txt and index.json", "DIR"), Written()],
    reduction: Annotated[Reduction, GROUP] = Reduction(),
    host: Annotated[HostFlags, GROUP] = HostFlags(),
    dtype: Annotated[Literal["float32", "float16"], flag("type of the numbers in vectors.npy")] = "float32",
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], flag("precision of the forward pass; bf16 and fp16 by autocast")
    ] = "fp32",
    batch_size: Annotated[int, flag("photos at a time"), Whole(1, PIECE)] = 32,
    workers: Workers = None,
    on_bad_image: OnBadImage = "error",
    json: Json = False,
) -> int:
    """Write the embeddings of all photos in a folder, in the order of their names, by a model, reduced or not.

    The classifier is left off. If it is stopped, the same command goes on.

    Several processes: torchrun --nproc-per-node 8 -m tntprune embed ...
    """
    from tntprune.serialization.embedding import embed_folder
    from tntprune.system.distributed import join

    group = join(host.device)
    built = reduction.apply(host.load(model, group.device(host.device), classifier=False))
    found = embed_folder(
        built, photos, out, name=model, dtype=dtype, precision=precision, batch_size=batch_size, workers=workers,
        on_bad_image=on_bad_image, group=group,
    )  # fmt: skip
    if group.main:
        for line in found.bad:
            warn(f"skipped {line}")
        speed = "had been embedded already" if found.images_per_s is None else f"{found.images_per_s:.1f} images/s"
        told = {name: value for name, value in found._asdict().items() if name != "bad" and value is not None}
        tell(
            json,
            told,
            f"{found.images} images, {found.skipped} skipped, {found.dimensions} dimensions, {speed}: {found.vectors}",
        )
    return 3 if found.skipped else 0

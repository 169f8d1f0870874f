"""`tntprune eval`."""

from __future__ import annotations

import copy
from typing import Annotated

import tyro

from tntprune.console import (
    Device,
    ImgSize,
    Json,
    MethodName,
    Model,
    OnBadImage,
    PhotosOf,
    Reducer,
    Root,
    Samples,
    Seed,
    Split,
    Then,
    Weights,
    Workers,
    load,
    tell,
    warn,
)  # fmt: skip
from tntprune.options import MethodOptions, apply
from tntprune.units import unit_of


def evaluate(
    model: Model,
    data: PhotosOf,
    reducer: Reducer = None,
    method: MethodName = None,
    reduction: MethodOptions = MethodOptions(),
    then: Then = (),
    weights: Weights = None,
    img_size: ImgSize = None,
    device: Device = "cpu",
    split: Split = None,
    root: Root = None,
    samples: Samples = None,
    batch_size: Annotated[int, tyro.conf.arg(metavar="INT", help="photos at a time")] = 32,
    workers: Workers = None,
    on_bad_image: OnBadImage = "error",
    compare: Annotated[
        bool, tyro.conf.arg(help="also give the unpruned model's figures, batch by batch in turns")
    ] = False,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Top-1, top-5, agreement with the unpruned model, MACs and images/s."""
    import torch

    from tntprune.data import default_workers
    from tntprune.datasets import open_photos
    from tntprune.evaluate import Figures
    from tntprune.evaluate import evaluate as run
    from tntprune.reduce import is_reduced
    from tntprune.training import MAX_SEED, check_whole
    from tntprune.world import join

    workers = default_workers() if workers is None else workers
    check_whole("batch_size", batch_size, 1)
    check_whole("workers", workers, 0)
    check_whole("seed", seed, 0, MAX_SEED)
    torch.manual_seed(seed)
    world = join(device)
    loaded = load(model, weights, world.device(device), img_size)
    before = copy.deepcopy(loaded) if reducer is not None else None  # where the model was trained too, it changes
    built = apply(loaded, method, reducer, reduction, then)
    with world.main_first():
        photos = open_photos(data, built, split=split, root=root, samples=samples)
    found, bad = run(
        built, photos, batch_size=batch_size, workers=workers, on_bad_image=on_bad_image,
        compare=compare, base=before, world=world,
    )  # fmt: skip
    if not world.main:
        return 3 if found.skipped else 0
    for line in bad:
        warn(f"skipped {line}")
    rows: list[tuple[str, Figures]] = [("pruned" if is_reduced(built) else "unpruned", found)]
    if found.base is not None:
        rows.append(("unpruned", found.base))
    scale, unit = unit_of(max(figures.macs for _, figures in rows))
    lines = [
        f"{found.images} images, {found.skipped} skipped",
        f"{'':9} {'top-1':>6} {'top-5':>6} {unit:>6} {'images/s':>9}",
    ]
    lines += [f"{name:9} {f.top1:6.2f} {f.top5:6.2f} {f.macs / scale:6.2f} {f.images_per_s:9.1f}" for name, f in rows]
    lines.append(f"agrees with the unpruned model on {found.agreement:.2f} %")
    if found.speedup is not None:
        lines.append(f"{found.speedup:.2f} times as fast")
    mean = "" if all(isinstance(n, int) for n in found.tokens) else ", on average"
    lines.append(f"patch tokens entering each block{mean}: {' '.join(map(str, found.tokens))}")
    tell(json, found.to_dict(), "\n".join(lines))
    return 3 if found.skipped else 0

"""What each command does. Heavy imports happen inside, so that --help is quick."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tntprune.config import METHODS
from tntprune.console import Device, ImgSize, Json, MethodName, Model, Reducer, Seed, Then, Weights, Workers, load, tell
from tntprune.errors import UsageError, UserError
from tntprune.options import MethodOptions, apply, config_from


def demo(out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("demo"), seed: Seed = 0, json: Json = False) -> int:
    """The whole job on an embedded default, without a download: train, drop, measure, and a report.

    Args:
        out: Where report.html goes.
    """
    from dataclasses import asdict

    from tntprune.demo import demo as run
    from tntprune.trainer import MAX_SEED, check_whole

    check_whole("seed", seed, 0, MAX_SEED)
    found = run(out, seed)
    tell(json, {**asdict(found), "report": str(found.report)}, f"{found}\n\nThe report is {found.report}")
    return 0


def info(model: Model, img_size: ImgSize = None, json: Json = False) -> int:
    """Tokens, blocks, what can be applied to a model, and why not the rest. Needs no weights."""
    from tntprune.backbones.base import find_backbone
    from tntprune.counting import macs as count
    from tntprune.methods.base import implementation
    from tntprune.models import shape_of

    built = shape_of(model, img_size)
    layout = find_backbone(built).layout(built)
    obstacles = {name: implementation(config).obstacle(layout) for name, config in METHODS.items()}
    parameters = sum(p.numel() for p in built.parameters())
    data: dict[str, Any] = {
        "model": model, "family": layout.family, "parameters": parameters, "blocks": layout.depth,
        "embed_dim": layout.embed_dim, "grid": list(layout.grid), "patch_tokens": layout.patches,
        "prefix_tokens": layout.prefix, "cls_token": layout.cls, "macs": count(built).macs, "methods": obstacles,
    }  # fmt: skip
    lines = [
        f"{model}: {layout.family}, {parameters / 1e6:.1f} M parameters, {data['macs'] / 1e9:.2f} GMACs",
        f"  {layout.depth} blocks of width {layout.embed_dim}",
        f"  {layout.patches} patch tokens ({layout.grid[0]} x {layout.grid[1]}) and {layout.prefix} prefix tokens, "
        f"{'the first a CLS token' if layout.cls else 'no CLS token'}",
    ]
    lines += [f"  {name:10} {'can be applied' if why is None else 'cannot: ' + why}" for name, why in obstacles.items()]
    tell(json, data, "\n".join(lines))
    return 0


def macs(
    model: Model,
    method: MethodName = None,
    reduction: MethodOptions = MethodOptions(),
    then: Then = (),
    img_size: ImgSize = None,
    json: Json = False,
) -> int:
    """Multiply-accumulates of a model, block by block, in closed form. Needs no weights and runs nothing."""
    from dataclasses import asdict

    from tntprune.counting import macs as count
    from tntprune.models import shape_of
    from tntprune.options import configs_from
    from tntprune.reduce import reduce_

    built = shape_of(model, img_size)
    if configs := configs_from(method, reduction, then):
        reduce_(built, *configs)
    found = count(built)
    tell(json, asdict(found), str(found))
    return 0


def train(
    model: Model,
    data: Annotated[Path, tyro.conf.arg(metavar="DIR", help="photos; in class folders where the loss needs labels")],
    out: Annotated[Path, tyro.conf.arg(metavar="RUN", help="where the reducer, the log and checkpoints go")],
    method: Annotated[str, tyro.conf.arg(metavar="NAME", help="a method that learns")] = "tnt",
    reduction: MethodOptions = MethodOptions(),
    weights: Weights = None,
    img_size: ImgSize = None,
    device: Device = "cpu",
    epochs: Annotated[int, tyro.conf.arg(metavar="INT", help="passes over the photos")] = 5,
    batch_size: Annotated[int, tyro.conf.arg(metavar="INT", help="photos a step")] = 16,
    lr: Annotated[float, tyro.conf.arg(metavar="FLOAT", help="peak learning rate")] = 0.01,
    backbone_lr: Annotated[float, tyro.conf.arg(metavar="FLOAT", help="of the model itself; 0 keeps it frozen")] = 0.0,
    freeze_epochs: Annotated[int, tyro.conf.arg(metavar="INT", help="epochs before --backbone-lr begins")] = 0,
    weight_decay: Annotated[float, tyro.conf.arg(metavar="FLOAT", help="AdamW's")] = 0.0,
    label_smoothing: Annotated[
        float, tyro.conf.arg(metavar="FLOAT", help="of --objective ce; the authors' is 0.1")
    ] = 0.0,
    warmup: Annotated[float, tyro.conf.arg(metavar="FLOAT", help="share of the steps in which the rate rises")] = 0.1,
    amp: Annotated[
        Literal["auto", "none", "bf16"],
        tyro.conf.arg(help="run the model in bf16 under autocast; auto: where it is fast"),
    ] = "auto",
    seed: Seed = 0,
    workers: Workers = None,
    save_every: Annotated[int, tyro.conf.arg(metavar="STEPS", help="between checkpoints")] = 50,
    resume: Annotated[bool, tyro.conf.arg(help="continue the training in RUN")] = False,
    json: Json = False,
) -> int:
    """Train what a method learns, on a frozen model or together with it."""
    import time

    from tntprune.checkpoint import FILE
    from tntprune.reduce import device_of, reduce_
    from tntprune.runs import train_run
    from tntprune.train import needs_labels, photo_source
    from tntprune.trainer import Training

    training = Training(
        epochs, batch_size, lr, backbone_lr, freeze_epochs, weight_decay, label_smoothing, warmup, seed, amp
    )
    config = config_from(method, reduction)
    built = reduce_(load(model, weights, device, img_size), config)
    training = training.on(device_of(built))
    source = photo_source(built, data, training, needs_labels(built), workers)
    begin = time.perf_counter()
    about: dict[str, Any] = {
        "model": model, "weights": weights and str(weights.resolve()),
        "data": str(data.resolve()), "photos": len(source.photos),
    }  # fmt: skip
    if img_size is not None:
        about["img_size"] = list(img_size)
    ended = resume and (out / FILE).exists()
    path = train_run(built, source, training, out, resume=resume, save_every=save_every, about=about)
    seconds = time.perf_counter() - begin
    steps = epochs * source.per_epoch
    told = {"reducer": str(path), "photos": len(source.photos), "steps": steps, "seconds": round(seconds, 1)}
    text = f"trained {steps} steps of {batch_size} out of {len(source.photos)} photos in {seconds:.0f} s: {path}"
    tell(json, told, f"the training had ended already: {path}" if ended else text)
    return 0


def evaluate(
    model: Model,
    data: Annotated[Path, tyro.conf.arg(metavar="DIR", help="photos in class folders (WordNet ids for ImageNet)")],
    reducer: Reducer = None,
    method: MethodName = None,
    reduction: MethodOptions = MethodOptions(),
    then: Then = (),
    weights: Weights = None,
    img_size: ImgSize = None,
    device: Device = "cpu",
    batch_size: Annotated[int, tyro.conf.arg(metavar="INT", help="photos at a time")] = 32,
    workers: Workers = None,
    on_bad_image: Annotated[
        Literal["error", "skip"], tyro.conf.arg(help="stop at one, or count it and exit with 3")
    ] = "error",
    compare: Annotated[
        bool, tyro.conf.arg(help="also give the unpruned model's figures, batch by batch in turns")
    ] = False,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Top-1, top-5, agreement with the unpruned model, MACs and images/s."""
    import torch

    from tntprune.data import default_workers, labelled_photos
    from tntprune.evaluate import Figures
    from tntprune.evaluate import evaluate as run
    from tntprune.reduce import is_reduced
    from tntprune.trainer import MAX_SEED, check_whole

    workers = default_workers() if workers is None else workers
    check_whole("batch_size", batch_size, 1)
    check_whole("workers", workers, 0)
    check_whole("seed", seed, 0, MAX_SEED)
    torch.manual_seed(seed)
    loaded = load(model, weights, device, img_size)
    before = copy.deepcopy(loaded) if reducer is not None else None  # where the model was trained too, it changes
    built = apply(loaded, method, reducer, reduction, then)
    found, bad = run(
        built, labelled_photos(data, built), batch_size=batch_size, workers=workers, on_bad_image=on_bad_image,
        compare=compare, base=before,
    )  # fmt: skip
    for line in bad:
        print(f"skipped {line}", file=sys.stderr)
    rows: list[tuple[str, Figures]] = [("pruned" if is_reduced(built) else "unpruned", found)]
    if found.base is not None:
        rows.append(("unpruned", found.base))
    lines = [
        f"{found.images} images, {found.skipped} skipped",
        f"{'':9} {'top-1':>6} {'top-5':>6} {'GMACs':>6} {'images/s':>9}",
    ]
    lines += [f"{name:9} {f.top1:6.2f} {f.top5:6.2f} {f.macs / 1e9:6.2f} {f.images_per_s:9.1f}" for name, f in rows]
    lines.append(f"agrees with the unpruned model on {found.agreement:.2f} %")
    if found.speedup is not None:
        lines.append(f"{found.speedup:.2f} times as fast")
    mean = "" if all(isinstance(n, int) for n in found.tokens) else ", on average"
    lines.append(f"patch tokens entering each block{mean}: {' '.join(map(str, found.tokens))}")
    tell(json, found.to_dict(), "\n".join(lines))
    return 3 if found.skipped else 0


def show(
    model: Model,
    photos: tyro.conf.Positional[tuple[Path, ...]],
    out: Annotated[Path, tyro.conf.arg(metavar="PNG", help="the picture to write")],
    reducer: Reducer = None,
    method: MethodName = None,
    reduction: MethodOptions = MethodOptions(),
    then: Then = (),
    weights: Weights = None,
    img_size: ImgSize = None,
    device: Device = "cpu",
    each: Annotated[bool, tyro.conf.arg(help="every location on its own, as in the paper's figures")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """A sheet: each photo, and for each pruning block the kept tokens in clear and the dropped ones veiled.

    Tokens that were merged into another one are half veiled. A fused or representative token has no place to show.

    Photos are turned upright as their EXIF orientation says, and cropped as the model sees them.

    Args:
        photos: One row each.
    """
    import torch

    from tntprune.draw import photo_maps, sheet, write_picture
    from tntprune.reduce import is_reduced
    from tntprune.trainer import MAX_SEED, check_whole

    check_whole("seed", seed, 0, MAX_SEED)
    torch.manual_seed(seed)
    if out.suffix and out.suffix.lower() != ".png":
        raise UsageError(f"--out {out}: expected a file that ends in .png")
    if not photos:
        raise UsageError("no photo given; expected one or more")
    if reducer is None and method is None:
        raise UsageError("nothing to show: expected --reducer RUN, or --method random")
    built = apply(load(model, weights, device, img_size), method, reducer, reduction, then)
    if not is_reduced(built):
        raise UserError(f"{model} is not reduced")
    maps = photo_maps(built, photos, each)
    write_picture(out, sheet(maps, [path.stem[:24] for path in photos]))
    tell(
        json,
        {"picture": str(out), "photos": len(photos), "columns": list(maps[0])},
        f"{len(photos)} {'photo' if len(photos) == 1 else 'photos'}: {out}",
    )
    return 0

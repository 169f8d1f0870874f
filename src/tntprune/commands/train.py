"""`tntprune train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tntprune.console import Device, ImgSize, Json, Model, Seed, Weights, Workers, load, tell
from tntprune.options import MethodOptions, config_from


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
    from tntprune.training import Training

    training = Training(
        epochs=epochs, batch_size=batch_size, lr=lr, backbone_lr=backbone_lr, freeze_epochs=freeze_epochs,
        weight_decay=weight_decay, label_smoothing=label_smoothing, warmup=warmup, seed=seed, amp=amp,
    )  # fmt: skip
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

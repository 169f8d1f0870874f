"""The whole road at small scale: a backbone from random weights, what TNT learns on it, and fewer tokens.

python benchmarks/pretrain.py --out runs/pretrain

Writes docs/results/pretrain.md. The photos are made here: on each one coloured disc, ring, square or cross among grey ones.
Takes a few minutes of one processor.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image, ImageDraw

from stamps import written
from tntprune import Random, load_, macs, reduce_
from tntprune.analysis.evaluate import evaluate
from tntprune.backbones.models import load_model
from tntprune.data.folders import labelled_photos
from tntprune.system.environment import stamp
from tntprune.system.storage import write

COLOURS = {"blue": (40, 80, 230), "green": (40, 170, 60), "red": (220, 50, 40)}
SHAPES = ("cross", "disc", "ring", "square")
SIDE, OBJECT, CLUTTER = 128, 36, 7  # pixels, pixels, grey shapes
COUNTS = {"train": 160, "val": 40}  # a class
KEEP = (0.75, 0.5, 0.25, 0.12)
MODEL, SIZE, AT = "test_vit", ["--img-size", str(SIDE), str(SIDE)], 3
PLAIN = [
    "--crop", "0.7", "--auto-augment", "none", "--color-jitter", "0", "--random-erasing", "0",
    "--mixup", "0", "--cutmix", "0", "--repeats", "1",
]  # fmt: skip
BATCH, PARTS = 48, 3  # of vit16
STEPS = ["--epochs", "12", "--batch-size", "48", "--lr", "2e-3", "--warmup", "0.1", "--drop-path", "0", "--ema", "0.98"]


def draw(canvas: ImageDraw.ImageDraw, shape: str, colour: tuple[int, ...], corner: Any, side: int) -> None:
    """One shape in a square of `side` pixels."""
    x, y = (int(value) for value in corner)
    box, width = (x, y, x + side, y + side), side // 4
    if shape == "disc":
        canvas.ellipse(box, fill=colour)
    elif shape == "ring":
        canvas.ellipse(box, outline=colour, width=width)
    elif shape == "square":
        canvas.rectangle(box, fill=colour)
    else:
        canvas.line((x, y, x + side, y + side), fill=colour, width=width)
        canvas.line((x, y + side, x + side, y), fill=colour, width=width)


def make(folder: Path) -> None:
    """Write the photos into class folders."""
    for seed, (split, count) in enumerate(COUNTS.items()):
        generator = np.random.default_rng(seed)
        for name in (f"{colour} {shape}" for colour in COLOURS for shape in SHAPES):
            place = folder / split / name
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                image = Image.fromarray(generator.integers(90, 166, (SIDE, SIDE, 3), dtype=np.uint8))
                canvas = ImageDraw.Draw(image)
                for _ in range(CLUTTER):
                    grey = int(generator.integers(30, 226))
                    corner = generator.integers(0, SIDE - OBJECT, 2)
                    draw(canvas, str(generator.choice(SHAPES)), (grey,) * 3, corner, OBJECT)
                colour, shape = name.split()
                draw(canvas, shape, COLOURS[colour], generator.integers(0, SIDE - OBJECT, 2), OBJECT)
                image.save(place / f"{number:03}.jpg", quality=92)


def call(*arguments: Any) -> dict[str, Any]:
    """Run a command and return its output."""
    command = [sys.executable, "-m", "tntprune", *map(str, arguments), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def main(out: Path, doc: Path = Path("docs/results/pretrain.md")) -> None:
    """Run everything and write the page.

    Args:
        out: A folder for the photos and the trainings; there must be no trainings in it.
        doc: The page.
    """
    photos, backbone, reducer, vit16 = out / "photos", out / "backbone", out / "tnt", out / "vit16"
    make(photos)
    data, val = ["--data", photos / "train"], ["--val", photos / "val"]
    options = [*SIZE, *PLAIN, *STEPS]
    first = call("pretrain", MODEL, *data, *val, "--out", backbone, *options)
    weights = backbone / "model.safetensors"
    second = call(
        "train", MODEL, *SIZE, "--weights", weights, *data, "--out", reducer,
        "--method", "tnt", "--at", AT, "--epochs", 3,
    )  # fmt: skip
    small = ["--img-size", 64, 64, "--epochs", 1, "--batch-size", BATCH, "--micro-batches", PARTS]
    third = call("pretrain", "vit16", "--data", photos / "val", "--out", vit16, *small)

    model = load_model(MODEL, weights, img_size=(SIDE, SIDE))
    held_out = labelled_photos(photos / "val", model)
    whole = evaluate(model, held_out, batch_size=48, progress=False)
    rows = []
    for keep in KEEP:
        cost = macs(reduce_(model, Random(at=AT, keep=keep)))
        random = evaluate(model, held_out, batch_size=48, progress=False)
        load_(model, reducer, at=AT, keep=keep)
        tnt = evaluate(model, held_out, batch_size=48, progress=False)
        rows.append((keep, cost.tokens[-1], cost.macs / 1e6, tnt.top1, random.top1))
    write(doc, page(first, second, third, lines(backbone), lines(vit16), whole, rows).encode())
    written(doc)
    print(doc)


def page(
    first: dict[str, Any], second: dict[str, Any], third: dict[str, Any], log: list[dict[str, Any]],
    vit16: list[dict[str, Any]], whole: Any, rows: list[Any],
) -> str:  # fmt: skip
    """Write docs/results/pretrain.md."""
    judged = [line for line in log if "top1" in line]
    shown = judged[:: max(1, len(judged) // 4)]
    shown = shown if shown[-1] is judged[-1] else [*shown, judged[-1]]
    classes = first["classes"]
    table = "\n".join(
        f"| {keep} | {tokens} | {mmacs:.1f} | {tnt:.1f} | {random:.1f} |" for keep, tokens, mmacs, tnt, random in rows
    )
    epochs = "\n".join(f"| {line['epoch']} | {line['top1']:.1f} | {line['ema_top1']:.1f} |" for line in shown)
    return f"""# A backbone from random weights, at small scale

`python benchmarks/pretrain.py --out runs/pretrain` makes {first["photos"]} photos of {classes} classes, {SIDE} x {SIDE} pixels: a
coloured shape among {CLUTTER} grey ones. `tntprune pretrain` trains timm's `{MODEL}` on them from random weights
({first["steps"]} steps, {first["seconds"]:.0f} s). Top-1 on {whole.images} other photos: **{whole.top1:.1f} %** (chance: {100 / classes:.1f} %).

| epoch | top-1 | top-1 of the moving average |
|---:|---:|---:|
{epochs}

Then TNT was trained on it ({second["steps"]} steps, {second["seconds"]:.0f} s), tokens dropped after block {AT} of 6:

| keep | patch tokens | MMACs | TNT | random drop |
|---:|---:|---:|---:|---:|
| 1 | {whole.tokens[0]} | {whole.macs / 1e6:.1f} | {whole.top1:.1f} | {whole.top1:.1f} |
{table}

No comparison of methods: block, epochs and rates were chosen on these photos.

`vit16`, the paper's backbone, ran only {third["steps"]} steps of {BATCH} photos at 64 x 64 pixels in {PARTS} micro-batches, with every
augmentation: {third["seconds"]:.0f} s, losses from {vit16[0]["loss"]:.2f} to {vit16[-1]["loss"]:.2f}.

Measured on {stamp()}, beside other work.
"""


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)

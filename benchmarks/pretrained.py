"""Trains the scorers that the library ships, chooses their settings, measures them, and writes docs/pretrained.md.

python benchmarks/pretrained.py --data ../shared/data --out runs/results

Everything is chosen on the 1,000 calibration photos alone: scorers trained on 700 of them are compared on the other
300. What is shipped is then trained on all of them by `tntprune train`, which is the training "tnt" of results.py as
well. `imagenet-val-1300` is looked at once, at the end, to report. Trainings are kept in folders of their own, so that
a run resumes where it stopped.
"""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from tntprune import TNT, Random, load_, reduce_, save
from tntprune.augment import LIGHT
from tntprune.batches import PhotoSource
from tntprune.card import curve_table
from tntprune.checkpoint import FILE, made_by, read
from tntprune.config import Config
from tntprune.curve import measure_curve
from tntprune.data import Photo, Photos, collate, labelled_photos, transform_for
from tntprune.environment import stamp
from tntprune.fingerprint import TOLERANCE, full_name, identity
from tntprune.models import load_model
from tntprune.reduce import inherit, reduction_of
from tntprune.runs import train_run
from tntprune.storage import write
from tntprune.training import Training

MODEL = "vit_tiny_patch16_224"
SHIPPED = Path("src/tntprune/pretrained")
KEEP = 0.5  # of what is shipped, and the one that the similarity is chosen at
KEEPS = (0.7, 0.5, 0.25)
SIMILAR = (0, 10, 25, 40)
SEEDS = (0, 1)
TRAIN, HELD = 700, 300
Learned = dict[str, torch.Tensor]
Settings = dict[tuple[str, int, float], tuple[Config, Learned]]  # by scorers, similar tokens, share that stays
Rows = dict[str, dict[str, float]]


def trained_on_split(model: nn.Module, photos: list[Photo], out: Path, seed: int) -> Learned:
    """What scorers learn from photos, with the recipe "relative", as what is shipped is trained."""
    training = Training(epochs=5, seed=seed).on(torch.device("cpu"))
    reduce_(model, TNT(at=3, recipe="relative"))
    source = PhotoSource(Photos(photos, transform_for(model, LIGHT), seed=seed), training.batch_size, seed, 1, False)
    about = {"model": MODEL, "data": "calibration-1000", "photos": len(photos)}
    return read(train_run(model, source, training, out, resume=out.exists(), about=about))[1]


def averaged(several: list[Learned]) -> Learned:
    """Linear scorers rank alike whatever their scale and offset: their mean, each of length one, votes."""
    mean = {}
    for name in several[0]:
        lengths = [learned[name.replace("bias", "weight")].norm() for learned in several]
        mean[name] = torch.stack([own[name] / length for own, length in zip(several, lengths, strict=True)]).mean(0)
    return mean


def split(photos: list[Photo]) -> tuple[list[Photo], list[Photo]]:
    """The photos to train on, and those held out to choose on."""
    order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(0)).tolist()
    return [photos[i] for i in order[:TRAIN]], [photos[i] for i in order[TRAIN : TRAIN + HELD]]


def said(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Log-probabilities under bf16 autocast, with the head in fp32: a thousand logits in bf16 have ties."""
    with torch.autocast("cpu", torch.bfloat16):
        features = model.forward_head(model.forward_features(images), pre_logits=True)  # type: ignore[operator]
    return model.head(features.float()).log_softmax(1)  # type: ignore[operator,no-any-return]


@torch.inference_mode()
def compared(model: nn.Module, photos: list[Photo], settings: Settings) -> Rows:
    """Divergence from the unpruned model and agreement with it, of every setting on the same photos."""
    loader = DataLoader(Photos(photos, transform_for(model)), 50, num_workers=1, collate_fn=collate)
    batches = [batch.images for batch in loader]
    base = [said(model, images) for images in batches]
    found = {}
    for (scorers, similar, keep), (config, learned) in tqdm(settings.items(), unit="setting", desc="choosing"):
        own = reduce_(copy.deepcopy(model), config)
        inherit(reduction_of(own), learned)
        kl, same = 0.0, 0
        for images, wanted in zip(batches, base, strict=True):
            given = said(own, images)
            kl += float(F.kl_div(given, wanted, log_target=True, reduction="sum"))
            same += int((given.argmax(1) == wanted.argmax(1)).sum())
        found[f"{scorers} | {similar} | {keep}"] = {"kl": kl / len(photos), "agreement": 100 * same / len(photos)}
    return found


def compare(model: nn.Module, photos: list[Photo], out: Path) -> Rows:
    """The settings on the split: one training and another, their mean, and how many similar tokens go."""
    kept = out / "pretrained-choice.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    train, held = split(photos)
    runs = [trained_on_split(copy.deepcopy(model), train, out / f"pretrained-split-{seed}", seed) for seed in SEEDS]
    settings: Settings = {}
    for keep in KEEPS:
        settings["random drop", 0, keep] = (Random(at=3, keep=keep), {})
        for seed, learned in zip(SEEDS, runs, strict=True):
            settings[f"seed {seed}", 0, keep] = (TNT(at=3, keep=keep, recipe="relative"), learned)
        settings["mean of both", 0, keep] = (TNT(at=3, keep=keep, recipe="relative"), averaged(runs))
        for similar in SIMILAR[1:]:
            settings["seed 0", similar, keep] = (TNT(at=3, keep=keep, similar=similar, recipe="relative"), runs[0])
    found = compared(model, held, settings)
    write(kept, json.dumps(found, indent=1).encode())
    return found


def train(data: Path, run: Path) -> str:
    """Train what is shipped, or find that it is trained already; returns the command without this machine's paths."""
    options = ["--weights", str(data / f"{MODEL}.safetensors"), "--data", str(data / "calibration-1000" / "images")]
    command = ["train", MODEL, *options, "--method", "tnt", "--recipe", "relative", "--epochs", "5", "--out"]
    resume = ["--resume"] if run.exists() else []
    subprocess.run([sys.executable, "-m", "tntprune.cli", *command, str(run), *resume], check=True, stdout=sys.stderr)
    return "tntprune " + shlex.join(command).replace(str(data), "DATA") + " RUN"


def ship(data: Path, run: Path, command: str, similar: int) -> Path:
    """Put what was trained where the package has it, with the settings that were chosen and how it came about."""
    model = load_(load_model(MODEL, data / f"{MODEL}.safetensors"), run, keep=KEEP, similar=similar)
    note = json.loads(made_by(run / FILE)[0])
    about = {
        "command": command, "script": "benchmarks/pretrained.py", "model": MODEL, "photos": note["photos"],
        "data": "NIPS 2017 development set (CC BY 2.0)", "training": note["training"],
    }  # fmt: skip
    return save(model, SHIPPED / full_name(identity(model)), json.dumps(about))


def main(data: Path, out: Path, page: Path = Path("docs/pretrained.md")) -> None:
    """Everything.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: Where trainings go.
        page: The page to write.
    """
    out.mkdir(parents=True, exist_ok=True)
    model = load_model(MODEL, data / f"{MODEL}.safetensors")
    rows = compare(model, labelled_photos(data / "calibration-1000" / "images", model), out)
    similar = min(SIMILAR, key=lambda count: rows[f"seed 0 | {count} | {KEEP}"]["kl"])
    command = train(data, out / "tnt")
    seconds = float(json.loads((out / "tnt" / "log.jsonl").read_text().splitlines()[-1])["seconds"])
    file = ship(data, out / "tnt", command, similar)
    reduce_(model, "pretrained")  # as a user does, so that what is measured is what is shipped
    curve = measure_curve(model, data / "imagenet-val-1300")
    chosen = "\n".join(f"| {name} | {row['kl']:.3f} | {row['agreement']:.1f} |" for name, row in rows.items())
    text = PAGE.format(
        name=full_name(identity(model)), size=file.stat().st_size, command=command, seconds=seconds, similar=similar,
        keep=KEEP, table=curve_table(curve), images=curve.images, chosen=chosen, train=TRAIN, held=HELD,
        tolerance=f"{TOLERANCE:.0%}", stamp=stamp(),
    )  # fmt: skip
    write(page, text.encode())


PAGE = """# Scorers that come with the library

TNT scorers for `{name}`, {size:,} bytes:

```python
model = timm.create_model("{name}", pretrained=True).eval()
tntprune.reduce_(model, "pretrained")  # half of the patch tokens after block 3
tntprune.reduce_(model, "pretrained", keep=0.7)  # every option that needs no other training can be changed
```

and `--reducer pretrained` in every command that takes a reducer.

A model is recognised by its name in timm and by the norms of four of its matrices, which have to be within
{tolerance}: copies in half precision and with another head pass, random weights are refused. The weights that the
scorers were trained with had no name of their own; they are almost certainly timm's of that name, which the scorers
say they are for.

## Measured

On {images:,} labelled photos of the ImageNet-1k validation set, a subset: compare rows with each other, not with
published accuracies. In fp32. Agreement is with the unpruned model. What each rate gains in speed is in
[the results](results.md), whose rows "TNT" use the same training with 25 similar tokens removed.

{table}

Written by `python benchmarks/pretrained.py --data ../shared/data --out runs/results` on {stamp}.

## How they were trained

In {seconds:.0f} s on two cores, on 1,000 photos (the NIPS 2017 development set, CC BY 2.0) without their labels:

```
{command}
```

## What was chosen, and on what

Scorers trained on {train} of the 1,000 photos were compared on the other {held}, by their mean divergence from the
unpruned model. The mean of two trainings is not better than each of them at every rate, so that one is shipped as it
was trained. {similar} similar tokens go because that diverges least at `keep={keep}`; {held} photos can hardly tell it
from the others, though.

| scorers | similar | keep | divergence | agreement % |
|---|---:|---:|---:|---:|
{chosen}
"""


if __name__ == "__main__":
    tyro.cli(main)

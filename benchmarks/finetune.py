"""What fine-tuning the model under its reduction adds: nothing, head, norms, low-rank changes, everything.

python benchmarks/finetune.py --data ../shared/data --out runs/finetune --choose
python benchmarks/finetune.py --data ../shared/data --out runs/finetune

With --choose all is trained on every second calibration photo and judged by the others, which is where rates and
epochs come from, and a table is printed. Without it all is trained on all of them, judged once by imagenet-val-1300,
and the table goes into the page. Each training and each figure is kept, so that the script goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

from stamps import written
from tntprune import TNT, load_, macs, reduce_
from tntprune.analysis.evaluate import evaluate
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.models import load_model
from tntprune.cli.options import config_from_text
from tntprune.data.folders import labelled_photos
from tntprune.data.images import find_images
from tntprune.methods import to_dict
from tntprune.system.environment import stamp
from tntprune.system.storage import make_folder, write
from tntprune.training.config import Training
from tntprune.training.recipes import Recipe
from tntprune.training.run_folder import ended
from tntprune.training.runs import train_folder

MODEL = "vit_tiny_patch16_224"
SETTINGS = ("tnt at=3 keep=0.35", "tnt at=3 keep=0.25")
KINDS = ("frozen", "head", "norms", "lowrank", "all")
START, END = "<!-- measured -->", "<!-- /measured -->"


def halves(photos: Path, out: Path) -> tuple[Path, Path]:
    """Two folders of links: every second photo of each class folder by turns, and the others."""
    for number, path in enumerate(sorted(find_images(photos))):
        link = out / ("learn", "judge")[number % 2] / path.relative_to(photos)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(path.resolve())
    return out / "learn", out / "judge"


class Bench:
    """The photos, the scorers and what is kept of each training."""

    def __init__(self, data: Path, out: Path, choose: bool, scorers: str | None, options: dict[str, Any]) -> None:
        self.weights, self.options = data / f"{MODEL}.safetensors", options
        self.out = out / ("choose" if choose else "final")
        photos = data / "calibration-1000" / "images"
        self.learn, judge = halves(photos, out) if choose else (photos, data / "imagenet-val-1300")
        make_folder(self.out)
        self.judge = labelled_photos(judge, self.model())
        self.scorers = scorers or str(self.out / "scorers")

    def model(self) -> nn.Module:
        return load_model(MODEL, self.weights)

    def calibrate(self) -> None:
        """Train TNT's scorers, unless they are there."""
        out = Path(self.scorers)
        if self.scorers == str(self.out / "scorers") and not ended(out):
            recipe = Recipe(TNT(at=3), Training(epochs=5, amp=self.options.get("amp", "auto")))
            train_folder(reduce_(self.model(), recipe.config), self.learn, out, recipe, resume=out.exists())

    def reduced(self, setting: str) -> nn.Module:
        """Return a model under one setting: TNT with the scorers, anything else as it is."""
        config = config_from_text(setting)
        if not config.must_train:
            return reduce_(self.model(), config)
        given = [pair.partition("=")[0].replace("-", "_") for pair in setting.split()[1:]]
        return load_(self.model(), self.scorers, **{name: getattr(config, name) for name in given})

    def unpruned(self) -> float:
        """Measure the top-1 of the whole model."""
        file = self.out / "unpruned.json"
        if not file.exists():
            write(file, json.dumps(evaluate(self.model(), self.judge).top1).encode())
        return float(json.loads(file.read_text()))

    def row(self, setting: str, kind: str, rate: float | None) -> dict[str, Any]:
        """Train under one setting and return its figures; a training that has ended is not repeated."""
        other = [f"{key}={value}" for key, value in self.options.items() if value != getattr(Training, key)]
        name = "-".join([setting.replace(" ", "-"), kind, *([f"{rate:g}"] if rate else []), *other])
        file, run = self.out / f"{name}.json", self.out / name
        if file.exists():
            return json.loads(file.read_text())  # type: ignore[no-any-return]
        model, seconds = self.reduced(setting), 0.0
        cost = macs(model).macs / 1e9
        if kind != "frozen":
            training = Training(unfreeze=kind, backbone_lr=rate or 0.0, **self.options)  # type: ignore[arg-type]
            recipe = Recipe(reduction_of(model).config, training)
            seconds = train_folder(model, self.learn, run, recipe, resume=run.exists()).seconds
            model = load_(self.model(), run)
        base = self.model()
        found = evaluate(model, self.judge, base=base)
        row = {
            "setting": setting, "kind": kind, "rate": rate, "top1": found.top1, "agreement": found.agreement,
            "images": found.images, "gmacs": cost, "seconds": seconds, "config": to_dict(reduction_of(model).config),
            "options": self.options,
        }  # fmt: skip
        write(file, json.dumps(row).encode())
        print(f"{setting:22} {kind:8} {rate or 'default':8} {found.top1:6.2f} {found.agreement:6.2f} {seconds:5.0f} s")
        return row


def table(rows: Sequence[dict[str, Any]], unpruned: float) -> str:
    """Lay the rows out as a table; `unpruned` is the top-1 of the whole model."""
    shown = [
        f"| `{row['setting']}` | {row['gmacs']:.3f} | {row['kind']} | {row['top1']:.2f} | {row['agreement']:.2f} | "
        f"{row['seconds']:.0f} s |"
        for row in rows
    ]
    head = ["| reduction | GMACs | what learns | top-1 | agrees with the unpruned model | training |"]
    whole = f"| none | | | {unpruned:.2f} | 100.00 | |"
    return "\n".join([*head, "|---|---:|---|---:|---:|---:|", whole, *shown])


def main(
    data: Path,
    out: Path,
    choose: bool = False,
    scorers: str | None = None,
    settings: tuple[str, ...] = SETTINGS,
    kinds: tuple[str, ...] = KINDS,
    rates: tuple[float, ...] = (),
    epochs: int = 3,
    amp: str = "auto",
    doc: Path = Path("docs/results/finetune.md"),
) -> None:
    """Train, judge, and print the table or write it into the page.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: For the trainings.
        choose: Judge by half of the calibration photos, and write no page.
        scorers: A run to begin with, or "pretrained"; without it TNT's scorers are trained first.
        settings: Methods with their options, as `tntprune sweep` takes them.
        kinds: What learns.
        rates: Of learning, to try; without any the defaults.
        epochs: Of each fine-tuning.
        amp: Precision of the trainings.
        doc: The page.
    """
    options: dict[str, Any] = {"epochs": epochs, "amp": amp}
    bench = Bench(data, out, choose, scorers, options)
    if any(config_from_text(setting).must_train for setting in settings):
        bench.calibrate()
    unpruned = bench.unpruned()
    rows = [
        bench.row(setting, kind, rate)
        for setting in settings
        for kind in kinds
        for rate in ((None,) if kind == "frozen" else rates or (None,))
    ]
    text = table(rows, unpruned)
    print(text)
    if not choose:
        before, rest = doc.read_text().split(START)
        words = (
            f"Written by `python benchmarks/finetune.py`: {epochs} epochs of {len(find_images(bench.learn))} "
            f"calibration photos, judged by {len(bench.judge)} photos of `imagenet-val-1300`. {stamp()}."
        )
        write(doc, f"{before}{START}\n{words}\n\n{text}\n{END}{rest.split(END)[1]}".encode())
        written(doc)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)

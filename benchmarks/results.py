"""Every method on a real model: trains what learns, evaluates every row, and writes docs/results/comparison.md.

python benchmarks/results.py --data ../shared/data --out runs/results

Each training and each row is kept in a file of its own, so that it resumes where it stopped. Accuracy does not depend
on what else the machine does; speed does, and is measured on its own at the end, each row in turns with the unpruned
model. `--only speed` times the rows again beside the accuracies of the page, without a training: a method that keeps a
fixed number of tokens takes the same time untrained. A-ViT, where each token halts by itself, is left out.
"""

from __future__ import annotations

import copy
import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import tyro
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from stamps import written
from tntprune import (
    ATS,
    TNT,
    AViT,
    DynamicViT,
    EViT,
    EvoViT,
    Random,
    ToMe,
    TopK,
    ZeroTPrune,
    load_,
    macs,
    reduce_,
    restore_,
)  # fmt: skip
from tntprune.analysis.evaluate import Tally
from tntprune.backbones.models import load_model
from tntprune.data.folders import labelled_photos
from tntprune.data.loading import Photos, collate
from tntprune.data.transforms import input_mode, transform_for
from tntprune.methods import Config, options, to_dict
from tntprune.search.fitted import fitted
from tntprune.system.clock import keep_memory
from tntprune.system.environment import stamp
from tntprune.system.precision import exact_head_
from tntprune.system.storage import write

MODEL = "vit_tiny_patch16_224"
KEEP = (0.8, 0.7, 0.6, 0.5, 0.35, 0.25)  # after block 3
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4)  # of the unpruned model's MACs, over several blocks
ITSELF = "each token by itself"  # A-ViT as published
BATCH, SPEED_BATCHES = 32, 3
README = Path(__file__).parents[1] / "README.md"

# Without the loss on tokens, perhaps because it rewards keeping those that hardly change: on a split of the calibration
# photos, keep .5, it gave 69 % (3 epochs), leaving it out 81 % (2 epochs), and random drop 77 %.
DYNAMIC = ["--method", "dynamicvit", "--lr", "1e-2", "--token-weight", "0"]
TRAININGS: dict[str, list[str]] = {  # options of `tntprune train`; chosen on a split of the calibration photos
    "tnt": ["--method", "tnt", "--at", "3", "--noise-blocks", "3", "4", "5", "--epochs", "5"],
    "tnt-dropping": ["--method", "tnt", "--recipe", "relative", "--epochs", "5"],
    "tnt-paper": ["--method", "tnt", "--recipe", "paper", "--epochs", "5"],
    "dynamicvit": [*DYNAMIC, "--epochs", "2"],
    "dynamicvit-tuned": [*DYNAMIC, "--epochs", "2", "--backbone-lr", "1e-5", "--freeze-epochs", "1"],
    "evit-tuned": ["--method", "evit", "--backbone-lr", "2e-5", "--epochs", "3"],
    "avit": ["--method", "avit", "--gate-center", "10", "--epochs", "2"],
    "avit-tuned": ["--method", "avit", "--gate-center", "10", "--backbone-lr", "2e-5", "--epochs", "3"],
}


@dataclass(frozen=True)
class Entry:
    """One method as one line of each table.

    Args:
        name: As the tables say it.
        single: Its config that leaves a share after block 3.
        several: Its config over several blocks, at a share of its own.
        training: Which of TRAININGS it takes.
        note: Where it acts, with several blocks.
    """

    name: str
    single: Callable[[float], Config]
    several: Callable[[float], Config]
    training: str | None = None
    note: str = "3, 4, 5"


def entries() -> list[Entry]:
    """Return every method, each as its paper has it, but for the place of the single location."""
    three = (3, 4, 5)

    def dropping(k: float) -> Config:
        return TNT(at=3, keep=k, similar=25, recipe="relative")

    def dropping_several(k: float) -> Config:
        return TNT(at=three, keep=k, similar=40, recipe="relative")

    def paper(k: float) -> Config:
        return TNT(at=3, keep=k, similar=25, recipe="paper")

    def paper_several(k: float) -> Config:
        return TNT(at=three, keep=k, similar=40, recipe="paper")

    def evit(k: float) -> Config:
        return EViT(at=3, keep=k, inside=False)

    def dynamic(k: float) -> Config:
        return DynamicViT(at=3, keep=k)

    def halting(k: float) -> Config:
        return AViT(at=3, keep=k)

    def halting_several(k: float) -> Config:
        return AViT(at=three, keep=k)

    return [
        Entry("TNT", lambda k: TNT(at=3, keep=k), lambda k: TNT(at=three, keep=k), "tnt"),
        Entry("TNT, dropping", dropping, dropping_several, "tnt-dropping"),
        Entry("TNT, paper's recipe", paper, paper_several, "tnt-paper"),
        Entry("random drop", lambda k: Random(at=3, keep=k), lambda k: Random(at=three, keep=k)),
        Entry("Top-K", lambda k: TopK(at=3, keep=k, inside=False), lambda k: TopK(at=three, keep=k)),
        Entry("EViT", evit, lambda k: EViT(keep=k), None, "4, 7, 10"),
        Entry("EViT, fine-tuned", evit, lambda k: EViT(keep=k), "evit-tuned", "4, 7, 10"),
        Entry("DynamicViT", dynamic, lambda k: DynamicViT(keep=k), "dynamicvit", "3, 6, 9"),
        Entry("DynamicViT, fine-tuned", dynamic, lambda k: DynamicViT(keep=k), "dynamicvit-tuned", "3, 6, 9"),
        Entry("ToMe", lambda k: ToMe(at=3, keep=k, inside=False), lambda k: ToMe(keep=k), None, "all"),
        Entry(
            "Zero-TPrune",
            lambda k: ZeroTPrune(at=3, keep=k, similar=25, beyond=False),
            lambda k: ZeroTPrune(keep=k),
            None,
            "1, 3, 6, 9, 11",
        ),
        Entry("ATS", lambda k: ATS(at=3, keep=k), lambda k: ATS(keep=k), None, "4 to 12"),
        Entry("A-ViT", halting, halting_several, "avit"),
        Entry("A-ViT, fine-tuned", halting, halting_several, "avit-tuned"),
        Entry("Evo-ViT", lambda k: EvoViT(at=3, keep=k), lambda k: EvoViT(keep=k), None, "4, 8"),
    ]


@dataclass(frozen=True)
class Row:
    """One setting of one method."""

    entry: Entry | None
    config: Config | None
    where: str

    @property
    def slug(self) -> str:
        """Its name as a file name."""
        name = "unpruned" if self.entry is None else f"{self.entry.name} {self.where}"
        return "".join(c if c.isalnum() else "-" for c in name.lower())


def rows(model: nn.Module) -> list[Row]:
    """Return all rows, the unpruned model first."""
    base = macs(model).macs
    found = [Row(None, None, "")]
    for entry in entries():
        found += [Row(entry, entry.single(keep), f"{keep}") for keep in KEEP]
        for share in SHARES:
            found.append(Row(entry, fitted(model, entry.several, share * base), f"{share} of the MACs"))
        if entry.training in ("avit", "avit-tuned"):
            found.append(Row(entry, AViT(gate_center=10.0), ITSELF))
    return found


class Bench:
    """The model, the photos and what the unpruned model says of them, loaded once."""

    def __init__(self, data: Path, out: Path, untrained: bool) -> None:
        self.out, self.untrained = out, untrained
        self.model = load_model(MODEL, data / f"{MODEL}.safetensors", "cpu").eval()
        self.base = copy.deepcopy(self.model)
        for model in (self.model, self.base):
            exact_head_(model)
        self.plain = copy.deepcopy(self.model.state_dict())
        photos = labelled_photos(data / "imagenet-val-1300", self.model)
        reader = Photos(photos, transform_for(self.model), input_mode(self.model))
        loader = DataLoader(reader, BATCH, num_workers=2, collate_fn=collate)
        self.batches = [(batch.images, batch.labels) for batch in tqdm(loader, desc="reading", unit="batch")]
        self.guesses: list[torch.Tensor] = []
        self.unpruned = Tally(self.base)  # for speed; it warms up once

    def reduced(self, row: Row) -> nn.Module:
        """Return the model of a row."""
        restore_(self.model)
        self.model.load_state_dict(self.plain)
        if row.entry is None or row.config is None:
            return self.model
        if row.entry.training is None:
            return reduce_(self.model, row.config)
        run = self.out / row.entry.training
        if self.untrained:
            return reduce_(self.model, row.config)
        kind = type(row.config)  # what it learned stays as it was trained, all else is as the row says
        chosen = {n: getattr(row.config, n) for n, entry in options(kind).items() if not entry.metadata["learned"]}
        return load_(self.model, run, **chosen)

    @torch.inference_mode()
    def accuracy(self, row: Row) -> dict[str, Any]:
        """Measure top-1, agreement and MACs."""
        tally, same = Tally(self.reduced(row)), 0
        with torch.autocast("cpu", torch.bfloat16):
            if not self.guesses:
                self.guesses = [self.base(images).argmax(1) for images, _ in self.batches]
            for (images, labels), guess in zip(self.batches, self.guesses, strict=True):
                same += int((tally.run(images, labels) == guess).sum())
        found = tally.figures()
        left = tally.tokens()[-1]
        return {"top1": found.top1, "agreement": 100 * same / tally.images, "macs": found.macs, "tokens": left}

    @torch.inference_mode()
    def speed(self, row: Row) -> dict[str, Any]:
        """Images/s, and the median ratio to the unpruned model, in turns on the same batches."""
        own, base = Tally(self.reduced(row)), self.unpruned
        first = len(base.pace)
        keep_memory(torch.device("cpu"))
        own.variable = False  # it counts its tokens with a second pass, which has nothing to do with speed
        for number, batch in enumerate(self.batches[:SPEED_BATCHES]):
            for tally in (own, base) if number % 2 else (base, own):
                tally.run(*batch)
        ratio = median(b / a for a, b in zip(own.pace, base.pace[first:], strict=True))
        return {"images_per_s": 1 / median(own.pace), "speedup": ratio}


def train(data: Path, out: Path) -> None:
    """Run the trainings that have not ended."""
    for name, chosen in TRAININGS.items():
        run = out / name
        command = [
            sys.executable, "-m", "tntprune", "train", MODEL, "--weights", str(data / f"{MODEL}.safetensors"),
            "--data", str(data / "calibration-1000" / "images"), *chosen, "--out", str(run),
        ]  # fmt: skip
        tqdm.write(f"training {name}", file=sys.stderr)  # one that has ended, with the same options, ends at once
        subprocess.run([*command, *(["--resume"] if run.exists() else [])], check=True, stdout=sys.stderr)


def remembered(path: Path, row: Row, find: Callable[[Row], dict[str, Any]]) -> dict[str, Any]:
    """Read a file of the same config; else measure with `find`, and write the file."""
    config = None if row.config is None else json.loads(json.dumps(to_dict(row.config)))
    training = TRAININGS.get(row.entry.training or "") if row.entry is not None else None
    settings = {"config": config, "training": training}
    if path.exists():
        data = dict(json.loads(path.read_text()))
        if data.pop("settings", None) == settings:
            return data
    found = find(row)
    write(path, json.dumps({"settings": settings, **found}).encode())
    return found


def published(page: Path, plan: list[Row]) -> tuple[dict[str, dict[str, Any]], str]:
    """Read the accuracies that lie beside a page, by row, and the line that says when they were measured."""
    with open(page.with_suffix(".csv"), newline="") as file:
        lines = {(line["method"], line["setting"]): line for line in csv.DictReader(file)}
    found = {}
    for row in plan:
        line = lines["unpruned" if row.entry is None else row.entry.name, row.where]
        found[row.slug] = {name: float(line[name]) for name in ("top1", "agreement", "macs")}
    told = re.search(r"^Accuracy: (.*)\.$", page.read_text(), re.MULTILINE)
    if told is None:
        raise SystemExit(f"{page}: no line 'Accuracy: ...'; expected a page that this script wrote")
    return found, told[1]


def main(
    data: Path,
    out: Path,
    page: Path = Path("docs/results/comparison.md"),
    only: Literal["all", "accuracy", "speed"] = "all",
    backwards: bool = False,
) -> None:
    """Measure every row and write the page.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: Where trainings and results go.
        page: The page to write.
        only: "accuracy" measures no speed and writes no page, for a busy machine; "speed" keeps the page's accuracies.
        backwards: Take the rows from the last to the first, beside a process that takes them from the first.
    """
    out.mkdir(parents=True, exist_ok=True)
    if only != "speed":
        train(data, out)
    bench = Bench(data, out, untrained=only == "speed")
    plan = rows(copy.deepcopy(bench.model))
    found, when = published(page, plan) if only == "speed" else ({}, stamp())
    if only != "speed":
        for row in tqdm(plan[::-1] if backwards else plan, unit="row", desc="accuracy"):
            found[row.slug] = remembered(out / f"{row.slug}.json", row, bench.accuracy)
    if only == "accuracy":
        return
    timed = [row for row in plan if row.where != ITSELF or only != "speed"]
    for row in tqdm(timed, unit="row", desc="speed"):
        found[row.slug] |= remembered(out / f"{row.slug}-speed.json", row, bench.speed)
    write(page, text(plan, found, when).encode())
    write(page.with_suffix(".csv"), table_of_rows(plan, found).encode())
    fill_readme(readme(plan, found))
    written(page)


def overview(plan: list[Row], found: dict[str, Any], settings: list[str]) -> str:
    """Lay out top-1 and speed-up of every method over the settings, the best top-1 of each in bold."""
    lines = [f"| method | {' | '.join(settings)} |", f"|---|{'---:|' * len(settings)}"]
    named: dict[str, dict[str, dict[str, Any]]] = {}
    for row in plan:
        if row.entry is not None and row.where in settings:
            named.setdefault(row.entry.name, {})[row.where] = found[row.slug]
    best = {where: max(cells[where]["top1"] for cells in named.values()) for where in settings}
    for name, cells in named.items():
        told = []
        for where in settings:
            top1 = f"{cells[where]['top1']:.1f}"
            told.append(
                f"{f'**{top1}**' if cells[where]['top1'] == best[where] else top1} ({cells[where]['speedup']:.2f})"
            )
        lines.append(f"| {name} | {' | '.join(told)} |")
    return "\n".join(lines)


def itself(plan: list[Row], found: dict[str, Any]) -> str:
    """A-ViT where each token halts by itself."""
    told = []
    for row in plan:
        if row.where == ITSELF and row.entry is not None:
            one = found[row.slug]
            faster = f", {one['speedup']:.2f} times as fast" if "speedup" in one else ""
            told.append(f"{row.entry.name}: top-1 {one['top1']:.1f}, {one['macs'] / 1e9:.2f} GMACs{faster}")
    return "; ".join(told)


def table_of_rows(plan: list[Row], found: dict[str, Any]) -> str:
    """Lay every row out as CSV."""
    lines = ["method,setting,top1,agreement,macs,speedup,images_per_s"]
    for row in plan:
        one, name = found[row.slug], "unpruned" if row.entry is None else row.entry.name
        pace = f"{one['speedup']:.3f},{one['images_per_s']:.1f}" if "speedup" in one else ","
        figures = f"{one['top1']:.2f},{one['agreement']:.2f},{one['macs']:.0f},{pace}"
        lines.append(f'"{name}","{row.where}",{figures}')
    return "\n".join(lines) + "\n"


def readme(plan: list[Row], found: dict[str, Any]) -> str:
    """Lay out the README's table: five methods that keep a half and a quarter of the tokens after block 3."""
    base = found["unpruned"]
    lines = [
        "| patch tokens after block 3 | keep 50 %: top-1 | speed-up | keep 25 %: top-1 | speed-up |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name in ("TNT", "ToMe", "EViT", "DynamicViT", "random drop"):
        own = {row.where: found[row.slug] for row in plan if row.entry is not None and row.entry.name == name}
        half, quarter = own["0.5"], own["0.25"]
        title = f"**{name}**" if name == "TNT" else name
        lines.append(
            f"| {title} | {half['top1']:.1f} | {half['speedup']:.2f} | {quarter['top1']:.1f} | {quarter['speedup']:.2f} |"
        )
    told = (
        f"`{MODEL}` on 1,300 photos of the ImageNet validation set; unpruned top-1 {base['top1']:.1f} %. Each patch token is "
        "one square of 16 x 16 pixels. Only the scorers of TNT and DynamicViT were trained, on 1,000 other photos; the "
        f"model's weights did not change. Speed on two CPU cores, batch {BATCH}, fp32: differences below a tenth are noise."
    )
    return "\n".join([*lines, "", f"{told} [All methods, and at equal MACs](docs/results/comparison.md)."])


def fill_readme(text: str) -> None:
    """Put the table between the README's marks."""
    start, end = "<!-- results: written by benchmarks/results.py -->", "<!-- end of results -->"
    before, rest = README.read_text().split(start)
    write(README, f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}".encode())


def text(plan: list[Row], found: dict[str, Any], when: str) -> str:
    """Write the page."""
    single, several = [f"{keep}" for keep in KEEP], [f"{share} of the MACs" for share in SHARES]
    at: dict[str, list[str]] = {}
    for entry in entries():
        if (name := entry.name.split(",")[0]) not in at.setdefault(entry.note, []):
            at[entry.note].append(name)
    places = "; ".join(f"{', '.join(names)} {note}" for note, names in at.items())
    base = found["unpruned"]
    return PAGE.format(
        top1=base["top1"], gmacs=f"{base['macs'] / 1e9:.3f}", single=overview(plan, found, single),
        several=overview(plan, found, several), itself=itself(plan, found), places=places, stamp=stamp(), when=when,
    )  # fmt: skip


PAGE = (
    """# Comparison of methods

`{{model}}` with real weights on 1,300 labelled photos of the ImageNet-1k validation set. Unpruned: top-1 {top1:.1f} %, {gmacs} GMACs.
This is a subset: compare rows with each other, not with published accuracies.
Trainable methods were trained on 1,000 other photos in one to four minutes. "Fine-tuned" methods trained the whole model; the
others left it frozen.

Written by `python benchmarks/results.py --data ../shared/data --out runs/results`; with `--only speed` it times all rows again.

Accuracy: {when}.

Speed: {stamp}.

Cells are top-1 and, in brackets, the speed-up. All rows with agreement, MACs and images/s are in `docs/results/comparison.csv`.

## One location: by the share of patch tokens kept after block 3

{single}

## Several locations: by MACs

Each method acts at the blocks of its own paper ({places}). Its rates are scaled to the budget by bisection.

{several}

## Notes

* **TNT** is the library's default, which merges. "TNT, dropping" is `recipe="relative"`, "paper's recipe" the authors' own.
  Plans of `tntprune search` give more at the same MACs: [TNT in detail](tnt.md).
* **ATS and A-ViT** keep a different number of tokens per image. MACs are the mean over the images. ATS counts draws, so fewer
  tokens stay. A-ViT halts a fixed number of tokens here. With its own halting: {itself}.
* **Training is short.** The papers train for 30 to 100 epochs of ImageNet. One training serves all rows of a method.
* **Speed-up** is the median ratio to the unpruned model on the same {{batches}} batches of {{batch}}, in turns, fp32. Differences
  below a tenth are noise. Accuracy is
  measured under bf16 autocast with the head in fp32.
""".replace("{{model}}", MODEL)
    .replace("{{batches}}", str(SPEED_BATCHES))
    .replace("{{batch}}", str(BATCH))
)


if __name__ == "__main__":
    tyro.cli(main)

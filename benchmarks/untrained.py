"""Methods that need no training beside trained TNT, on a real model: docs/results/untrained.md.

python benchmarks/untrained.py --data ../shared/data --out runs/untrained

Each row is kept in a file of its own, so that it resumes where it stopped.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from results import fitted
from stamps import written
from tntprune import (
    ATC,
    MCTF,
    TNT,
    DiffRate,
    EViT,
    PiToMe,
    Random,
    ToFu,
    ToMe,
    TopK,
    ZeroTPrune,
    load_,
    macs,
    reduce_,
    restore_,
)
from tntprune.backbones.models import load_model
from tntprune.data.folders import labelled_photos
from tntprune.data.loading import Photos, collate
from tntprune.data.transforms import transform_for
from tntprune.methods import Config
from tntprune.system.clock import in_turns
from tntprune.system.environment import stamp
from tntprune.system.storage import write

MODEL = "vit_tiny_patch16_224"
BUDGETS = (0.924e9, 0.731e9, 0.622e9, 0.510e9, 0.410e9)  # MACs per image, over the whole model
KEEP = (0.5, 0.25)  # after block 3
TIMED, BATCH, ROUNDS = 2, 8, 9  # the budget whose speed is measured, photos at a time, rounds in turns
CHOICE = 128  # calibration photos on which a schedule is chosen
DEPTH = 12
WHOLE, LATER = tuple(range(1, DEPTH)), tuple(range(3, DEPTH))
RANKED = (4, 7, 10)  # for methods that rank by attention; EViT's own
LEARNED = tuple(range(1, 6))  # blocks of the scorers that come with the library
MOST = 480  # tokens that go where a constant number goes in every block; all that can go, do
Make = Callable[[float], Config]


def share(kind: type[Config], *places: tuple[int, ...], **options: Any) -> dict[str, Make]:
    """Keep the same share at each location, at any of several sets of locations."""
    return {f"share, {told(at)}": lambda k, at=at: kind(at=at, keep=k, **options) for at in places}  # type: ignore[misc]


def constant(kind: type[ToMe], first: int = 1, **options: Any) -> dict[str, Make]:
    """Let the same number of tokens go in every block, as published; the first blocks take one more where it must be."""
    blocks = tuple(range(first, DEPTH + 1))

    def make(rate: float) -> Config:
        gone = round((1 - rate) * MOST)
        r = tuple(gone // len(blocks) + (number < gone % len(blocks)) for number in range(len(blocks)))
        return kind(at=blocks, r=r, **options)

    return {f"number, {told(blocks)}": make}


def told(blocks: tuple[int, ...]) -> str:
    """Name some blocks."""
    run = blocks == tuple(range(blocks[0], blocks[-1] + 1)) and len(blocks) > 2
    return f"{blocks[0]}-{blocks[-1]}" if run else " ".join(map(str, blocks))


def either(kind: type[ToMe], first: int = 1, **options: Any) -> dict[str, Make]:
    """Let a number of tokens go, as published, or a share, in as many blocks as there are."""
    return {**constant(kind, first, **options), **share(kind, LATER, **options)}


METHODS: dict[str, tuple[Make, dict[str, Make]]] = {  # at block 3; schedules for the whole model
    "TNT, by attention": (
        lambda k: TNT(at=3, keep=k, score="attention"), share(TNT, WHOLE, LATER, score="attention")
    ),
    "MCTF": (lambda k: MCTF(at=3, keep=k, inside=False), either(MCTF, 2)),
    "ATC, complete": (lambda k: ATC(at=3, keep=k, inside=False), share(ATC, LATER, RANKED)),
    "ToMe": (lambda k: ToMe(at=3, keep=k, inside=False), either(ToMe)),
    "ToMe, MLERP": (lambda k: ToMe(at=3, keep=k, inside=False, average="mlerp"), either(ToMe, average="mlerp")),
    "ToFu": (lambda k: ToFu(at=3, keep=k, inside=False), either(ToFu)),
    "PiToMe": (lambda k: PiToMe(at=3, keep=k, inside=False), either(PiToMe)),
    "DiffRate, even": (lambda k: DiffRate(at=3, keep=k), share(DiffRate, RANKED, LATER)),
    "Zero-TPrune": (
        lambda k: ZeroTPrune(at=3, keep=k, similar=25, beyond=False), {"its own": lambda k: ZeroTPrune(keep=k)}
    ),
    "EViT": (lambda k: EViT(at=3, keep=k, inside=False), share(EViT, RANKED, LATER)),
    "Top-K": (lambda k: TopK(at=3, keep=k, inside=False), share(TopK, RANKED, LATER)),
    "random drop": (lambda k: Random(at=3, keep=k), share(Random, RANKED, LATER)),
    "TNT, trained": (lambda k: TNT(at=3, keep=k), share(TNT, LEARNED, LEARNED[2:])),
}  # fmt: skip


def put_on(model: nn.Module, config: Config) -> nn.Module:
    """Reduce a model; a TNT that has to be trained takes the scorers that come with the library."""
    restore_(model)
    if isinstance(config, TNT) and config.must_train:
        return load_(model, "pretrained", at=config.at, keep=config.keep, score=config.score)
    return reduce_(model, config)


@torch.inference_mode()
def judged(
    model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], truth: list[torch.Tensor]
) -> dict[str, float]:
    """Measure top-1 in percent and the mean divergence from the unpruned model's answers, in nats."""
    right, divergence, images = 0, 0.0, 0
    for (photos, labels), wanted in zip(batches, truth, strict=True):
        logits = model(photos)
        right += int((logits.argmax(1) == labels).sum())
        divergence += float(torch.nn.functional.kl_div(
            logits.log_softmax(1), wanted.log_softmax(1), reduction="sum", log_target=True
        ))  # fmt: skip
        images += len(labels)
    return {"top1": 100 * right / images, "kl": divergence / images, "macs": macs(model).macs}


def batches_of(folder: Path, model: nn.Module, photos: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Read so many photos, from all over a folder."""
    found = labelled_photos(folder, model)
    chosen = found[:: max(1, len(found) // photos)][:photos]
    loader = DataLoader(Photos(chosen, transform_for(model)), 32, num_workers=2, collate_fn=collate)
    return [(batch.images, batch.labels) for batch in tqdm(loader, desc=f"reading {folder.name}", unit="batch")]


class Rows:
    """What was measured, each in a file of its own.

    Args:
        model: The unpruned model.
        data: The folder with the photos.
        out: Where the files are.
        photos: How many of imagenet-val-1300 are used.
    """

    def __init__(self, model: nn.Module, data: Path, out: Path, photos: int) -> None:
        self.model, self.out = model, out
        self.sets = {
            "val": batches_of(data / "imagenet-val-1300", model, photos),
            "choice": batches_of(data / "calibration-1000" / "images", model, CHOICE),
        }
        with torch.inference_mode():
            self.truth = {name: [model(images) for images, _ in found] for name, found in self.sets.items()}
        self.photos = sum(len(labels) for _, labels in self.sets["val"])

    def of(self, config: Config | None, which: str = "val") -> dict[str, float]:
        """Measure one config, or the unpruned model, on one set of photos, unless it was measured before."""
        batches, truth = self.sets[which], self.truth[which]
        if config is None:
            return judged(restore_(self.model), batches, truth)
        key = f"{config} {which} {sum(len(labels) for _, labels in batches)}"
        file = self.out / f"{config.method}-{sha256(key.encode()).hexdigest()[:16]}.json"
        known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if known.get("config") != key:
            known = {"config": key, **judged(put_on(self.model, config), batches, truth)}
            self.out.mkdir(parents=True, exist_ok=True)
            write(file, json.dumps(known).encode())
        return known

    def best(self, schedules: dict[str, Make], budget: float) -> tuple[str, Config] | None:
        """Choose a schedule for a budget by its divergence on calibration photos; None if none can meet the budget."""
        found = {name: fitted(restore_(self.model), make, budget) for name, make in schedules.items()}
        found = {name: one for name, one in found.items() if macs(reduce_(self.model, one)).macs <= budget}
        if not found:
            return None
        name = min(found, key=lambda name: self.of(found[name], "choice")["kl"])
        return name, found[name]


@torch.inference_mode()
def speeds(model: nn.Module, configs: dict[str, Config]) -> dict[str, float]:
    """Time all configs in turns with the unpruned model; return how many times as fast each is, by median."""
    images = torch.randn(BATCH, 3, 224, 224)
    restore_(model)
    models = [model, *(put_on(copy.deepcopy(model), config) for config in configs.values())]
    times = in_turns([partial(one, images) for one in models], ROUNDS, images.device)
    return {name: times[0].median / own.median for name, own in zip(configs, times[1:], strict=True)}


def main(data: Path, out: Path, page: Path = Path("docs/results/untrained.md"), photos: int = 500) -> None:
    """Measure every row and write the page.

    Args:
        data: The folder with the weights, imagenet-val-1300 and calibration-1000.
        out: Where rows are kept.
        page: The page to write.
        photos: How many of the photos are used, from all over the folder.
    """
    model = load_model(MODEL, data / f"{MODEL}.safetensors", "cpu").eval()
    measured = Rows(model, data, out, photos)
    base = measured.of(None)
    single, whole, chosen, timed = [], [], [], {}
    for name, (make, schedules) in tqdm(METHODS.items(), unit="method"):
        single.append(f"| {name} | {' | '.join(cell(measured.of(make(keep))) for keep in KEEP)} |")
        found = [measured.best(schedules, budget) for budget in BUDGETS]
        whole.append((name, " | ".join("" if one is None else cell(measured.of(one[1])) for one in found)))
        chosen.append(f"| {name} | {' | '.join('' if one is None else one[0] for one in found)} |")
        if (one := found[TIMED]) is not None:
            timed[name] = one[1]
    fast = speeds(model, timed)
    budgets = [f"{budget / 1e9:.3f} GMACs" for budget in BUDGETS]
    write(page, PAGE.format(
        top1=base["top1"], gmacs=base["macs"] / 1e9, photos=measured.photos, stamp=stamp(),
        single=table([f"{keep:.0%}" for keep in KEEP], single),
        whole=table(
            [*budgets, f"times as fast at {BUDGETS[TIMED] / 1e9:.3f}"],
            [f"| {name} | {cells} | {f'{fast[name]:.2f}' if name in fast else ''} |" for name, cells in whole],
        ),
        chosen=table(budgets, chosen, ":---"),
    ).encode())  # fmt: skip
    written(page)


def cell(row: dict[str, float]) -> str:
    """Tell top-1 and divergence."""
    return f"{row['top1']:.1f} ({row['kl']:.3f})"


def table(heads: list[str], rows: list[str], align: str = "---:") -> str:
    """Lay out rows under a head."""
    return "\n".join([f"| method | {' | '.join(heads)} |", f"|---|{f'{align}|' * len(heads)}", *rows])


PAGE = f"""# Methods that need no training

What you get in one line, with no photos, beside trained TNT. `{MODEL}` on {{photos:,}} photos of the ImageNet validation set; unpruned:
top-1 {{top1:.1f}} %, {{gmacs:.3f}} GMACs.

Written by `python benchmarks/untrained.py --data ../shared/data --out runs/untrained` on {{stamp}}.

Cells are top-1 in percent and, in brackets, the mean divergence from the unpruned model in nats: less is better. Top-1 has a standard
error of 1.7 points on these photos; the divergence tells methods apart better.

## After block 3, by the share of kept tokens

{{single}}

## In the whole model, by MACs

{{whole}}

* **TNT, by attention** is `TNT(score="attention")`. It ranks by the CLS token's attention and merges as trained TNT does.
* **TNT, trained** has the scorers that come with the library, for blocks 1 to 5: 1,000 other photos, no labels.
* **DiffRate, even** prunes and merges an equal share everywhere; the counts that it learns need photos.
* Speed is at batch {BATCH}, against the unpruned model in the same run: the median of {ROUNDS} rounds.
* An empty cell: no schedule of the method meets the budget.

Each method has the better of two simple schedules, chosen on {CHOICE} calibration photos: the same *number* of tokens goes in each block, as
ToMe's and MCTF's authors have it, or the same *share*. Searched plans give more: [TNT in detail](tnt.md).

{{chosen}}
"""


if __name__ == "__main__":
    tyro.cli(main)

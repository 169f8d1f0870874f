"""Methods that learn on a frozen model, without labels, on a real model: docs/results/learned.md.

python benchmarks/learned.py --data ../shared/data --out runs/learned

Each training and each row is kept, so that it resumes where it stopped. Trainings see the calibration photos alone, with
the options that are their defaults; all rows are judged as those of benchmarks/untrained.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn
from tqdm import tqdm

from stamps import written
from tntprune import DTEM, TNT, DiffRate, ToMe, calibrate_, load_, macs, reduce_, save
from tntprune.backbones.models import load_model
from tntprune.methods import Config
from tntprune.search.fitted import fitted
from tntprune.system.environment import stamp
from tntprune.system.storage import write
from untrained import DEPTH, MODEL, WHOLE, Rows, batches_of, cell, constant, judged, table

PHOTOS = 500  # of the validation set
DECODED = 1000  # calibration photos that are trained on
Reduce = Callable[[nn.Module], nn.Module]


class Bench:
    """Photos, trainings and measured rows, kept in a folder.

    Args:
        data: The folder with the weights, imagenet-val-1300 and calibration-1000.
        out: Where trainings and rows are kept.
    """

    def __init__(self, data: Path, out: Path) -> None:
        self.weights, self.out = data / f"{MODEL}.safetensors", out
        self.rows = Rows(self.model(), data, out, PHOTOS)
        found = batches_of(data / "calibration-1000" / "images", self.model(), DECODED)
        self.photos = torch.cat([images for images, _ in found])

    def model(self) -> nn.Module:
        return load_model(MODEL, self.weights, "cpu").eval()

    def trained(self, name: str, config: Config) -> Path:
        """Train a reduction, unless that is done, and return its folder."""
        folder = self.out / name
        if not folder.exists():
            begin = time.perf_counter()
            model = calibrate_(reduce_(self.model(), config), self.photos, seed=0)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
            save(model, folder)
        return folder

    def row(self, name: str, make: Reduce) -> dict[str, float]:
        """Measure a reduction, unless that is done."""
        file = self.out / f"{name}.json"
        if not file.exists():
            found = judged(make(self.model()), self.rows.sets["val"], self.rows.truth["val"])
            write(file, json.dumps(found).encode())
        return json.loads(file.read_text())  # type: ignore[no-any-return]


def loaded(folder: Path, **changes: Any) -> Reduce:
    """Return what puts a trained reduction on a model."""
    return lambda model: load_(model, folder, **changes)


def dtem(bench: Bench, budget: float) -> Reduce:
    """Let the same number of tokens go in each block; one training serves all budgets."""
    (make,) = constant(DTEM).values()
    wanted: Any = fitted(bench.model(), make, budget)
    return loaded(bench.trained("dtem", DTEM(at=tuple(range(1, DEPTH + 1)), r=13)), r=wanted.r)


def diffrate(bench: Bench, budget: float) -> Reduce:
    """Learn counts for each budget. The config takes a share of the blocks' MACs; the rest of the model counts beside it."""
    plain = macs(bench.model())
    rest = plain.embed + plain.head
    share = round((budget - rest) / (plain.macs - rest) - 0.0005, 3)
    return loaded(bench.trained(f"diffrate-{share}", DiffRate(budget=share)))


def tnt(bench: Bench, budget: float) -> Reduce:
    """Keep the same share in each block; one training serves all budgets."""
    folder = bench.trained("tnt", TNT(at=WHOLE, keep=0.9))
    wanted: Any = fitted(bench.model(), lambda k: TNT(at=WHOLE, keep=k), budget)
    return loaded(folder, keep=wanted.keep)


def tome(bench: Bench, budget: float) -> Reduce:
    """Learn nothing, and let the same number of tokens go in each block."""
    (make,) = constant(ToMe).values()
    config = fitted(bench.model(), make, budget)
    return lambda model: reduce_(model, config)


METHODS: dict[str, Callable[[Bench, float], Reduce]] = {
    "TNT": tnt,
    "ToMe": tome,
    "DTEM": dtem,
    "DiffRate": diffrate,
}


def main(data: Path, out: Path, page: Path = Path("docs/results/learned.md"), threads: int = 1,
         budgets: tuple[float, ...] = (0.731, 0.622, 0.510)) -> None:  # fmt: skip
    """Train and measure every row and write the page.

    Args:
        data: The folder with the weights, imagenet-val-1300 and calibration-1000.
        out: Where trainings and rows are kept.
        page: The page to write.
        threads: Of the processor.
        budgets: GMACs per image.
    """
    torch.set_num_threads(threads)
    bench = Bench(data, out)
    base = bench.rows.of(None)
    lines = []
    for title, make in METHODS.items():
        cells = []
        for budget in tqdm(budgets, desc=title):
            name = f"{title}-{budget:.3f}".replace(", ", "-").lower()
            cells.append(cell(bench.row(name, make(bench, 1e9 * budget))))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    text = PAGE.format(
        top1=base["top1"], gmacs=base["macs"] / 1e9, stamp=stamp(), rows=table([f"{budget:.3f} GMACs" for budget in budgets], lines),
    )  # fmt: skip
    write(page, text.encode())
    written(page)


PAGE = f"""# Methods that learn on a frozen model

`{MODEL}` on {PHOTOS} photos of the ImageNet validation set; unpruned: top-1 {{top1:.1f}} %, {{gmacs:.3f}} GMACs. Each method learned once, with its
defaults, from {DECODED:,} other photos without labels. Cells: top-1 in percent and, in brackets, the mean divergence from the unpruned model.

{{rows}}

TNT keeps the same share in blocks 1 to {DEPTH - 1}. DiffRate learned its counts for each budget. DTEM and ToMe merge the same number in each
block; ToMe learns nothing. More: [TNT in detail](tnt.md), [without a training](untrained.md).

Written by `python benchmarks/learned.py --data ../shared/data --out runs/learned` on {{stamp}}.
"""


if __name__ == "__main__":
    tyro.cli(main)

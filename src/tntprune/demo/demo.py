"""The whole job on an embedded default: train the scorers, reduce tokens, measure, and leave a report. No download."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from tqdm import tqdm

from tntprune.analysis.evaluate import Figures, measure
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.digits_vit import digits_vit
from tntprune.demo.digits import cluttered_digits
from tntprune.methods import TNT, Config, Random
from tntprune.reduce import reduce_
from tntprune.report import Table, page, picture
from tntprune.report.draw import ORIGINAL, PhotoMaps, kept_maps, sheet
from tntprune.report.figures import curve
from tntprune.report.plot_style import blank
from tntprune.system.environment import stamp
from tntprune.system.storage import check_output, make_folder, write
from tntprune.training.calibrate import calibrate_

AT = 2  # the block after which tokens are dropped
REPORT = "report.html"
KEEP = (48, 32, 16, 8, 6, 4)  # of 64 tokens; the digit covers about nine
SHOWN = (32, 16, 8)  # of these, pictures
METHODS: dict[str, Config] = {
    "TNT": TNT(at=AT, tokens=KEEP[0]),
    "TNT, paper's recipe": TNT(at=AT, tokens=KEEP[0], recipe="paper"),
    "random drop": Random(at=AT, tokens=KEEP[0]),
}
# Chosen on the training scans alone.
TRAINING: dict[str, dict[str, Any]] = {
    "TNT": {"epochs": 3},
    "TNT, paper's recipe": {"epochs": 3, "lr": 0.01},
}


@dataclass(frozen=True)
class DemoRow:
    """One method at one number of tokens."""

    method: str
    tokens: int
    top1: float
    macs: int
    images_per_s: float
    speedup: float


@dataclass(frozen=True)
class Demo:
    """What the demo found: the unpruned model, every row, and where the report is."""

    base: Figures
    rows: list[DemoRow]
    report: Path

    def __str__(self) -> str:
        lines = [
            f"{'tokens':>6}  {'MMACs':>6}  {'img/s':>6}  {'speed':>5}  " + "  ".join(METHODS),
            f"{64:6}  {self.base.macs / 1e6:6.1f}  {self.base.images_per_s:6.0f}   1.00  "
            f"unpruned: {self.base.top1:.1f} % right",
        ]
        for tokens in KEEP:
            found = {row.method: row for row in self.rows if row.tokens == tokens}
            own = found["TNT"]
            scores = "  ".join(f"{found[name].top1:{len(name)}.1f}" for name in METHODS)
            lines.append(f"{tokens:6}  {own.macs / 1e6:6.1f}  {own.images_per_s:6.0f}  {own.speedup:5.2f}  {scores}")
        return "\n".join(lines)


def demo(out: Path, seed: int = 0, progress: bool = True) -> Demo:
    """Run the job and write `report.html` to a folder.

    Args:
        out: The folder.
        seed: Of the data and the training.
        progress: Show bars.

    Raises:
        UserError: an extra is not installed, or the folder cannot be written.
    """
    check_output(out / REPORT)
    make_folder(out)  # a read-only disk is told now and not in two minutes; so is what is not installed
    blank(1, 1)
    images, labels = cluttered_digits("train", copies=2, seed=seed)
    held_out, answers = cluttered_digits("test", copies=2, seed=seed + 1)
    model = digits_vit()
    base: Figures | None = None
    rows: list[DemoRow] = []
    shown = [int((answers == digit).nonzero()[0]) for digit in range(0, 10, 2)]
    maps = [PhotoMaps() for _ in shown]
    for name, config in METHODS.items():
        reduce_(model, config)
        if name in TRAINING:
            if progress:
                tqdm.write(f"training the scorers of {name}", file=sys.stderr)
            calibrate_(model, images, labels, progress=progress, seed=seed, **TRAINING[name])
        learned = reduction_of(model).state_dict()
        reduction_of(model).unsaved = False  # they are kept here
        for tokens in tqdm(KEEP, desc=name, unit="rate", disable=not progress):
            reduce_(model, config.changed(tokens=tokens))
            reduction_of(model).load_state_dict(learned)
            found = measure(model, zip(held_out.split(100), answers.split(100), strict=True), compare=True)
            assert found.base is not None and found.speedup is not None and found.top1 is not None
            base = base or found.base
            rows.append(DemoRow(name, tokens, found.top1, found.macs, found.images_per_s, found.speedup))
            if name == "TNT" and tokens in SHOWN:
                for drawn, new in zip(maps, kept_maps(model, held_out[shown], [0.5], [0.5]), strict=True):
                    drawn[ORIGINAL] = new[ORIGINAL]
                    drawn[f"{tokens} tokens"] = new[f"after block {AT}"]
                    drawn.merged, drawn.dropped = drawn.merged or new.merged, drawn.dropped or new.dropped
    assert base is not None
    result = Demo(base, rows, out / REPORT)
    write(result.report, _page(result, maps).encode())
    return result


def _page(result: Demo, maps: list[PhotoMaps]) -> str:
    names, base = list(METHODS), result.base
    assert base.top1 is not None  # the scans have labels
    lines = {name: [(row.macs / 1e6, row.top1) for row in result.rows if row.method == name] for name in names}
    drawn = curve(lines, (base.macs / 1e6, base.top1), "MMACs per image", "held-out scans right, %", "svg")
    rows = [_cells("64 (all)", base.macs, base.images_per_s, 1.0, [base.top1] * len(names))]
    best: list[list[int]] = [[]]
    for tokens in KEEP:
        found = {row.method: row for row in result.rows if row.tokens == tokens}
        own, scores = found["TNT"], [found[name].top1 for name in names]
        rows.append(_cells(str(tokens), own.macs, own.images_per_s, own.speedup, scores))
        best.append([4 + scores.index(max(scores))])
    header = ["tokens kept", "MMACs", "images/s", "speed-up", *(f"{name}, %" for name in names)]
    speed = Markup("<p>{}</p>").format(
        "Speed is TNT's: the median ratio to the unpruned model on the same batches, taken in turns."
    )
    return page(
        "tntprune demo: cluttered digits",
        f"A small vision transformer reads handwritten digits among clutter. After block {AT}, TNT keeps the tokens "
        "that its trained scorer finds important and that are not like another kept one, and merges each of the others "
        "into the kept token it is most like. The paper's recipe and random drop drop them instead. The digit covers "
        "about nine of the 64 tokens.",
        [
            ("Accuracy over cost", picture(drawn, "Accuracy over multiply-accumulates for each method", "svg")),
            ("In figures", Table(header, rows, best).html() + speed),
            ("What TNT keeps", picture(sheet(maps), "Held-out digits; tokens that were merged are under stripes")),
        ],
        f"Measured by tntprune demo on {stamp()}.",
    )


def _cells(tokens: str, macs: int, images_per_s: float, speedup: float, top1: list[float]) -> list[str]:
    return [tokens, f"{macs / 1e6:.1f}", f"{images_per_s:.0f}", f"{speedup:.2f}", *(f"{one:.1f}" for one in top1)]

"""What TNT's merging gives, and what each of its parts adds: writes the tables of docs/results/tnt.md.

python benchmarks/method.py --data ../shared/data --out runs/method --part ablation
python benchmarks/method.py --data ../shared/data --out runs/method --part table --plans runs/search
python benchmarks/method.py --data ../shared/data --out runs/method --part references --plans runs/search
python benchmarks/method.py --data ../shared/data --out runs/method --part tuned --plans runs/search
python benchmarks/method.py --data ../shared/data --out runs/method --part effort
python benchmarks/method.py --data ../shared/data --out runs/method --part page

"ablation" trains on one half of the 1,000 calibration photos and judges by the other: that is what the defaults were
chosen by. "table" trains on all of them with five seeds and judges by imagenet-val-1300, where nothing was chosen.
Plans are searched before, with the scorers that --part table --only whole --seeds 0 trains:
tntprune search MODEL ... --reducer runs/method/whole-1000-0 --macs 0.731e9 --out runs/search/tnt-731.json
tntprune search MODEL ... --method tome --macs 0.731e9 --out runs/search/tome-731.json
"references" judges schedules that need no search at the same budgets, and plans of other methods, as tome-510.json.
"tuned" fine-tunes the norms under each of its settings, from the scorers of the first seed. "effort" trains on fewer
photos and for fewer steps. Every training and every figure has a file of its own, so that each part goes on where it
stopped, and parts can run at the same time; a folder is of one version of the code. "page" puts what is there into the
page.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import torch
import tyro

from method_lab import Lab
from method_page import write_page
from method_plans import LATER, SINGLE, WHOLE, efforts, schedules, variants
from tntprune import ToMe
from tntprune.methods import from_dict
from tntprune.serialization.plan import read_plan

SEEDS = (0, 1, 2, 3, 4)


def ablation(lab: Lab, named: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    """One option changed at a time: learn on one half of the calibration photos, judge by the other."""
    lab.judge("ablation unpruned", None, {}, "judge", lab.half)
    for variant in sorted(variants(), key=lambda variant: variant.name in LATER):
        if named and variant.name not in named:
            continue
        for seed in seeds if named else SEEDS[: 2 if (variant.like or variant.name) in ("default", "whole") else 1]:
            found, _ = lab.train(variant, lab.photos["learn"], seed)
            learned = {
                name: torch.full_like(value, variant.learned[name.partition(".")[0]])
                if name.partition(".")[0] in variant.learned
                else value
                for name, value in found.items()
            }
            for label, config in variant.settings().items():
                lab.judge(f"ablation {variant.name} {label} {seed}", config, learned, "judge", lab.half)


def table(lab: Lab, plans: Path | None, seeds: tuple[int, ...], only: str | None = None) -> None:
    """Make the table of the page: five seeds, judged by photos that nothing was chosen on."""
    lab.judge("table unpruned", None, {}, "val", False)
    for budget, r in {"0.924": 8, "0.731": 13, "0.622": 16, "0.510": 20}.items():
        lab.judge(f"table tome {budget}", ToMe(r=r), {}, "val", False)
    for seed in seeds:
        for variant, settings in ((SINGLE, SINGLE.settings()), (WHOLE, schedules(plans))):
            if not settings or only not in (None, variant.name):  # no plans yet, or another process does it
                continue
            learned, seconds = lab.train(variant, lab.photos["all"], seed)
            for label, config in settings.items():
                lab.judge(f"table {variant.name} {label} {seed}", config, learned, "val", False)
            if not seed:  # for what it takes
                lab.keep(f"seconds-{variant.name}-1000", seconds)


def references(lab: Lab, plans: Path) -> None:
    """Measure schedules that need no search, at the budgets of the plans, and plans of methods that learn nothing."""
    learned, _ = lab.train(WHOLE, lab.photos["all"], 0)
    for path in sorted([*plans.glob("tnt-*.json"), *plans.glob("tome-*.json")]):
        method, budget = path.stem.split("-")
        plan = read_plan(path)
        configs = {one["name"]: from_dict(one["config"]) for one in plan.predicted["references"]}
        if not plan.config.must_train:  # or it is in the table
            configs["plan"] = plan.config
        for name, config in configs.items():
            label = f"reference {method} {name} 0.{budget}".replace("'", "").replace(",", "")
            lab.judge(label, config, learned if config.must_train else {}, "val", False)


def tuned(lab: Lab, plans: Path | None, only: str | None) -> None:
    """Measure the settings of the table with the norms fine-tuned under each."""
    for variant, settings in ((SINGLE, SINGLE.settings()), (WHOLE, schedules(plans))):
        if only not in (None, variant.name):
            continue
        learned, _ = lab.train(variant, lab.photos["all"], 0)
        for label, config in sorted(settings.items()):
            run, seconds = lab.tune(label, config, learned)
            lab.judge(f"tuned {label}", config, learned, "val", False, run)
            lab.keep(f"seconds-tuned-{label}", seconds)


def effort(lab: Lab) -> None:
    """Accuracy against the number of photos, and against the time of training."""
    for variant, photos in efforts():
        learned, seconds = lab.train(variant, lab.photos["all"][:photos], 0)
        for label, config in SINGLE.settings().items():
            lab.judge(f"effort {variant.name} {photos} {label}", config, learned, "val", False)
        lab.keep(f"seconds-{variant.name}-{photos}", seconds)


def main(
    data: Path,
    out: Path,
    part: Literal["ablation", "table", "tuned", "references", "effort", "page"],
    plans: Path | None = None,
    seeds: tuple[int, ...] = SEEDS,
    only: Literal["single", "whole"] | None = None,
    named: tuple[str, ...] = (),
    bf16: bool = False,
    doc: Path = Path("docs/results/tnt.md"),
) -> None:
    """Train and judge what is not there yet, or write the page from what is.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: For all that is kept.
        part: What to do.
        plans: A folder with plans of `tntprune search`, named after their methods and budgets, such as tnt-731.json.
        seeds: For the table, and for rows of the ablation that are named; two processes can share them.
        only: One half of the table, where two processes share it.
        named: Rows of the ablation, where two processes share it; none given are all.
        bf16: Train, and judge the ablation, in half precision, which suits processors with instructions for it.
        doc: The page.
    """
    begin = time.perf_counter()
    if part == "page":
        write_page(out / "figures", doc)
        return
    lab = Lab(data, out, bf16)
    parts = {
        "ablation": lambda: ablation(lab, named, seeds),
        "table": lambda: table(lab, plans, seeds, only),
        "tuned": lambda: tuned(lab, plans, only),
        "references": lambda: references(lab, plans or out),
        "effort": lambda: effort(lab),
    }
    parts[part]()
    print(f"{part}: {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)

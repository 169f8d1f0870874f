"""Searched plans against the paper's blocks and uniform rates at equal MACs: docs/search.md.

Searches on calibration photos alone, and measures on others, which nothing is chosen on:

python benchmarks/search.py --weights FILE --calibration DIR --data DIR
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import tyro

from tntprune import TNT, ToMe, load_, macs
from tntprune.config import Config, from_dict
from tntprune.datasets import open_photos
from tntprune.environment import stamp
from tntprune.evaluate import evaluate
from tntprune.models import load_model
from tntprune.plan import read_plan, write_plan
from tntprune.search import search
from tntprune.search.picture import draw_front
from tntprune.search.points import told
from tntprune.storage import write

MODEL = "vit_tiny_patch16_224"
METHODS: dict[str, Config] = {"TNT": TNT(inside=True, metric="mean"), "ToMe": ToMe()}
REFERENCES = ("the paper's [3, 4, 5]", "uniform rates")
START, END = "<!-- written by benchmarks/search.py -->", "<!-- end -->"
HEAD = "| method | GMACs at most | schedule | GMACs | top-1 | agrees | tokens left (block:tokens) |"


def main(
    weights: Path,
    calibration: Path,
    data: Path,
    budgets: tuple[float, ...] = (0.924e9, 0.731e9, 0.622e9, 0.510e9),
    plans: Path = Path("runs/search"),
    out: Path = Path("docs/search.md"),
    minutes: float = 10.0,
    seed: int = 0,
    reducer: Path | None = None,
) -> None:
    """Search, measure, and write the table into the page. Plans that are there already are not searched for again.

    What TNT learns at the first budget is used at the others, unless a run is given.

    Args:
        weights: Of vit_tiny_patch16_224.
        calibration: Photos to search (and train) on.
        data: Photos in class folders to measure on.
        budgets: Of multiply-accumulates.
        plans: Where they are kept.
        out: The page.
        minutes: For each search.
        seed: Of the searches.
        reducer: A run of TNT, for its scorers.
    """
    model = load_model(MODEL, weights)
    photos = open_photos(data, model)
    base, _ = evaluate(model, photos)
    rows, spent = [], []
    for name, method in METHODS.items():
        trained: Path | None = reducer if method.must_train else None
        for budget in budgets:
            path = plans / f"{name.lower()}-{budget / 1e6:.0f}.json"
            if not path.exists():
                host = copy.deepcopy(model)
                if trained is not None:
                    load_(host, trained)
                found = search(
                    host, calibration, method=None if trained else method, macs=budget, minutes=minutes, seed=seed,
                    made_by=json.dumps({"command": "benchmarks/search.py", "seed": seed}),
                )  # fmt: skip
                write_plan(path, found.plan)
                draw_front(path.with_suffix(".png"), found, MODEL)
                spent.append(found.seconds)
            if method.must_train and trained is None:
                trained = path
            plan = read_plan(path)
            schedules = [("searched", plan.config)]
            known = {one["name"]: from_dict(one["config"]) for one in plan.predicted["references"]}
            schedules += [(what, known[what]) for what in REFERENCES if what in known]
            for what, config in schedules:
                reduced = load_(copy.deepcopy(model), path, at=config.at, tokens=config.tokens)
                figures, _ = evaluate(reduced, photos)
                rows.append(
                    f"| {name} | {budget / 1e9:.3f} | {what} | {macs(reduced).macs / 1e9:.3f} | {figures.top1:.2f} | "
                    f"{figures.agreement:.2f} | {told(config)} |"
                )
                print(rows[-1], flush=True)
    took = f" The searches took {min(spent):.0f} to {max(spent):.0f} s each." if spent else ""
    text = "\n".join([
        START,
        f"Written by `python benchmarks/search.py`: searched on `{calibration.name}`, measured on {base.images} photos "
        f"of `{data.name}`, on which the unpruned model has {base.top1:.2f} %; {stamp()}.{took}",
        "", HEAD, "|---|---:|---|---:|---:|---:|---|", *rows, END,
    ])  # fmt: skip
    page = out.read_text()
    before, rest = page.split(START)
    write(out, (before + text + rest.split(END)[1]).encode())


if __name__ == "__main__":
    tyro.cli(main)

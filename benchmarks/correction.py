"""What the correction in closed form adds, on a real model: docs/results/correction.md.

python benchmarks/correction.py --data ../shared/data --out runs/correction

Corrections are made from the calibration photos and judged once by imagenet-val-1300. Each row is kept in a file of its own, so that it
resumes where it stopped. Plans are those of docs/results/tnt.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from method_lab import Lab
from method_plans import WHOLE
from results import fitted
from stamps import written
from tntprune import ToMe, calibrate_, load_, reduce_, restore_
from tntprune.backbones.models import load_model
from tntprune.data.loading import Photos, collate
from tntprune.data.transforms import transform_for
from tntprune.methods import Config
from tntprune.system.environment import stamp
from tntprune.system.storage import make_folder, packed, read_weights, write
from tntprune.training.run_folder import ended
from untrained import judged

MODEL = "vit_tiny_patch16_224"
PLANS: dict[float, dict[int, int]] = {  # tokens left inside each block, as docs/results/tnt.md has them
    0.731: {4: 166, 5: 131, 6: 101, 7: 88, 8: 79, 9: 53, 10: 38, 12: 1},
    0.622: {3: 156, 4: 124, 5: 105, 6: 85, 7: 68, 8: 55, 9: 38, 10: 30, 11: 23, 12: 1},
    0.510: {1: 164, 2: 153, 3: 128, 4: 104, 5: 85, 6: 67, 7: 51, 8: 43, 9: 29, 10: 20, 12: 1},
}
KEEPS = (0.5, 0.25)  # after block 3


class Bench:
    """The photos, and what is kept of each row.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: Where scorers and rows are kept.
    """

    def __init__(self, data: Path, out: Path) -> None:
        make_folder(out)
        self.weights, self.out = data / f"{MODEL}.safetensors", out
        self.lab = Lab(data, out / "method")
        self.scorers = out / "method" / "whole-1000-0"
        if not ended(self.scorers):
            self.lab.train(WHOLE, self.lab.photos["all"], 0)
        self.calibration = torch.cat([images for images, _ in self.read("all")])
        self.batches = self.read("val")
        self.truth = self.unpruned()

    def unpruned(self) -> list[torch.Tensor]:
        """Return the unpruned model's logits for each batch, which are kept too."""
        file = self.out / "unpruned.safetensors"
        if not file.exists():
            model = self.model()
            with torch.inference_mode():
                said = [model(images) for images, _ in tqdm(self.batches, desc="unpruned", unit="batch")]
            write(file, packed({"logits": torch.cat(said)}))
        return list(read_weights(file)["logits"].split(50))

    def model(self) -> nn.Module:
        return load_model(MODEL, self.weights).eval()

    def read(self, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        photos = Photos(self.lab.photos[name], transform_for(self.lab.model))
        return [(b.images, b.labels) for b in tqdm(DataLoader(photos, 50, collate_fn=collate), desc=name, unit="batch")]

    def file(self, method: str, name: str) -> Path:
        """Return where a row is kept."""
        return self.out / f"{method} {name}.json".replace(" ", "-")

    def row(self, method: str, name: str, make: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
        """Measure one reduction without and with its correction."""
        file = self.file(method, name)
        if file.exists():
            return json.loads(file.read_text())  # type: ignore[no-any-return]
        model = make(self.model())
        before = judged(model, self.batches, self.truth)
        begin = time.perf_counter()
        calibrate_(model, self.calibration, correct="only")
        seconds = time.perf_counter() - begin
        found = {
            "name": f"{method} {name}",
            "before": before,
            "after": judged(model, self.batches, self.truth),
            "seconds": seconds,
        }
        print(found, flush=True)
        write(file, json.dumps(found).encode())
        return found


def settings(bench: Bench) -> list[tuple[str, str, Callable[[nn.Module], nn.Module]]]:
    """Return each row's method, its reduction, and how that is put on a model."""
    tnts, tomes = [], []
    plain = bench.model()
    for keep in KEEPS:
        name, own = f"after block 3, K = {keep:g}", ToMe(at=3, keep=keep, inside=False)
        tnts.append(("TNT", name, partial(load_, source="pretrained", at=3, keep=keep)))
        tomes.append(("ToMe", name, partial(_reduced, config=own)))
    for budget, plan in PLANS.items():
        name, own = f"whole model, at most {budget:.3f}", fitted(restore_(plain), lambda k: ToMe(keep=k), budget * 1e9)
        counts: dict[str, Any] = {"at": tuple(plan), "tokens": tuple(plan.values())}
        tnts.append(("TNT", name, partial(load_, source=bench.scorers, **counts)))
        tomes.append(("ToMe", name, partial(_reduced, config=own)))
    return tnts + tomes


def _reduced(model: nn.Module, config: Config) -> nn.Module:
    return reduce_(model, config)


def main(data: Path, out: Path, page: Path = Path("docs/results/correction.md"), only: tuple[str, ...] = ()) -> None:
    """Measure every row and write the page.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: Where scorers and rows are kept.
        page: The page to write.
        only: Words of the rows to measure now, such as TNT and 0.51; the page has these and those measured before.
    """
    bench, rows = Bench(data, out), []
    for method, name, make in settings(bench):
        wanted = all(word in method + name for word in only)
        if wanted or bench.file(method, name).exists():
            rows.append((method, name, bench.row(method, name, make)))
    lines = [
        f"| {method} | {name} | {row['before']['macs'] / 1e9:.3f} | {row['before']['top1']:.1f} | {row['after']['top1']:.1f} "
        f"| {row['before']['kl']:.3f} | {row['after']['kl']:.3f} |"
        for method, name, row in rows
    ]
    seconds = sorted(row["seconds"] for _, _, row in rows)
    photos = sum(len(labels) for _, labels in bench.batches)
    text = PAGE.format(
        table="\n".join(lines), stamp=stamp(), photos=photos, least=seconds[0], most=seconds[-1],
    )  # fmt: skip
    write(page, text.encode())
    written(page)


PAGE = f"""# Correction in closed form

What [`correct=True`](../guides/training.md#correct-what-the-reduced-model-lacks) adds on a frozen `{MODEL}`. Corrections are made from 1,000 unlabelled
calibration photos and judged once by {{photos:,}} photos of `imagenet-val-1300`. Nothing was chosen on those.

| method | reduction | GMACs | top-1 % | corrected | divergence | corrected |
|---|---|---:|---:|---:|---:|---:|
{{table}}

Divergence: mean KL divergence from the unpruned model, in nats. Top-1 has a standard error of 1.1 points on these photos.
One correction took {{least:.0f}} to {{most:.0f}} s; other work on the machine counts in it.

Written by `python benchmarks/correction.py --data ../shared/data --out runs/correction` on {{stamp}}.

TNT after block 3 has the scorers that come with the library, in the whole model those of one training (310 steps) and the plans of
[TNT in detail](tnt.md). ToMe acts in every block there, with one keep rate.
"""


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)

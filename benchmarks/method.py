"""What TNT's merging gives, and what each of its parts adds: writes the tables of docs/method.md.

python benchmarks/method.py --data ../shared/data --out runs/method --part ablation
python benchmarks/method.py --data ../shared/data --out runs/method --part table --plans runs/search
python benchmarks/method.py --data ../shared/data --out runs/method --part tuned --plans runs/search
python benchmarks/method.py --data ../shared/data --out runs/method --part effort
python benchmarks/method.py --data ../shared/data --out runs/method --part page

"ablation" trains on one half of the 1,000 calibration photos and judges by the other: that is what the defaults were
chosen by. "table" trains on all of them with five seeds and judges by imagenet-val-1300, where nothing was chosen.
"references" judges schedules that need no search at the same budgets, and plans of other methods, as tome-510.json.
"tuned" fine-tunes the norms under each of its settings, from the scorers of the first seed. "effort" trains on fewer
photos and for fewer steps. Every training and every figure has a file of its own, so that each part goes on where it
stopped, and parts can run at the same time. "page" puts what is there into the page.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from method_plans import LATER, SINGLE, WHOLE, Variant, efforts, schedules, variants
from tntprune import ToMe, load_, macs, reduce_
from tntprune.augment import LIGHT
from tntprune.batches import PhotoSource
from tntprune.checkpoint import FILE, read
from tntprune.config import Config, from_dict, to_dict
from tntprune.data import Photo, Photos, collate, labelled_photos, transform_for
from tntprune.environment import stamp
from tntprune.models import load_model
from tntprune.plan import read_plan
from tntprune.reduce import inherit, reduction_of
from tntprune.runfolder import ended
from tntprune.runlog import read_log
from tntprune.runs import train_run
from tntprune.storage import make_folder, write
from tntprune.training import Training

MODEL = "vit_tiny_patch16_224"
SEEDS = (0, 1, 2, 3, 4)
Learned = dict[str, torch.Tensor]


class Lab:
    """The photos, and what is kept of each training and each figure.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: For all that is kept.
        half: Train, and judge the ablation, in bf16 under autocast: faster where the processor has instructions for it.
    """

    def __init__(self, data: Path, out: Path, half: bool = False) -> None:
        self.data, self.out, self.half = data, out, half
        self.model = load_model(MODEL, data / f"{MODEL}.safetensors")
        self.photos: dict[str, list[Photo]] = {
            "calibration": labelled_photos(data / "calibration-1000" / "images", self.model),
            "val": labelled_photos(data / "imagenet-val-1300", self.model),
        }
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).tolist()
        mixed = [self.photos["calibration"][i] for i in order]
        self.photos |= {"all": mixed, "learn": mixed[:500], "judge": mixed[500:]}
        self.ready: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        make_folder(out)

    def train(self, variant: Variant, photos: list[Photo], seed: int) -> tuple[Learned, float]:
        """What a training learns, and its seconds; one that has ended is not repeated."""
        out = self.out / f"{variant.like or variant.name}-{len(photos)}-{seed}".replace(" ", "-")
        training = Training(**{"seed": seed, "amp": "bf16" if self.half else "none", **variant.training})
        if not ended(out):
            reduce_(self.model, variant.config)
            images = transform_for(self.model, LIGHT if variant.augmented else None)
            source = PhotoSource(Photos(photos, images, seed=seed), training.batch_size, seed, 1, variant.labelled)
            train_run(self.model, source, training, out, resume=out.exists(), about={"photos": len(photos)})
        return read(out / FILE)[1], float(read_log(out)[-1]["seconds"])

    def batches(self, name: str, half: bool) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Photos, labels and what the unpruned model says, decoded once."""
        if name not in self.ready:
            loader = DataLoader(
                Photos(self.photos[name], transform_for(self.model)), 50, collate_fn=collate, num_workers=1
            )
            images, labels = zip(*[(b.images, b.labels) for b in tqdm(loader, desc=f"reading {name}")], strict=True)
            plain = load_model(MODEL, self.data / f"{MODEL}.safetensors")
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=half):
                said = [plain(part).float().log_softmax(1) for part in images]
            self.ready[name] = (torch.cat(images), torch.cat(labels), torch.cat(said))
        return list(zip(*(part.split(50) for part in self.ready[name]), strict=True))

    def tune(self, label: str, config: Config, learned: Learned) -> tuple[Path, float]:
        """The norms fine-tuned under a reduction: the run, and its seconds."""
        out = self.out / f"tuned-{label}"
        training = Training(unfreeze="norms", amp="bf16" if self.half else "none", epochs=3)
        model = load_model(MODEL, self.data / f"{MODEL}.safetensors")
        inherit(reduction_of(reduce_(model, config)), learned)
        if not ended(out):
            images = transform_for(model, LIGHT)
            source = PhotoSource(Photos(self.photos["all"], images), training.batch_size, 0, 1, False)
            train_run(model, source, training, out, resume=out.exists())
        return out, float(read_log(out)[-1]["seconds"])

    def keep(self, name: str, found: Any) -> None:
        """Write a figure to a file of its name."""
        make_folder(self.out / "figures")
        write(self.out / "figures" / f"{name}.json".replace(" ", "-"), json.dumps(found).encode())

    def judge(
        self, name: str, config: Config | None, learned: Learned, photos: str, half: bool, run: Path | None = None
    ) -> dict[str, Any]:
        """Top-1, agreement and divergence from the unpruned model; kept under a name of its own.

        Args:
            name: Of the file.
            config: The reduction; None for the unpruned model.
            learned: What it has learned.
            photos: Which ones.
            half: In bf16 under autocast, which is faster, or in fp32.
            run: Where the model was fine-tuned: what it learned and its own weights are taken from there.
        """
        file = self.out / "figures" / f"{name}.json".replace(" ", "-")
        asked = None if config is None else json.loads(json.dumps(to_dict(config)))
        if file.exists() and json.loads(file.read_text())["config"] == asked:
            return json.loads(file.read_text())  # type: ignore[no-any-return]
        model: nn.Module = load_model(MODEL, self.data / f"{MODEL}.safetensors")
        if run is not None:
            load_(model, run)
        elif config is not None:
            reduce_(model, config)
            inherit(reduction_of(model), learned)
        right = agreeing = count = 0
        apart = 0.0
        for images, labels, said in tqdm(self.batches(photos, half), desc=name, leave=False):
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=half):
                logits = model(images).float().log_softmax(1)
            right += int((logits.argmax(1) == labels).sum())
            agreeing += int((logits.argmax(1) == said.argmax(1)).sum())
            apart += float(F.kl_div(logits, said, log_target=True, reduction="sum"))
            count += len(labels)
        found = {
            "top1": 100 * right / count, "agreement": 100 * agreeing / count, "kl": apart / count,
            "gmacs": macs(model).macs / 1e9, "photos": count, "config": asked,
            "stamp": stamp(),
        }  # fmt: skip
        self.keep(name, found)
        print(
            f"{name:48} {found['gmacs']:.3f} GMACs  top-1 {found['top1']:.2f}  divergence {found['kl']:.4f}", flush=True
        )
        return found


def ablation(lab: Lab, named: tuple[str, ...]) -> None:
    """One option changed at a time: learn on one half of the calibration photos, judge by the other."""
    lab.judge("ablation unpruned", None, {}, "judge", lab.half)
    for variant in sorted(variants(), key=lambda variant: variant.name in LATER):
        if named and variant.name not in named:
            continue
        for seed in SEEDS[: 2 if (variant.like or variant.name) in ("default", "whole") else 1]:
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
    """The table of the page: five seeds, judged by photos that nothing was chosen on."""
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
    """What needs no search, at the budgets of the plans, and plans of methods that learn nothing."""
    learned, _ = lab.train(WHOLE, lab.photos["all"], 0)
    for path in sorted(plans.glob("*-*.json")):
        method, budget = path.stem.split("-")
        plan = read_plan(path)
        configs = {one["name"]: from_dict(one["config"]) for one in plan.predicted["references"]}
        if not plan.config.must_train:  # or it is in the table
            configs["plan"] = plan.config
        for name, config in configs.items():
            label = f"reference {method} {name} 0.{budget}".replace("'", "").replace(",", "")
            lab.judge(label, config, learned if config.must_train else {}, "val", False)


def tuned(lab: Lab, plans: Path | None, only: str | None) -> None:
    """The settings of the table with the norms fine-tuned under each."""
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
    doc: Path = Path("docs/method.md"),
) -> None:
    """Train and judge what is not there yet, or write the page from what is.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: For all that is kept.
        part: What to do.
        plans: A folder with plans of `tntprune search`, named after their methods and budgets, such as tnt-731.json.
        seeds: For the table; two processes can share them.
        only: One half of the table, where two processes share it.
        named: Rows of the ablation, where two processes share it; none given are all.
        bf16: Train, and judge the ablation, in half precision, which suits processors with instructions for it.
        doc: The page.
    """
    begin = time.perf_counter()
    if part == "page":
        from method_page import write_page

        write_page(out / "figures", doc)
        return
    lab = Lab(data, out, bf16)
    parts = {
        "ablation": lambda: ablation(lab, named),
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

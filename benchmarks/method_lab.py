"""The photos of benchmarks/method.py, and what it keeps of each training and each figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from method_plans import Variant
from tntprune import load_, macs, reduce_
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.models import load_model
from tntprune.data.augment import LIGHT
from tntprune.data.batches import PhotoSource
from tntprune.data.folders import labelled_photos
from tntprune.data.loading import Photos, collate
from tntprune.data.photo import Photo
from tntprune.data.transforms import transform_for
from tntprune.methods import Config, to_dict
from tntprune.methods.learned import inherit
from tntprune.serialization.checkpoint import FILE, read
from tntprune.system.environment import stamp
from tntprune.system.storage import make_folder, write
from tntprune.training.config import Training
from tntprune.training.run_folder import ended, read_log
from tntprune.training.runs import train_run

MODEL = "vit_tiny_patch16_224"
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
        """Train under one setting and return its parameters and seconds; a training that has ended is not repeated."""
        out = self.out / f"{variant.like or variant.name}-{len(photos)}-{seed}".replace(" ", "-")
        training = Training(**{"seed": seed, "amp": "bf16" if self.half else "none", **variant.training})
        if not ended(out):
            reduce_(self.model, variant.config)
            images = transform_for(self.model, LIGHT if variant.augmented else None)
            source = PhotoSource(Photos(photos, images, seed=seed), training.batch_size, seed, 1, variant.labelled)
            train_run(self.model, source, training, out, resume=out.exists(), about={"photos": len(photos)})
        return read(out / FILE).learned, float(read_log(out)[-1]["seconds"])

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
        """Fine-tune the norms under a reduction, and return the run and its seconds."""
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
        """Measure top-1, agreement and divergence from the unpruned model; the figures are kept under a name.

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
        if file.exists():
            known: dict[str, Any] = json.loads(file.read_text())
            if known["config"] == asked:
                return known
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

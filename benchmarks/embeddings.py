"""Measure a search among the embeddings of cheaper models: docs/results/embeddings.md.

python benchmarks/embeddings.py --data ../shared/data --out runs/embeddings

ViT-Tiny without its classifier embeds imagenet-val-1300; TNT's scorers learn from the other thousand photos, without
labels. The training and each row are kept, so that the script goes on where it stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import nn
from tqdm import tqdm

from results import fitted
from stamps import written
from tntprune import TNT, Random, ToMe, TopK, embed, load_, macs, reduce_, restore_
from tntprune.analysis.retrieval import TEMPERATURE, VOTERS, search
from tntprune.backbones.attach import base_of
from tntprune.backbones.models import drop_classifier_, load_model
from tntprune.data.folders import photos_in
from tntprune.data.loading import Photos, in_order
from tntprune.data.transforms import transform_for
from tntprune.methods import Config, to_dict
from tntprune.system.environment import stamp
from tntprune.system.storage import make_folder, write

MODEL = "vit_tiny_patch16_224"
SHARES = (0.75, 0.62, 0.5)  # of the unpruned model's MACs
TRAINING = ["--method", "tnt", "--at", "3", "--noise-blocks", "3", "4", "5", "--epochs", "5"]  # as in results.py
PLACES = (3, 4, 5)
METHODS: dict[str, Callable[[float], Config]] = {  # where results.py has them, with several locations
    "TNT": lambda keep: TNT(at=PLACES, keep=keep),
    "ToMe": lambda keep: ToMe(keep=keep),
    "random drop": lambda keep: Random(at=PLACES, keep=keep),
    "Top-K": lambda keep: TopK(at=PLACES, keep=keep),
}
COLUMNS = {"cosine": ".4f", "recall1": ".1f", "recall5": ".1f", "recall10": ".1f", "knn": ".1f"}
BATCH = 32


class Gallery:
    """The photos with their labels, and a file for the figures of each row."""

    def __init__(self, data: Path, out: Path) -> None:
        self.out = out
        self.model = drop_classifier_(load_model(MODEL, data / f"{MODEL}.safetensors"))
        self.base = base_of(self.model)
        self.photos = photos_in(data / "imagenet-val-1300", self.model)
        self.labels = torch.tensor([photo.label for photo in self.photos])

    @cached_property
    def images(self) -> list[torch.Tensor]:
        """The photos as batches (B, 3, 224, 224), decoded once."""
        loader = in_order(Photos(self.photos, transform_for(self.model)), BATCH, 1)
        return [batch.images for batch in tqdm(loader, desc="reading", unit="batch")]

    @cached_property
    def unpruned(self) -> torch.Tensor:
        """The unpruned model's embeddings."""
        return embed(self.base, self.images)

    def reduced(self, config: Config) -> nn.Module:
        """Return the model of a row, with trained scorers for TNT."""
        restore_(self.model)
        if isinstance(config, TNT):
            return load_(self.model, self.out / "scorers", at=config.at, keep=config.keep)
        return reduce_(self.model, config)

    def row(self, name: str, config: Config | None) -> dict[str, Any]:
        """Figures of one config, None for the unpruned model; kept in a file."""
        path = self.out / f"{name.replace(' ', '-')}.json"
        settings = json.loads(json.dumps({"config": config and to_dict(config), "training": TRAINING}))
        if path.exists() and (data := json.loads(path.read_text())).pop("settings") == settings:
            return dict(data)
        if config is None:
            own, model = self.unpruned, self.base
        else:
            model = self.reduced(config)
            own = embed(model, self.images, progress=False)
        cosine = F.cosine_similarity(own.double(), self.unpruned.double()).mean().item()
        found = {**search(own, self.unpruned, self.labels)._asdict(), "cosine": cosine, "macs": macs(model).macs}
        write(path, json.dumps({"settings": settings, **found}).encode())
        return found


def train(data: Path, out: Path) -> None:
    """Train the scorers on the embeddings of the calibration photos."""
    run = out / "scorers"
    command = [
        sys.executable, "-m", "tntprune", "train", MODEL, "--weights", str(data / f"{MODEL}.safetensors"),
        "--no-classifier", "--data", str(data / "calibration-1000" / "images"), *TRAINING, "--out", str(run),
    ]  # fmt: skip
    subprocess.run([*command, *(["--resume"] if run.exists() else [])], check=True, stdout=sys.stderr)


def main(data: Path, out: Path, page: Path = Path("docs/results/embeddings.md"), backwards: bool = False) -> None:
    """Everything.

    Args:
        data: The folder with the weights, calibration-1000 and imagenet-val-1300.
        out: Where the training and the rows go.
        page: The page to write.
        backwards: Take the rows from the last to the first, beside a process that takes them from the first.
    """
    make_folder(out)
    train(data, out)
    gallery = Gallery(data, out)
    whole = macs(gallery.base).macs
    plain = gallery.row("unpruned", None)
    plan = [
        (share, name, fitted(gallery.model, make, share * whole))
        for share in SHARES for name, make in METHODS.items()
    ]  # fmt: skip
    for share, name, config in tqdm(plan[::-1] if backwards else plan, unit="row"):
        gallery.row(f"{name} {share}", config)
    lines, recalls = [], {}
    for share, name, config in plan:
        found = gallery.row(f"{name} {share}", config)
        recalls[name, share] = found["recall10"]
        told = " | ".join(f"{found[column]:{form}}" for column, form in COLUMNS.items())
        lines.append(f"| {share} | {name} | {found['macs'] / whole:.3f} | {told} |")
    sizes = gallery.labels.unique(return_counts=True)[1]
    words = {
        "rows": "\n".join(lines), "stamp": stamp(), "photos": len(gallery.labels),
        "tnt": recalls["TNT", SHARES[-1]], "tome": recalls["ToMe", SHARES[-1]], "knn": plain["knn"], "counted": int(sizes[sizes > 1].sum()), "gmacs": whole / 1e9,
    }  # fmt: skip
    write(page, PAGE.format(**words).encode())
    written(page)


PAGE = f"""# Embeddings

What does a search for similar photos lose? `{MODEL}` without its classifier ({{gmacs:.3f}} GMACs, 192 dimensions, fp32), on the
{{photos:,}} photos of `imagenet-val-1300`. TNT was trained on 1,000 other photos
({TRAINING[-1]} epochs). Methods act at several locations, as in [the comparison](comparison.md), at rates fitted to the MACs.

- **Cosine**: mean similarity to the unpruned model's embedding.
- **Recall@k**: share of the unpruned model's k nearest photos that are among the reduced model's k nearest.
- **kNN**: photos whose class wins the vote of the {VOTERS} nearest others (weight exp(cosine / {TEMPERATURE})), among the {{counted}} photos
  that are not the only ones of their class. Unpruned: {{knn:.1f}} %. Classes have few photos, so compare rows only.

Written by `python benchmarks/embeddings.py --data ../shared/data --out runs/embeddings` on {{stamp}}.

| MACs | method | exactly | cosine | recall@1, % | recall@5, % | recall@10, % | kNN, % |
|---:|---|---:|---:|---:|---:|---:|---:|
{{rows}}

At {SHARES[-1]} of the MACs TNT finds {{tnt:.1f}} % of the ten nearest neighbours, ToMe {{tome:.1f}} %.
[Time falls less than MACs](../concepts/speed.md).
"""


if __name__ == "__main__":
    tyro.cli(main)

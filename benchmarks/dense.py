"""How near the filled grid of a pruned ViT-Tiny comes to the unpruned one's: docs/results/dense.md.

python benchmarks/dense.py --weights FILE --data DIR
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from stamps import written
from tntprune import Random, ToMe, features, load_, record, reduce_
from tntprune.backbones.models import load_model
from tntprune.data.folders import all_photos
from tntprune.data.loading import Photos, collate
from tntprune.data.transforms import transform_for
from tntprune.ops.tokens import order
from tntprune.system.environment import stamp
from tntprune.system.storage import write

MODEL = "vit_tiny_patch16_224"
HEAD = "| method | keep | stayed | merged | dropped | all | dropped, with zeros | dropped, from a shuffled place |"
KEYS = ("stayed", "merged", "dropped", "all", "zeros", "shuffled")
START, END = "<!-- written by benchmarks/dense.py -->", "<!-- end -->"


@torch.inference_mode()
def likeness(model: nn.Module, batches: Any) -> dict[str, float]:
    """Return the mean cosine of each place's feature with the unpruned model's, by what became of the place.

    Args:
        model: A reduced model with one location.
        batches: Of images (B, C, H, W) and the unpruned model's features (B, D, rows, columns).

    Returns:
        Means for places that `stayed`, were `merged` or `dropped`, for `all`, and of the dropped ones as they would be
        with zeros in them, or with the fillings of all the image's dropped places shuffled.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for images, wanted in batches:
        with record(model) as trace:
            filled = features(model, images).flatten(2)  # (B, D, N)
        wanted = wanted.flatten(2)
        carrier = list(trace.carrier.values())[-1]  # (B, N)
        own = torch.arange(carrier.shape[1])
        cosine = F.cosine_similarity(filled, wanted, dim=1)  # (B, N)
        dropped = carrier < 0
        groups = {"stayed": carrier == own, "merged": (carrier >= 0) & (carrier != own), "dropped": dropped}
        for name, places in {**groups, "all": dropped | True}.items():
            found.setdefault(name, []).append(cosine[places])
        for image, truth, gone in zip(filled, wanted, dropped, strict=True):
            places = gone.nonzero()[:, 0]
            other = image[:, places[order(len(places), 0)]]
            found.setdefault("shuffled", []).append(F.cosine_similarity(other, truth[:, places], dim=0))
        found.setdefault("zeros", []).append(torch.zeros(int(dropped.sum())))  # as torch defines the cosine with 0
    return {name: torch.cat(values).mean().item() for name, values in found.items()}


def main(
    weights: Path, data: Path, reducer: str = "pretrained", out: Path = Path("docs/results/dense.md"), limit: int = 325
) -> None:
    """Measure and write the table into the page.

    Args:
        weights: Of vit_tiny_patch16_224.
        data: A folder of photos.
        reducer: A training of TNT, or "pretrained" for the scorers that come with the library.
        out: The page.
        limit: Photos to use at most.
    """
    model = load_model(MODEL, weights)
    photos = all_photos(data)
    photos = photos[:: max(1, len(photos) // limit)][:limit]
    loader = DataLoader(Photos(photos, transform_for(model)), batch_size=50, collate_fn=collate)
    with torch.inference_mode():
        batches = [(batch.images, features(model, batch.images)) for batch in tqdm(loader, desc="unpruned")]
    rows = []
    for keep in (0.7, 0.5):
        for name in ("TNT", "random drop", "ToMe"):
            if name == "TNT":
                load_(model, reducer, at=3, keep=keep)
            else:
                reduce_(model, Random(at=3, keep=keep) if name == "random drop" else ToMe(at=3, keep=keep))
            found = likeness(model, tqdm(batches, desc=f"{name} {keep}"))
            told = " | ".join("" if (x := found[key]) != x else f"{x:.3f}" for key in KEYS)
            rows.append(f"| {name} | {keep} | {told} |")
    text = "\n".join([
        START, f"Written by `python benchmarks/dense.py`: {len(photos)} photos of `{data.name}`, {stamp()}.", "",
        HEAD, "|---|---:|---:|---:|---:|---:|---:|---:|", *rows, END,
    ])  # fmt: skip
    page = out.read_text()
    before, rest = page.split(START)
    write(out, (before + text + rest.split(END)[1]).encode())
    written(out)


if __name__ == "__main__":
    tyro.cli(main)

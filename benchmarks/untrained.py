"""Methods that need no training beside trained TNT, on a real model: docs/results/untrained.md.

python benchmarks/untrained.py --data ../shared/data --out runs/untrained

Each row is kept in a file of its own, so that it resumes where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from results import fitted
from stamps import written
from tntprune import TNT, EViT, Random, ToMe, TopK, ZeroTPrune, load_, macs, reduce_, restore_
from tntprune.backbones.models import load_model
from tntprune.data.folders import labelled_photos
from tntprune.data.loading import Photos, collate
from tntprune.data.transforms import transform_for
from tntprune.methods import Config
from tntprune.system.environment import stamp
from tntprune.system.storage import write

MODEL = "vit_tiny_patch16_224"
BUDGETS = (0.622e9, 0.510e9)  # MACs per image, over the whole model
KEEP = (0.5, 0.25)  # after block 3
WHOLE = tuple(range(1, 12))
LEARNED = tuple(range(1, 6))  # blocks of the scorers that come with the library
RANKED = (4, 7, 10)  # for methods that rank by attention; EViT's own
METHODS: dict[str, tuple[Callable[[float], Config], Callable[[float], Config]]] = {  # at block 3; in the whole model
    "TNT, by attention": (lambda k: TNT(at=3, keep=k, score="attention"), lambda k: TNT(at=WHOLE, keep=k, score="attention")),
    "ToMe": (lambda k: ToMe(at=3, keep=k, inside=False), lambda k: ToMe(keep=k)),
    "Zero-TPrune": (lambda k: ZeroTPrune(at=3, keep=k, similar=25, beyond=False), lambda k: ZeroTPrune(keep=k)),
    "EViT": (lambda k: EViT(at=3, keep=k, inside=False), lambda k: EViT(at=RANKED, keep=k)),
    "Top-K": (lambda k: TopK(at=3, keep=k, inside=False), lambda k: TopK(at=RANKED, keep=k)),
    "random drop": (lambda k: Random(at=3, keep=k), lambda k: Random(at=RANKED, keep=k)),
    "TNT, trained": (lambda k: TNT(at=3, keep=k), lambda k: TNT(at=LEARNED, keep=k)),
    "TNT, trained, and attention": (
        lambda k: TNT(at=3, keep=k, score="both"), lambda k: TNT(at=LEARNED, keep=k, score="both"),
    ),
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


def main(data: Path, out: Path, page: Path = Path("docs/results/untrained.md"), photos: int = 500) -> None:
    """Measure every row and write the page.

    Args:
        data: The folder with the weights and imagenet-val-1300.
        out: Where rows are kept.
        page: The page to write.
        photos: How many of the photos are used, from all over the folder.
    """
    model = load_model(MODEL, data / f"{MODEL}.safetensors", "cpu").eval()
    found = labelled_photos(data / "imagenet-val-1300", model)
    chosen = found[:: max(1, len(found) // photos)][:photos]
    loader = DataLoader(Photos(chosen, transform_for(model)), 32, num_workers=2, collate_fn=collate)
    batches = [(batch.images, batch.labels) for batch in tqdm(loader, desc="reading", unit="batch")]
    with torch.inference_mode():
        truth = [model(images) for images, _ in tqdm(batches, desc="unpruned", unit="batch")]
    base = judged(model, batches, truth)
    rows = []
    for name, (single, several) in tqdm(METHODS.items(), unit="method"):
        cells = []
        configs = [*map(single, KEEP), *(fitted(restore_(model), several, budget) for budget in BUDGETS)]
        for number, config in enumerate(configs):
            file, key = out / f"{''.join(filter(str.isalnum, name))}-{number}.json", f"{config} {len(chosen)}"
            known = json.loads(file.read_text()) if file.exists() else {}
            if known.get("config") != key:
                known = {"config": key, **judged(put_on(model, config), batches, truth)}
                out.mkdir(parents=True, exist_ok=True)
                write(file, json.dumps(known).encode())
            cells.append(f"{known['top1']:.1f} ({known['kl']:.3f})")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    heads = [*(f"block 3, {keep:.0%}" for keep in KEEP), *(f"{budget / 1e9:.3f} GMACs" for budget in BUDGETS)]
    table = "\n".join([f"| method | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}", *rows])
    write(page, PAGE.format(
        top1=base["top1"], gmacs=base["macs"] / 1e9, photos=len(chosen), table=table, stamp=stamp()
    ).encode())  # fmt: skip
    written(page)


PAGE = f"""# Without a training

What you get in one line, with no photos. `{MODEL}` on {{photos:,}} photos of the ImageNet validation set; unpruned: top-1 {{top1:.1f}} %,
{{gmacs:.3f}} GMACs.

Written by `python benchmarks/untrained.py --data ../shared/data --out runs/untrained` on {{stamp}}.

Cells are top-1 in percent and, in brackets, the mean divergence from the unpruned model in nats: less is better. Top-1 has a standard
error of 1.7 points on these photos; the divergence tells methods apart better.

{{table}}

* **TNT, by attention** is `TNT(score="attention")`. It ranks by the CLS token's attention and merges as trained TNT does.
* **TNT, trained** has the scorers that come with the library: 1,000 other photos, no labels. "And attention" is `score="both"`, without
  another training; with these scorers it gains nothing.
* In the whole model, TNT by attention acts after blocks 1 to 11 with one keep rate, trained TNT after blocks 1 to 5, for which the
  library has scorers, ToMe in every block, Zero-TPrune at its own blocks, and the others at blocks 4, 7 and 10. Rates are scaled to the budget. Searched plans give more: [TNT in detail](tnt.md).
"""


if __name__ == "__main__":
    tyro.cli(main)

"""Counts the Python calls inside the package that one forward pass of a reduced ViT-Tiny makes.

python benchmarks/calls.py
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import timm
import torch
import tyro

import tntprune
from tntprune import ATS, TNT, AViT, DynamicViT, EViT, EvoViT, Random, ToMe, TopK, ZeroTPrune, reduce_

CONFIGS = {
    "TNT": TNT(at=3),
    "ToMe, r=8 in every block": ToMe(r=8),
    "random drop": Random(at=3),
    "Top-K": TopK(at=3),
    "EViT": EViT(at=3),
    "DynamicViT": DynamicViT(at=3),
    "Zero-TPrune": ZeroTPrune(at=3),
    "ATS": ATS(at=3),
    "A-ViT, half": AViT(at=3),
    "Evo-ViT": EvoViT(at=3),
}
INSIDE = str(Path(tntprune.__file__).parent)


def calls(model: torch.nn.Module, images: torch.Tensor) -> Counter[str]:
    """Return how often each function of the package is called in one forward pass, by file and name."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(INSIDE):
            found[f"{Path(file).relative_to(INSIDE)}:{frame.f_code.co_name}"] += 1

    with torch.inference_mode():
        model(images)  # the first pass makes what later ones read
        sys.setprofile(note)
        try:
            model(images)
        finally:
            sys.setprofile(None)
    return found


def main(model: str = "vit_tiny_patch16_224", each: bool = False) -> None:
    """Print a line per method.

    Args:
        model: A timm model, with random weights.
        each: Also print how often each function is called.
    """
    built = timm.create_model(model).eval()
    images = torch.randn(1, 3, *built.patch_embed.img_size)
    for name, config in CONFIGS.items():
        found = calls(reduce_(built, config), images)
        print(
            f"{name}: {found.total()} calls of {len(found)} functions in {len({k.split(':')[0] for k in found})} files"
        )
        if each:
            print(*(f"  {count:4} {function}" for function, count in found.most_common()), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)

"""The picture in the README: what TNT keeps of scikit-image's sample photos, which are in the public domain.

python benchmarks/pictures.py --weights FILE
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import skimage.data
import tyro
from PIL import Image

from tntprune import load_
from tntprune.backbones.models import load_model
from tntprune.report.draw import photo_maps, sheet, write_picture

PHOTOS = ("chelsea", "rocket")


def main(weights: Path, reducer: str = "pretrained", out: Path = Path("docs/kept.png"), keep: float = 0.25) -> None:
    """Draw each photo, and what is left of it after blocks 1 to 5, each on its own as in the paper's figures.

    Args:
        weights: Of vit_tiny_patch16_224.
        reducer: A training of TNT, or "pretrained" for the scorers that come with the library.
        out: The picture.
        keep: Share of the tokens that stays.
    """
    model = load_model("vit_tiny_patch16_224", weights)
    load_(model, reducer, at=(1, 2, 3, 4, 5), keep=keep)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.png" for name in PHOTOS]
        for name, path in zip(PHOTOS, paths):
            Image.fromarray(getattr(skimage.data, name)()).save(path)
        write_picture(out, sheet(photo_maps(model, paths, each=True)))


if __name__ == "__main__":
    tyro.cli(main)

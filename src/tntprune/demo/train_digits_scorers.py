"""The command that rebuilds the committed TNT scorers of the demo's model.

python -m tntprune.demo.train_digits_scorers --out src/tntprune/assets/pretrained/digits_vit
"""

from __future__ import annotations

import json
from pathlib import Path

from tntprune.backbones.digits_vit import digits_vit
from tntprune.demo.digits import cluttered_digits
from tntprune.methods import TNT
from tntprune.reduce import reduce_
from tntprune.serialization.checkpoint import save
from tntprune.training.calibrate import calibrate_


def rebuild(out: Path, epochs: int = 6, seed: int = 0) -> None:
    """Train one scorer for each of the blocks 1 to 4 on cluttered training digits, without labels, and save them."""
    images, _ = cluttered_digits("train", copies=2, seed=seed)
    model = reduce_(digits_vit(), TNT(at=2, keep=0.5, noise_blocks=(1, 2, 3, 4)))
    calibrate_(model, images, epochs=epochs, seed=seed, amp="none")
    about = {"command": "python -m tntprune.demo.train_digits_scorers", "training": {"epochs": epochs, "seed": seed}}
    save(model, out, made_by=json.dumps(about))


if __name__ == "__main__":
    import tyro

    tyro.cli(rebuild)

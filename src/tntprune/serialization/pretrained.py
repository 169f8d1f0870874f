"""Reductions that come with the library, for models it recognises."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from tntprune.backbones.attach import base_of
from tntprune.errors import UserError
from tntprune.serialization.fingerprint import difference, full_name, identity
from tntprune.system.storage import read_metadata

SHIPPED = "pretrained"  # the word for them where a folder or a Hub id is expected


def shipped() -> dict[str, Path]:
    """Their files, by the names of their models."""
    folder = Path(__file__).parents[1] / "assets" / "pretrained"
    return {path.parent.name: path for path in sorted(folder.glob("*/*.safetensors"))}


def find_shipped(model: nn.Module) -> Path:
    """The file of the reduction that was made for a model.

    Raises:
        UserError: there is none for it, or its weights are not those that the name promises.
    """
    name = full_name(identity(model)) or f"this {type(base_of(model)).__name__}"
    files = shipped()
    if name not in files:
        raise UserError(
            f"{SHIPPED}: nothing is shipped for {name}, only for {', '.join(files)}; train scorers of your own with "
            "`tntprune train` or tntprune.calibrate_"
        )
    recorded = json.loads(read_metadata(files[name])["model"])
    if told := difference(model, recorded["norms"]):
        raise UserError(
            f"{SHIPPED}: was made for the pretrained weights of {name}, and these are others ({told}); load those "
            "first, or train scorers of your own with `tntprune train` or tntprune.calibrate_"
        )
    return files[name]

"""Reductions that come with the library, for models it recognises."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from tntprune.backbones.attach import base_of
from tntprune.errors import UserError
from tntprune.serialization.fingerprint import difference, full_name, identity
from tntprune.system.storage import read_metadata

PRETRAINED = "pretrained"  # the word for them where a folder or a Hub id is expected
OWN = "train scorers of your own with `tntprune train` or tntprune.calibrate_"


def pretrained_files() -> dict[str, Path]:
    """Return their files, by the names of their models."""
    folder = Path(__file__).parents[1] / "assets" / "pretrained"
    return {path.parent.name: path for path in sorted(folder.glob("*/*.safetensors"))}


def find_pretrained(model: nn.Module) -> Path:
    """Return the file of the reduction that was made for a model.

    Raises:
        UserError: there is none for it, or its weights are not those that the name promises.
    """
    name = full_name(identity(model)) or f"this {type(base_of(model)).__name__}"
    files = pretrained_files()
    if name not in files:
        raise UserError(f"{PRETRAINED}: nothing is shipped for {name}, only for {', '.join(files)}; {OWN}")
    if told := difference(model, json.loads(read_metadata(files[name])["model"])["norms"]):
        raise UserError(
            f"{PRETRAINED}: was made for the pretrained weights of {name}, and these are others ({told}); load those "
            f"first, or {OWN}"
        )
    return files[name]

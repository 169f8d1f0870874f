"""Whether a model has classes, and their names, kept with weights that were trained on somebody's own photos."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.data import infer_imagenet_subset
from torch import nn

from tntprune.errors import UserError
from tntprune.system.storage import read_metadata

ENTRY = "classes"  # of the metadata of a file of weights
PROJECTED = ("_clip_", "_mci_", "_pe_core_")  # in timm's names of towers that were trained beside a text tower


def projects(model: Any) -> bool:
    """Return whether what timm calls the classifier of a model is a CLIP's projection into the space of its texts."""
    about = getattr(model, "pretrained_cfg", None) or {}
    width = about.get("num_classes")
    tower = any(part in f"{about.get('architecture') or ''}" for part in PROJECTED)
    return bool(
        tower and width and width == model.num_classes and infer_imagenet_subset({"num_classes": width}) is None
    )


def class_names(model: nn.Module) -> list[str]:
    """Return the names of a model's classes in their order, where somebody gave them any; else none.

    Of timm's models it is `label_names` that tells them, of those of transformers `id2label`.
    """
    told = getattr(getattr(model, "config", None), "id2label", None) or {}
    own = [str(told[number]) for number in sorted(told)]
    return _given_names(model) or ([] if all(name.startswith("LABEL_") for name in own) else own)


def _given_names(model: nn.Module) -> list[str]:
    about = getattr(model, "pretrained_cfg", None) or {}
    return [str(name) for name in about.get("label_names") or ()]


def name_classes(model: Any, names: Sequence[str]) -> None:
    """Let a model know the names of its classes, in their order."""
    model.pretrained_cfg = {**(getattr(model, "pretrained_cfg", None) or {}), "label_names": tuple(names)}


def packed_names(model: nn.Module) -> dict[str, str]:
    """Return the entry that keeps the names in a file of weights; none where there are none, or its config has them."""
    names = _given_names(model)
    fits = len(names) == getattr(model, "num_classes", len(names))  # not those of a head that was replaced
    return {ENTRY: json.dumps(names)} if names and fits else {}


def saved_names(path: Path) -> list[str]:
    """Return the names that a file of weights keeps, if any.

    Raises:
        UserError: they are no list of different names.
    """
    if path.suffix.lower() != ".safetensors":
        return []
    try:
        names = json.loads(read_metadata(path).get(ENTRY, "[]"))
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
        raise UserError(f"{path}: broken names of classes in its metadata; expected a list of different names")
    return names

"""Which model a reduction was made for: its name, and a few numbers that tell its weights from others."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tntprune.errors import UserNote

TENSORS = 4
TOLERANCE = 0.01  # half precision moves a norm by far less, and another training by far more
SKIPPED = ("reduction", "head", "pos_embed", "classifier")  # they change with the classes and the size of the images


def identity(model: nn.Module) -> dict[str, Any]:
    """Return what a model is known by, reduced or not.

    Returns:
        `architecture` and `tag` as timm names them, `hub`, its id there (each empty where there is none), and `norms`:
        the L2 norms of a few of its matrices, from first to last, by name; none of a shape without weights.
    """
    about = getattr(model, "pretrained_cfg", None) or {}
    matrices = {
        name: value
        for name, value in model.named_parameters()
        if value.ndim > 1 and value.shape[0] > 1 and not any(word in name for word in SKIPPED)
    }
    names = list(matrices)
    chosen = [names[number * (len(names) - 1) // (TENSORS - 1)] for number in range(TENSORS)] if names else []
    return {
        "architecture": str(about.get("architecture") or ""),
        "tag": str(about.get("tag") or ""),
        "hub": str(about.get("hf_hub_id") or ""),
        "norms": {name: _norm(matrices[name]) for name in dict.fromkeys(chosen) if not matrices[name].is_meta},
    }


def _norm(matrix: torch.Tensor) -> float:
    return round(float(matrix.detach().float().norm()), 6)


def full_name(identity: dict[str, Any]) -> str:
    """Return a model's name as timm writes it, `architecture.tag`; empty if the model is none of timm's."""
    return ".".join(filter(None, (identity["architecture"], identity["tag"])))


def difference(model: nn.Module, norms: dict[str, float]) -> str | None:
    """Say how a model's weights differ from those with such norms; None if they do not, or if it has no values."""
    own = dict(model.named_parameters())
    if any(value.is_meta for value in own.values()):
        return None
    for name, expected in norms.items():
        if name not in own:
            return f"it has no {name}"
        norm = _norm(own[name])
        if not abs(norm - expected) <= TOLERANCE * expected:  # NaN differs as well
            return f"{name} has a norm of {norm:.2f}, not {expected:.2f}"
    return None


def warn_of_others(path: Path, model: nn.Module, recorded: dict[str, Any]) -> None:
    """Warn if what is in a file was made for other weights than those of an unpruned model of the same shape.

    Args:
        path: Of the file.
        model: Not reduced.
        recorded: The `identity` in the file. What is not of that form, or of other parameters, says nothing.

    Warns:
        UserNote: it was.
    """
    norms, own = recorded.get("norms"), dict(model.named_parameters())
    known = norms.items() if isinstance(norms, dict) else ()
    if told := difference(model, {name: n for name, n in known if name in own and isinstance(n, int | float)}):
        warnings.warn(
            f"{path}: was made for other weights of such a model ({told}), and may not suit these; expected those that "
            "it was made with, or another training",
            UserNote,
            stacklevel=3,
        )


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of everything in a model's state, names and values."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()

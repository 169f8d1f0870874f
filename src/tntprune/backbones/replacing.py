"""Weights of a model that its reduction replaces, and takes back again bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def replace_weights(tower: Any, values: dict[str, torch.Tensor]) -> None:
    """Give a reduced tower other weights, and keep its own on the reduction.

    Args:
        tower: The tower of a reduced model.
        values: By their names in the tower.
    """
    kept = {**tower.reduction.replaced}
    with torch.inference_mode(False):
        for name, value in values.items():
            holder, last, own = _found(tower, name)
            kept.setdefault(name, own)
            value = value.detach().clone().to(own.device, own.dtype)
            setattr(holder, last, nn.Parameter(value, requires_grad=own.requires_grad))
    tower.reduction.replaced = kept


def take_back(tower: Any) -> None:
    """Give a tower its own weights again; one whose weights nobody replaced stays as it is.

    They have the device and the precision that the model has now.
    """
    with torch.inference_mode(False):
        for name, own in tower.reduction.replaced.items():
            holder, last, now = _found(tower, name)
            if own.device != now.device or own.dtype != now.dtype:
                own = nn.Parameter(own.detach().to(now.device, now.dtype), requires_grad=own.requires_grad)
            setattr(holder, last, own)


def undo(tower: Any) -> None:
    """Take back a correction for good."""
    take_back(tower)
    tower.reduction.replaced, tower.reduction.corrected = {}, 0


def replaced_weights(tower: Any) -> dict[str, torch.Tensor]:
    """Return the values that a reduction put in the place of a tower's own, by name; none if it put none there."""
    return {name: _found(tower, name)[2].detach() for name in tower.reduction.replaced}


def holders_of(tower: Any) -> set[nn.Module]:
    """Return the modules whose weights a reduction replaced; none of a tower that is not reduced."""
    method = getattr(tower, "reduction", None)
    return {_found(tower, name)[0] for name in getattr(method, "replaced", ())}


def _found(tower: nn.Module, name: str) -> tuple[nn.Module, str, nn.Parameter]:
    """Return the module that has a parameter, its name there, and the parameter."""
    path, _, last = name.rpartition(".")
    holder = tower.get_submodule(path)
    return holder, last, holder.get_parameter(last)

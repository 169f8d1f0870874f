"""Models by name: timm's, and the two of ours."""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from tntprune.backbones.vit16 import vit16
from tntprune.errors import UsageError, UserError
from tntprune.storage import read_weights


def check_name(name: str) -> None:
    """Refuse a name that no model has.

    Raises:
        UsageError: with the nearest names there are.
    """
    if name in ("vit16", "digits_vit") or _is_timm(name):
        return
    near = difflib.get_close_matches(name, [*timm.list_models(), "vit16", "digits_vit"], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() lists what there is"
    raise UsageError(f"unknown model {name!r}; expected a timm model, vit16 or digits_vit: {hint}")


def shape_of(name: str) -> nn.Module:
    """A model without weights, on the meta device: for counting, not for running.

    Raises:
        UsageError: no model has that name.
    """
    check_name(name)
    with torch.device("meta"):
        return _build(name)


def load_model(name: str, weights: Path | None = None, device: str = "cpu") -> nn.Module:
    """A model with its weights, in eval mode.

    Args:
        name: A timm model, `vit16` (the paper's), or `digits_vit` (the demo's, which brings its weights).
        weights: A file of weights with timm's names. Without it timm fetches pretrained ones from the Hub.
        device: Where to put it.

    Raises:
        UsageError: no model has that name, or there is no such device.
        UserError: the weights cannot be had, are broken, or belong to another model.
    """
    check_name(name)
    target = check_device(device)
    if weights is not None:
        model = _build(name)
        load_weights(model, weights, name)
    elif name == "vit16":
        raise UserError("vit16: its authors released no weights; expected --weights FILE")
    elif name == "digits_vit":
        from tntprune.digits_vit import digits_vit

        model = digits_vit()
    else:
        model = _fetch(name)
    return model.eval().to(target)


def load_weights(model: nn.Module, path: Path, name: str) -> None:
    """Load a file of weights strictly, except that position embeddings of another image size are resampled by timm.

    Raises:
        UserError: they are broken or belong to another model.
    """
    tensors = loaded = read_weights(path)
    try:
        tensors = _filter_of(model)(loaded, model)
    except Exception as error:  # timm's filter fails in many ways on weights of another kind of model
        raise UserError(f"{path}: not weights of {name} ({_first_line(error)})") from None
    wanted = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    given = {key: tuple(value.shape) for key, value in tensors.items()}
    patch = loaded.get("patch_embed.proj.weight")
    if patch is not None and patch.ndim == 4:  # timm resamples patches of another size too, without a word
        given["patch_embed.proj.weight"] = tuple(patch.shape)
    if missing := sorted(set(wanted) - set(given)):
        raise UserError(f"{path}: not weights of {name}: {len(missing)} tensors are missing, {missing[0]} for one")
    if extra := sorted(set(given) - set(wanted)):
        raise UserError(f"{path}: not weights of {name}: {len(extra)} tensors too many, {extra[0]} for one")
    for key, shape in wanted.items():
        if given[key] != shape:
            raise UserError(f"{path}: not weights of {name}: {key} is {given[key]}, expected {shape}")
    model.load_state_dict(tensors)


def check_device(device: str) -> torch.device:
    """A device that is there.

    Raises:
        UsageError: torch knows no such device, or this machine has none.
    """
    try:
        target = torch.device(device)
        torch.empty(1, device=target).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = _first_line(error)
        raise UsageError(f"device {device!r} cannot be used ({reason}); expected cpu, cuda or mps") from None
    return target


def _filter_of(model: nn.Module) -> Callable[[dict[str, torch.Tensor], nn.Module], dict[str, torch.Tensor]]:
    """What timm does to a file of weights before it loads them; each family has its own beside its class."""
    for kind in type(model).__mro__:
        found: Any = getattr(sys.modules[kind.__module__], "checkpoint_filter_fn", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return lambda tensors, model: tensors


def _is_timm(name: str) -> bool:
    try:
        timm.get_pretrained_cfg(name)  # raises on a tag that the model does not have
    except RuntimeError:
        return False
    return bool(timm.is_model(name))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:100]


def _build(name: str) -> nn.Module:
    if name == "vit16":
        model: nn.Module = vit16()
    elif name == "digits_vit":
        from tntprune.digits_vit import build

        model = build()
    else:
        model = timm.create_model(name)
    return model


def _fetch(name: str) -> nn.Module:
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are told below, in one line
    try:
        model: nn.Module = timm.create_model(name, pretrained=True)
        return model
    except Exception as error:  # no network, no such repository, a proxy: the Hub's client has a dozen of these
        raise UserError(
            f"{name}: pretrained weights could not be fetched from the Hub ({_first_line(error)}); "
            "expected a connection, or --weights FILE with weights on this machine"
        ) from None

"""Models by name: timm's, those of transformers with `hf:` before it, and the two of ours."""

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
from torch.overrides import TorchFunctionMode

from tntprune.backbones.base import find_backbone, supporting
from tntprune.backbones.classnames import name_classes, saved_names
from tntprune.backbones.vit16 import vit16
from tntprune.errors import UsageError, UserError
from tntprune.system.messages import first_line, warn
from tntprune.system.storage import check_finite, check_fits, read_weights

DRAWING = (torch.Tensor.uniform_, torch.Tensor.erfinv_, torch.Tensor.clamp_)  # and all of torch.nn.init
ImgSize = tuple[int, int] | None  # rows and columns of pixels; None for the model's own
HF = "hf:"  # before the names of models of transformers


def check_name(name: str) -> None:
    """Refuse a name that no model has; of one of transformers, that is seen only where its config is read.

    Raises:
        UsageError: with the nearest names there are.
    """
    if name in ("vit16", "digits_vit") or name.startswith(HF) or _is_timm(name):
        return
    near = difflib.get_close_matches(name, [*timm.list_models(), "vit16", "digits_vit"], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() lists what there is"
    raise UsageError(f"unknown model {name!r}; expected a timm model, {HF}FOLDER_OR_ID, vit16 or digits_vit: {hint}")


def files_of_model(name: str) -> list[Path]:
    """List the files that decide what a model in a folder answers; none of a model that timm or the Hub has."""
    files: list[Path] = _hugging_face(name).files() if name.startswith(HF) else []
    return files


def _hugging_face(name: str, img_size: ImgSize = None) -> Any:
    """Read what a model of transformers is.

    Raises:
        UsageError: there is none of that name, it is not supported, or another size of images was asked for.
        UserError: transformers is not installed.
    """
    try:
        from tntprune.backbones.hf.pretrained import Named
    except ImportError:
        raise UserError(f"{name}: transformers is not installed; expected pip install 'tntprune[hf]'") from None
    if img_size is not None:
        raise UsageError(
            f"--img-size {_size(img_size)}: {name} takes images as its image processor makes them; expected none"
        )
    return Named(name)


def shape_of(name: str, img_size: ImgSize = None, weights: Path | None = None) -> nn.Module:
    """Return a model without weights, on the meta device: for counting, not for running.

    Args:
        name: See `load_model`.
        img_size: See `load_model`.
        weights: A file of weights whose classes it has.

    Raises:
        UsageError: no model has that name, or it takes no images of that size.
        UserError: the file cannot be read.
    """
    check_name(name)
    classes = None if weights is None else _classes_in(read_weights(weights))
    with torch.device("meta"), _Unfilled():
        model = _build(name, img_size, classes)
    _name(model, weights)
    return model


class _Unfilled(TorchFunctionMode):
    """Do not draw initial weights on the meta device: there are no values, and the first call loads sympy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = func in DRAWING or getattr(func, "__module__", "") == "torch.nn.init"
        return (args or tuple((kwargs or {}).values()))[0] if drawing else func(*args, **(kwargs or {}))


def random_model(name: str, device: str = "cpu", img_size: ImgSize = None, num_classes: int | None = None) -> nn.Module:
    """Return a model with random weights, in eval mode, for timing or training. `torch.manual_seed` decides which.

    Raises:
        UsageError: no model has that name, it takes no images of that size, or there is no such device.
    """
    check_name(name)
    target = check_device(device)
    return _build(name, img_size, num_classes).eval().to(target)


def load_model(name: str, weights: Path | None = None, device: str = "cpu", img_size: ImgSize = None) -> nn.Module:
    """Return a model with its weights, in eval mode.

    Args:
        name: A timm model, `hf:` and a folder or an id of a model of transformers, `vit16` (the paper's), or
            `digits_vit` (the demo's, which brings its weights).
        weights: A file of weights with the model's names; it gets as many classes as they have. Without it timm or
            transformers fetches pretrained ones from the Hub, or from the folder.
        device: Where to put it.
        img_size: Rows and columns of pixels, if not the model's own; timm resamples the position embeddings.

    Raises:
        UsageError: no model has that name, it takes no images of that size, or there is no such device.
        UserError: the weights cannot be had, are broken, or belong to another model.
    """
    check_name(name)
    target = check_device(device)
    if weights is not None:
        tensors = read_weights(weights)
        model = _build(name, img_size, _classes_in(tensors))
        find_backbone(model)  # a model that is not supported is told first, and not that the weights do not fit
        _fill(model, tensors, weights, name)
        _name(model, weights)
    elif name.startswith(HF):
        model = _hugging_face(name, img_size).load()
    elif name == "vit16":
        raise UserError("vit16: its authors released no weights; expected --weights FILE")
    elif name == "digits_vit":
        from tntprune.backbones.digits_vit import digits_vit

        model = digits_vit()
        if img_size is not None:
            _check_multiple(name, model, img_size)
            model.set_input_size(img_size)
    else:
        shape_of(name, img_size)  # refuses a size before anything is fetched
        model = _fetch(name, img_size)
    return model.eval().to(target)


def drop_classifier_(model: nn.Module) -> nn.Module:
    """Take the classifier off a model, so that it gives embeddings: of transformers' models the encoder is returned.

    A model that gives embeddings already, such as CLIP's with their projection, stays as it is.

    Raises:
        UserError: the model has a classifier that cannot be taken off.
    """
    if not find_backbone(model).classes(model):
        return model
    encoder: Any = getattr(model, "base_model", model)  # transformers'
    if encoder is not model and supporting(type(encoder)) is not None:
        return encoder  # type: ignore[no-any-return]
    reset = getattr(model, "reset_classifier", None)  # timm's
    if reset is None:
        raise UserError(f"{type(model).__name__} has a classifier that cannot be taken off; expected a model without")
    reset(0)
    return model


def load_weights(model: nn.Module, path: Path, name: str) -> None:
    """Load a file of weights strictly, except that position embeddings of another image size are resampled by timm.

    Raises:
        UserError: they are broken or belong to another model.
    """
    _fill(model, read_weights(path), path, name)


def _fill(model: nn.Module, loaded: dict[str, torch.Tensor], path: Path, name: str) -> None:
    """Do what `load_weights` does, with the tensors of its file."""
    tensors = loaded
    try:
        tensors = _filter_of(model)(loaded, model)
    except Exception as error:  # timm's filter fails in many ways on weights of another kind of model
        raise UserError(f"{path}: not weights of {name} ({first_line(error)})") from None
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
    own = model.state_dict()
    check_fits(path, loaded, own)
    check_fits(path, tensors, own)  # what timm resamples may overflow too
    check_finite(path, tensors)
    model.load_state_dict(tensors)


def check_device(device: str) -> torch.device:
    """Return a device, if it is there.

    Raises:
        UsageError: torch knows no such device, or this machine has none.
    """
    try:
        target = torch.device(device)
        torch.empty(1, device=target).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = first_line(error)
        raise UsageError(f"device {device!r} cannot be used ({reason}); expected cpu, cuda or mps") from None
    return target


def _filter_of(model: nn.Module) -> Callable[[dict[str, torch.Tensor], nn.Module], dict[str, torch.Tensor]]:
    """Return what timm does to a file of weights before it loads them; each family has its own beside its class."""
    for kind in type(model).__mro__:
        found: Any = getattr(sys.modules[kind.__module__], "checkpoint_filter_fn", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return lambda tensors, model: tensors


def _classes_in(tensors: dict[str, torch.Tensor]) -> int | None:
    """Return how many classes the head in a file of weights tells apart; None where it has no such head."""
    head = tensors.get("head.weight", tensors.get("classifier.weight"))
    return len(head) if head is not None and head.ndim == 2 else None


def _name(model: nn.Module, weights: Path | None) -> None:
    """Let a model know the names of its classes, where its weights keep them."""
    names = [] if weights is None else saved_names(weights)
    count = getattr(model, "num_classes", len(names))
    if names and len(names) != count:
        raise UserError(f"{weights}: names {len(names)} classes, and its head has {count}; expected as many")
    if names:
        name_classes(model, names)


def _is_timm(name: str) -> bool:
    try:
        timm.get_pretrained_cfg(name)  # raises on a tag that the model does not have
    except RuntimeError:
        return False
    return bool(timm.is_model(name))


def _build(name: str, img_size: ImgSize = None, num_classes: int | None = None) -> nn.Module:
    """Without weights.

    Raises:
        UsageError: the model takes no images of that size.
    """
    if name.startswith(HF):
        return _hugging_face(name, img_size).build(num_classes)  # type: ignore[no-any-return]
    given = {"img_size": img_size, "num_classes": num_classes}
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    try:
        if name == "vit16":
            model: nn.Module = vit16(**options)
        elif name == "digits_vit":
            from tntprune.backbones.digits_vit import build

            model = build(**options)
        else:
            model = timm.create_model(name, **options)
    except (TypeError, AssertionError, RuntimeError, ValueError, ArithmeticError) as error:  # as the family has it
        if img_size is None:
            raise
        reason = first_line(error)
        raise UsageError(f"--img-size {_size(img_size)}: {name} takes no such images ({reason})") from None
    if img_size is not None:
        _check_multiple(name, model, img_size)
    return model


def _check_multiple(name: str, model: Any, img_size: tuple[int, int]) -> None:
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", (1, 1))
    if any(size < step or size % step for size, step in zip(img_size, patch, strict=True)):
        raise UsageError(f"--img-size {_size(img_size)}: the patches of {name} are {_size(patch)}; expected multiples")


def _size(size: Any) -> str:
    return " ".join(map(str, size))


def _fetch(name: str, img_size: ImgSize = None) -> nn.Module:
    warn(f"asking the Hub for the pretrained weights of {name}")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are told below, in one line
    try:
        options: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
        model: nn.Module = timm.create_model(name, pretrained=True, **options)
        return model
    except Exception as error:  # no network, no such repository, a proxy: the Hub's client has a dozen of these
        raise UserError(
            f"{name}: pretrained weights could not be fetched from the Hub ({first_line(error)}); "
            "expected a connection, or --weights FILE with weights on this machine"
        ) from None

"""Putting a reduction on a model, and taking it off again."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from tntprune.backbones.base import find_backbone, refuse_wrapper, tower_of
from tntprune.backbones.reduced import Reduced
from tntprune.backbones.swapping import (
    forget_replaced,
    obstacle_in,
    parts_of,
    refuse_sharded,
    replaced_in,
    running_device,
    swap,
    swap_back,
)
from tntprune.config import METHODS, Combination, Config
from tntprune.errors import UsageError, UserError
from tntprune.methods.base import Method, implementation
from tntprune.plan import Plan

Model = TypeVar("Model", bound=nn.Module)


def reduce_(model: Model, config: Config | Plan | str | Path, *more: Config, **changes: Any) -> Model:
    """Make a model drop or merge tokens, in place. A reduction that is already there is replaced.

    The model's class is swapped for a static subclass and a submodule `reduction` is added; its own parameters and
    their names stay as they are, so that compile, export, deepcopy and saving go on working.

    Args:
        model: A supported model, see `tntprune info`.
        config: What to do: `TNT(at=3, keep=0.5)`, for example; or "pretrained", a folder, a Hub id or a plan, as for
            `load_`.
        *more: Further reductions at places of their own: `ToMe(at=(6, 7, 8), r=10)`, for example.
        **changes: Options to change in what is loaded: `reduce_(model, "pretrained", keep=0.7)`.

    Returns:
        The same model.

    Raises:
        UserError: the model is not supported, or the method cannot be applied to it, and why.
        UsageError: the config does not fit the model.
    """
    if isinstance(config, str | Path | Plan):
        from tntprune.checkpoint import load_

        if isinstance(config, str) and config in METHODS and not Path(config).exists():
            raise UsageError(f"{config!r}: a method's name; expected its config, tntprune.{METHODS[config].__name__}()")
        return load_(model, config, *more, **changes)
    for one in (config, *more):
        if not isinstance(one, Config):
            what = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
            raise UsageError(f"{what} given; expected a config, such as tntprune.TNT(at=3, keep=0.5)")
    if changes:
        raise UsageError(
            f"{min(changes)}: options go into the config, as in {type(config).__name__}({min(changes)}=...)"
        )
    backbone = find_backbone(model)
    layout, tower = backbone.layout(model), backbone.tower(model)
    given = [part for one in (config, *more) for part in getattr(one, "parts", [one])]
    for part in given:
        if reason := implementation(type(part)).obstacle(layout, part):
            raise UserError(f"{part.method} cannot be applied here: {reason}")
    if reason := obstacle_in(model, backbone):
        raise UserError(f"this {type(model).__name__} cannot be reduced: {reason}")
    if more:
        config = Combination(parts=given)
    kind = implementation(type(config))
    with torch.inference_mode(False):  # or its parameters could never be trained
        method = kind(config, layout).train(tower.training)
        tower.reduction = method.to(running_device(tower))
    swap(model, backbone)
    return model


def restore_(model: Model) -> Model:
    """Take the reduction off, in place: the base model again, bit for bit. A model without one stays as it is.

    Raises:
        UserError: the model is inside another module, compiled or sharded, and what to give instead.
    """
    refuse_wrapper(model)
    tower: Any = tower_of(model)
    if is_reduced(model):
        backbone = find_backbone(model)
        refuse_sharded(model, "restored")
        if reason := replaced_in(model, backbone):
            raise UserError(f"this {type(model).__name__} cannot be restored: {reason}")
        swap_back(model, backbone)
        del tower.reduction
    return model


def base_of(model: Model) -> Model:
    """The unpruned model as a second object that shares every weight with the first."""
    return restore_(twin_of(model))


def twin_of(model: Model) -> Model:
    """The same model as a second object that shares every weight with the first, to put another reduction on."""
    own = set(parts_of(model, find_backbone(model)))  # the modules whose classes a reduction swaps

    def doubled(module: Any) -> Any:
        """Copy the module if it is one of those, or holds one of them."""
        inner = {name: doubled(child) for name, child in module._modules.items() if child is not None}
        if module not in own and all(inner[name] is module._modules[name] for name in inner):
            return module
        twin = copy.copy(module)
        twin._modules = {**module._modules, **inner}
        twin.__dict__.pop("traces", None)  # nobody records it
        forget_replaced(twin)
        return twin

    return doubled(model)  # type: ignore[no-any-return]


def is_reduced(model: nn.Module) -> bool:
    """Whether there is a reduction on a model."""
    return isinstance(tower_of(model), Reduced)


def reduction_of(model: nn.Module) -> Method:
    """The method of a reduced model.

    Raises:
        UserError: the model is not reduced.
    """
    tower = tower_of(model)
    if not isinstance(tower, Reduced):
        find_backbone(model)  # which says what is the matter with one that is wrapped, or not supported
        raise UserError(f"{type(model).__name__} is not reduced; call tntprune.reduce_ first")
    return tower.reduction


def missing_in(learned: Iterable[str], wanted: Iterable[str]) -> str | None:
    """What was not learned though it is wanted, as a sentence's end; None if nothing is missing.

    Args:
        learned: Names such as scorers.6.layers.0.weight.
        wanted: The same.
    """
    known = set(learned)
    missing = next((name for name in sorted(wanted) if name not in known), None)
    if missing is None:
        return None
    part, others = blocks_of([missing]), blocks_of(known)
    if not part or not others or part[0] in others:
        return f"has nothing for {missing}; expected what this version's tntprune.save writes"
    return f"has nothing for block {part[0]}; expected those that it was trained for: {', '.join(map(str, others))}"


def blocks_of(learned: Iterable[str]) -> list[int]:
    """The blocks that something was learned for, by names such as scorers.6.layers.0.weight."""
    numbers = (re.match(r"(?:parts\.\d+\.)?\w+\.(\d+)", name) for name in learned)
    return sorted({int(found[1]) for found in numbers if found})


def inherit(method: Method, learned: dict[str, torch.Tensor]) -> None:
    """Give a method what another one of its kind has learned, which may have learned it for more locations.

    Raises:
        UserError: something that it needs is not there.
    """
    wanted = method.state_dict()
    if missing := missing_in(learned, wanted):
        raise UserError(f"what was learned {missing}")
    method.load_state_dict({name: with_dimension(learned[name]) for name in wanted})


def with_dimension(value: torch.Tensor) -> torch.Tensor:
    """Give a single number one dimension. Earlier files have none; FSDP2 shards no tensor without one."""
    return value.reshape(1) if value.ndim == 0 else value


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model runs."""
    return running_device(model)

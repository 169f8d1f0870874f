"""Changing the classes of a model's modules, so that nothing that has been hung on it bypasses the reduction."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from tntprune.backbones.base import Backbone, kind_of
from tntprune.errors import UserError

REPLACED = ("forward", "forward_features", "forward_head", "forward_intermediates")


def swap(model: nn.Module, backbone: Backbone) -> None:
    """Give a model's tower, holder, blocks and attentions the classes in which a reduction can act."""
    for module in parts_of(model, backbone):
        turn(module, {**backbone.swaps, **backbone.opened}.get(type(module), type(module)))


def swap_back(model: nn.Module, backbone: Backbone) -> None:
    """Give them their own classes again."""
    for module in parts_of(model, backbone):
        turn(module, backbone.plain(module))


def parts_of(model: nn.Module, backbone: Backbone) -> Iterator[nn.Module]:
    """Yield the modules whose classes a reduction swaps, in no particular order and each once."""
    tower = backbone.tower(model)
    kinds = {*backbone.opened, *backbone.opened.values()}
    yield from dict.fromkeys(
        [*backbone.around(model), tower, *(part for part in tower.modules() if kind_of(part) in kinds)]
    )


def turn(module: Any, kind: type[nn.Module]) -> None:
    """Change a module's class. An accelerate hook on it goes on calling its forward, which is another one now."""
    if kind is not type(module):
        if _is_leftover(module):
            del module.forward
        module.__class__ = kind
        rebind(module)


def rebind(module: Any) -> None:
    """Let an accelerate hook on a module, if there is one, call this module's forward, as its class has it now."""
    if _is_hooked(module):
        around = module.__dict__["forward"]
        module._old_forward = MethodType(type(module).forward, module)
        module.forward = update_wrapper(partial(around.func, module), module._old_forward)


def forget_replaced(module: Any) -> None:
    """Give a copy of a module the methods of its class again, where somebody replaced them on the original.

    They would call the original. Hooks of accelerate stay, and call the copy.
    """
    rebind(module)
    for method in REPLACED:
        if method != "forward" or not _is_hooked(module):
            module.__dict__.pop(method, None)


def obstacle_in(model: nn.Module, backbone: Backbone) -> str | None:
    """Return why a reduction would be bypassed by what has been done to this one model, and what would do; else None.

    Args:
        model: A model that is not reduced yet, or is.
        backbone: Its adapter.
    """
    for module in parts_of(model, backbone):
        if kind_of(module) is not type(module):
            where = f"{_name(module, model) or 'the model'} ({type(module).__name__})"
            return f"{where} has been sharded by fully_shard; expected tntprune.reduce_ first, and fully_shard then"
    if reason := replaced_in(model, backbone):
        return reason
    devices = {str(device) for device in _devices(backbone.tower(model))}
    if len(devices) > 1:
        return (
            f"its blocks run on several devices ({', '.join(sorted(devices))}), and a reduction hands tokens from "
            "block to block on one; expected one device, with weights that do not fit offloaded to the CPU or the disk"
        )
    return None


def replaced_in(model: nn.Module, backbone: Backbone) -> str | None:
    """Return which method was replaced on this one model, so that its class does not say what is run; else None.

    Args:
        model: A model, reduced or not.
        backbone: Its adapter.
    """
    for module in parts_of(model, backbone):
        for method in REPLACED:
            given = module.__dict__.get(method)
            if given is None or (method == "forward" and (_is_hooked(module) or _is_leftover(module))):
                continue
            name = _name(module, model)
            by = f"{getattr(given, '__module__', '?')}.{getattr(given, '__qualname__', type(given).__name__)}"
            own = f"model.get_submodule({name!r})" if name else "model"
            return (
                f"{method} of {name or 'the model'} ({type(module).__name__}) has been replaced by {by}, which would "
                f"bypass the reduction; expected the method of its class (del {own}.{method})"
            )
    return None


def _name(module: nn.Module, model: nn.Module) -> str:
    return next((name for name, part in model.named_modules() if part is module), "")


def _is_leftover(module: Any) -> bool:
    """Return whether the class's forward stands on the instance too, as removed hooks of accelerate leave it."""
    given, kind = module.__dict__.get("forward"), cast(Any, type(module))
    return isinstance(given, MethodType) and given.__self__ is module and given.__func__ is kind.forward


def refuse_sharded(model: nn.Module, verb: str) -> None:
    """Refuse a model that FSDP2 has sharded, wholly or in part.

    Args:
        model: Any module.
        verb: What was to be done, for the message.

    Raises:
        UserError: it is sharded.
    """
    if any(kind_of(module) is not type(module) for module in model.modules()):
        raise UserError(f"a model sharded by fully_shard cannot be {verb}; expected it before it is sharded")


def running_device(model: nn.Module) -> torch.device:
    """Return the device on which a model runs, also where its weights lie elsewhere until they are needed."""
    hooked = next(iter(_devices(model)), None)
    return next(model.parameters()).device if hooked is None else hooked


def _devices(tower: nn.Module) -> dict[torch.device, None]:
    """Return the devices to which accelerate's hooks take the inputs of a tower's modules."""
    found: dict[torch.device, None] = {}
    for module in tower.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            device = getattr(one, "execution_device", None)
            if device is not None:
                found[torch.device(device if not isinstance(device, int) else f"cuda:{device}")] = None
    return found


def _is_hooked(module: Any) -> bool:
    """Return whether accelerate wraps a module's forward, as it does for several devices and offloading."""
    around = module.__dict__.get("forward")
    return "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ and isinstance(around, partial)

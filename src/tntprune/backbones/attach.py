"""Putting a method on a model, and taking it off again: the engine under `tntprune.reduce_` and `tntprune.restore_`."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from tntprune.backbones.base import Backbone, find_backbone, refuse_wrapper, tower_of
from tntprune.backbones.reduced import Reduced
from tntprune.backbones.replacing import holders_of, take_back
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
from tntprune.errors import UsageError, UserError
from tntprune.methods import Combination, Config, implementation, obstacle_to
from tntprune.methods.base import Layout, Method

Model = TypeVar("Model", bound=nn.Module)
HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name]  # the attributes that keep a module's hooks


def attach(
    model: Model, config: Config, *more: Config, output: str | None = None, last_block: str | None = None
) -> Model:
    """Put a reduction on a model, in place, instead of the one that may be there.

    Args:
        model: A supported model.
        config: What to do.
        *more: Further reductions at places of their own.
        output: What the tower of a larger model gives to what follows, see `Backbone.outputs`; None is its default.
        last_block: "all" or "prefix", see `tntprune.reduce_`; None is "all".

    Returns:
        The same model.

    Raises:
        UserError: the model is not supported, or the method cannot be applied to it, and why.
        UsageError: the config does not fit the model.
    """
    for one in (config, *more):
        if not isinstance(one, Config):
            what = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
            raise UsageError(f"{what} given; expected a config, such as tntprune.TNT(at=3, keep=0.5)")
    backbone = find_backbone(model)
    output = _output(model, backbone, output)
    tower, cell = backbone.tower(model), backbone.cell(model, output)
    layout = backbone.layout(model).of_cells(cell)
    given = [part for one in (config, *more) for part in getattr(one, "parts", [one])]
    for part in given:
        if reason := obstacle_to(type(part), layout, part):
            if cell > 1:
                reason += f"; output={output!r} keeps whole cells of {cell} x {cell} patches, unlike output='grid'"
            raise UserError(f"{part.method} cannot be applied here: {reason}")
    if reason := obstacle_in(model, backbone):
        raise UserError(f"this {type(model).__name__} cannot be reduced: {reason}")
    if more:
        config = Combination(parts=given)
    kind = implementation(type(config))
    if any(implementation(type(part)).needs_costs for part in given):
        layout = layout._replace(costs=tuple((b.attention, b.pair, b.mlp) for b in backbone.costs(model).blocks))
    if isinstance(tower, Reduced):
        take_back(tower)  # a correction was for the reduction that goes
    with torch.inference_mode(False):  # or its parameters could never be trained
        method = kind(config, layout).train(tower.training)
        method.output, method.cell = output, cell
        if layout.weighs and any(block.inside or block.sees for block in method.plan(layout.patches)):
            raise UserError(
                f"{config.method} acts inside blocks or reads their attention, and a token is a cell of patches here; "
                "expected a method that needs the tokens alone, such as tnt"
            )
        method.last_block = _last_block(model, backbone, method, last_block)
        _check_read(model, backbone, method)
        method.settle()
        tower.reduction = method.to(running_device(tower))
    swap(model, backbone)
    return model


def layout_for(model: nn.Module, output: str | None) -> Layout:
    """Return the shape of a model as a method finds it, see `attach`."""
    backbone = find_backbone(model)
    return backbone.layout(model).of_cells(backbone.cell(model, _output(model, backbone, output)))


def _output(model: nn.Module, backbone: Backbone, output: str | None) -> str:
    """Return what the tower is to give to what follows; "" where there is no choice.

    Raises:
        UsageError: the model cannot be given what was asked for, and why.
    """
    choices = backbone.outputs(model)
    usable = [name for name, reason in choices.items() if not reason]
    if output is None:
        return usable[0] if usable else ""
    if output not in choices:
        wanted = f"expected {' or '.join(map(repr, usable))}" if usable else "expected a whole vision-language model"
        raise UsageError(f"output={output!r} of {type(model).__name__}; {wanted}")
    if choices[output]:
        raise UsageError(
            f"output={output!r} of {type(model).__name__}: {choices[output]}; expected {' or '.join(map(repr, usable))}"
        )
    return output


def _last_block(model: nn.Module, backbone: Backbone, method: Method, wanted: str | None) -> str:
    """Return which tokens the last block is to compute.

    Raises:
        UsageError: there is no such choice, or something reads the other tokens.
    """
    if wanted in (None, "all"):
        return "all"
    if wanted != "prefix":
        raise UsageError(f"last_block={wanted!r}; expected 'all' or 'prefix'")
    reason = backbone.last_block_obstacle(model)
    if reason is None and not method.spares_prefix:
        reason = f"what {method.config.method} does behind that block changes prefix tokens too"
    if reason:
        raise UsageError(f"last_block='prefix' of {type(model).__name__}: {reason}; expected 'all'")
    steps = method.steps(method.layout.patches)
    if steps and steps[0].place.block >= method.layout.depth:
        raise UsageError(
            f"last_block='prefix': {method.config.method} acts in the last block alone, which computes no patch token "
            "then; expected an earlier block, or last_block='all'"
        )
    return "prefix"


def _check_read(model: nn.Module, backbone: Backbone, method: Method) -> None:
    """Refuse to drop tokens only after the last block that anybody reads.

    Raises:
        UsageError: a location is behind it.
    """
    last, steps = backbone.last_read(model), method.steps(method.layout.patches)
    if steps and steps[0].place.block > last:
        raise UsageError(
            f"at={steps[0].place.block}: {type(model).__name__} reads the tokens that leave block {last} of the "
            f"{method.layout.depth} of its vision tower, so that nothing sees what goes later; expected a location up "
            f"to {last}"
        )


def detach(model: Model) -> Model:
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
        take_back(tower)
        swap_back(model, backbone)
        del tower.reduction
    return model


def base_of(model: Model) -> Model:
    """Return the unpruned model as a second object that shares every weight with the first but those corrected."""
    return detach(twin_of(model))


def twin_of(model: Model) -> Model:
    """Return the same model as a second object that shares every weight with the first, to put another reduction on."""
    own = set(parts_of(model, find_backbone(model)))  # the modules whose classes a reduction swaps
    corrected = holders_of(tower_of(model))
    own |= corrected

    def doubled(module: Any) -> Any:
        """Copy the module if it is one of those, or holds one of them."""
        inner = {name: doubled(child) for name, child in module._modules.items() if child is not None}
        if module not in own and all(inner[name] is module._modules[name] for name in inner):
            return module
        twin = copy.copy(module)
        twin._modules = {**module._modules, **inner}
        for name in HOOKS:  # what is hung on the one, by transformers for a start, is not hung on the other
            setattr(twin, name, copy.copy(getattr(module, name)))
        twin.__dict__.pop("traces", None)  # nobody records it
        if module in corrected:  # the twin may take back its own
            twin._parameters = {**module._parameters}
        forget_replaced(twin)
        return twin

    return doubled(model)  # type: ignore[no-any-return]


def is_reduced(model: nn.Module) -> bool:
    """Return whether there is a reduction on a model."""
    return isinstance(tower_of(model), Reduced)


def reduction_of(model: nn.Module) -> Method:
    """Return the method of a reduced model.

    Raises:
        UserError: the model is not reduced.
    """
    tower = tower_of(model)
    if not isinstance(tower, Reduced):
        find_backbone(model)  # which says what is the matter with one that is wrapped, or not supported
        raise UserError(f"{type(model).__name__} is not reduced; call tntprune.reduce_ first")
    return tower.reduction


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model runs."""
    return running_device(model)

"""`tntprune info` and `tntprune macs`: what is counted without running a model."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Annotated, Any

from tntprune.cli.console import tell
from tntprune.cli.flags import GROUP, ImgSize, Json, Model, Reduction, tell_drained
from tntprune.errors import UserNote
from tntprune.system.units import unit_of

if TYPE_CHECKING:
    from torch import nn

    from tntprune.analysis.macs import Macs

DEAR, WINDOW = 0.03, 16  # share of the MACs from which on a method is told to be dear; the window that is tried


def info(model: Model, img_size: ImgSize = None, json: Json = False) -> int:
    """Show the tokens and blocks of a model, and which methods it can take. Needs no weights."""
    from tntprune.analysis.macs import macs as count
    from tntprune.backbones.base import find_backbone
    from tntprune.backbones.models import shape_of
    from tntprune.methods import all_methods, obstacle_to

    built = shape_of(model, img_size)
    layout = find_backbone(built).layout(built)
    obstacles = {name: obstacle_to(config, layout) for name, config in all_methods().items()}
    whole = find_backbone(built).last_block_obstacle(built)
    parameters = sum(p.numel() for p in built.parameters())
    data: dict[str, Any] = {
        "model": model, "family": layout.family, "parameters": parameters, "blocks": layout.depth,
        "embed_dim": layout.embed_dim, "grid": list(layout.grid), "patch_tokens": layout.patches,
        "prefix_tokens": layout.prefix, "cls_token": layout.cls, "macs": count(built).macs, "methods": obstacles,
        "last_block": {"prefix": whole},
    }  # fmt: skip
    scale, unit = unit_of(data["macs"])
    lines = [
        f"{model}: {layout.family}, {parameters / 1e6:.1f} M parameters, {data['macs'] / scale:.2f} {unit}",
        f"  {layout.depth} blocks of width {layout.embed_dim}",
        f"  {layout.patches} patch tokens ({layout.grid[0]} x {layout.grid[1]}) and {layout.prefix} prefix tokens, "
        f"{'the first a CLS token' if layout.cls else 'no CLS token'}",
    ]
    lines += [f"  {name:10} {'can be applied' if why is None else 'cannot: ' + why}" for name, why in obstacles.items()]
    lines.append(f"  last block for prefix tokens alone: {'can be asked for' if whole is None else 'cannot: ' + whole}")
    tell(json, data, "\n".join(lines))
    return 0


def macs(
    model: Model,
    reduction: Annotated[Reduction, GROUP] = Reduction(),
    img_size: ImgSize = None,
    json: Json = False,
) -> int:
    """Count the multiply-accumulates of a model, block by block, by formula, without running it. Needs no weights."""
    from dataclasses import asdict

    from tntprune.analysis.macs import macs as count
    from tntprune.backbones.models import shape_of
    from tntprune.reduce import reduce_

    built = shape_of(model, img_size)
    if reduction.reducer is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # nothing can be put into a model without weights
            reduction.apply(built)
    elif configs := reduction.configs():
        reduce_(built, *configs, last_block=reduction.last_block)
        tell_drained(built)
    found = count(built)
    tell_dear(built, found)
    tell(json, asdict(found), str(found))
    return 0


def tell_dear(model: nn.Module, found: Macs) -> None:
    """Warn where a method that compares all tokens costs much of the model, and windows would make it cheaper.

    Warns:
        UserNote: they would at least halve what the method costs.
    """
    from tntprune.backbones.attach import is_reduced, reduction_of
    from tntprune.methods import implementation, options

    own = sum(found.reduction.values())
    method = reduction_of(model) if is_reduced(model) else None
    config: Any = None if method is None else method.config
    if method is None or own <= DEAR * found.macs or "window" not in options(type(config)) or config.window:
        return
    if not getattr(config, "merges", True):
        return
    near = implementation(type(config))(config.changed(window=WINDOW), method.layout)
    less = sum(near.macs(step) for step in near.steps(near.layout.patches))
    if less <= own / 2:
        warnings.warn(
            f"{config.method} itself takes {100 * own / found.macs:.1f} % of the MACs, because it compares all tokens; "
            f"with --window {WINDOW} it would take {100 * less / (found.macs - own + less):.1f} %",
            UserNote,
            stacklevel=2,
        )

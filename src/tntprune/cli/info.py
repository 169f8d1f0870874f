"""`tntprune info`."""

from __future__ import annotations

from typing import Any

from tntprune.cli.console import tell
from tntprune.cli.shared_flags import ImgSize, Json, Model
from tntprune.methods import all_methods
from tntprune.system.units import unit_of


def info(model: Model, img_size: ImgSize = None, json: Json = False) -> int:
    """Tokens, blocks, what can be applied to a model, and why not the rest. Needs no weights."""
    from tntprune.analysis.macs import macs as count
    from tntprune.backbones.base import find_backbone
    from tntprune.backbones.models import shape_of
    from tntprune.methods import obstacle_to

    built = shape_of(model, img_size)
    layout = find_backbone(built).layout(built)
    obstacles = {name: obstacle_to(config, layout) for name, config in all_methods().items()}
    parameters = sum(p.numel() for p in built.parameters())
    data: dict[str, Any] = {
        "model": model, "family": layout.family, "parameters": parameters, "blocks": layout.depth,
        "embed_dim": layout.embed_dim, "grid": list(layout.grid), "patch_tokens": layout.patches,
        "prefix_tokens": layout.prefix, "cls_token": layout.cls, "macs": count(built).macs, "methods": obstacles,
    }  # fmt: skip
    scale, unit = unit_of(data["macs"])
    lines = [
        f"{model}: {layout.family}, {parameters / 1e6:.1f} M parameters, {data['macs'] / scale:.2f} {unit}",
        f"  {layout.depth} blocks of width {layout.embed_dim}",
        f"  {layout.patches} patch tokens ({layout.grid[0]} x {layout.grid[1]}) and {layout.prefix} prefix tokens, "
        f"{'the first a CLS token' if layout.cls else 'no CLS token'}",
    ]
    lines += [f"  {name:10} {'can be applied' if why is None else 'cannot: ' + why}" for name, why in obstacles.items()]
    tell(json, data, "\n".join(lines))
    return 0

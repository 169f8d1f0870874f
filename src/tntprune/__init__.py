"""Faster vision transformers: drop the tokens they do not need."""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself takes long to import, and Ctrl-C is not yet caught meanwhile
if TYPE_CHECKING:
    from typing import Any

    from tntprune.backbones.vit16 import vit16
    from tntprune.checkpoint import load_, save
    from tntprune.config import (
        ATS,
        TNT,
        AViT,
        DynamicViT,
        EViT,
        EvoViT,
        Random,
        ToMe,
        TopK,
        ZeroTPrune,
    )  # fmt: skip
    from tntprune.counting import macs
    from tntprune.dense import features
    from tntprune.errors import UsageError, UserError
    from tntprune.evaluation import evaluate
    from tntprune.exporters.export import export
    from tntprune.reduce import reduce_, restore_
    from tntprune.search.run import find_plan
    from tntprune.share import push
    from tntprune.trace import record
    from tntprune.train import calibrate_

__version__ = "0.1.0"
__all__ = [
    "ATS", "TNT", "AViT", "DynamicViT", "EViT", "EvoViT", "Random", "ToMe", "TopK", "UsageError", "UserError",
    "ZeroTPrune", "calibrate_", "evaluate", "export", "features", "find_plan", "load_", "macs", "push", "record",
    "reduce_", "restore_", "save", "vit16",
]  # fmt: skip

_HOMES = {
    **dict.fromkeys(
        ("ATS", "TNT", "AViT", "DynamicViT", "EViT", "EvoViT", "Random", "ToMe", "TopK", "ZeroTPrune"), "config"
    ), "UsageError": "errors", "UserError": "errors", "calibrate_": "train", "evaluate": "evaluation",
    "export": "exporters.export", "features": "dense", "find_plan": "search.run", "load_": "checkpoint",
    "macs": "counting", "push": "share", "record": "trace", "reduce_": "reduce",
    "restore_": "reduce", "save": "checkpoint", "vit16": "backbones.vit16",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `tntprune --help` need not wait for torch and timm."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tntprune' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"tntprune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value

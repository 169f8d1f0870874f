"""Faster vision transformers: remove or merge tokens that they do not need."""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself takes long to import, and Ctrl-C is not yet caught meanwhile
if TYPE_CHECKING:
    from typing import Any

    from tntprune.analysis.embed import embed
    from tntprune.analysis.evaluate import evaluate
    from tntprune.analysis.features import features
    from tntprune.analysis.macs import macs
    from tntprune.analysis.record import record
    from tntprune.backbones.vit16 import vit16
    from tntprune.bench.prompts import bench_prompts
    from tntprune.errors import UsageError, UserError
    from tntprune.exporters.export import export
    from tntprune.methods import (
        ATC,
        ATS,
        DTEM,
        MCTF,
        TNT,
        AViT,
        DiffRate,
        DynamicViT,
        EViT,
        EvoViT,
        PiToMe,
        Random,
        ToFu,
        ToMe,
        TopK,
        ZeroTPrune,
        register_method,
    )  # fmt: skip
    from tntprune.methods.base import Layout, Method, ScoringMethod
    from tntprune.methods.config import Config, option
    from tntprune.ops.tokens import Tokens
    from tntprune.reduce import reduce_, restore_
    from tntprune.search.find_plan import find_plan
    from tntprune.serialization.checkpoint import load_, save
    from tntprune.serialization.share import push
    from tntprune.training.calibrate import calibrate_

__version__ = "0.1.0"
__all__ = [
    "ATC", "ATS", "DTEM", "MCTF", "TNT", "AViT", "Config", "DiffRate", "DynamicViT", "EViT", "EvoViT", "Layout",
    "Method", "PiToMe", "Random", "ScoringMethod", "ToFu", "ToMe", "Tokens", "TopK", "UsageError", "UserError",
    "ZeroTPrune", "bench_prompts", "calibrate_", "embed", "evaluate", "export", "features", "find_plan", "load_",
    "macs", "option", "push", "record", "reduce_", "register_method", "restore_", "save", "vit16",
]  # fmt: skip

_HOMES = {
    **dict.fromkeys(
        ("ATC", "ATS", "DTEM", "MCTF", "TNT", "AViT", "DiffRate", "DynamicViT", "EViT", "EvoViT", "PiToMe", "Random",
         "ToFu", "ToMe", "TopK", "ZeroTPrune", "register_method"), "methods"
    ), "Config": "methods.config", "option": "methods.config", "Layout": "methods.base", "Method": "methods.base",
    "ScoringMethod": "methods.base",
    "Tokens": "ops.tokens", "UsageError": "errors", "UserError": "errors",
    "bench_prompts": "bench.prompts",
    "calibrate_": "training.calibrate", "embed": "analysis.embed", "evaluate": "analysis.evaluate",
    "export": "exporters.export", "features": "analysis.features", "find_plan": "search.find_plan",
    "load_": "serialization.checkpoint", "macs": "analysis.macs", "push": "serialization.share",
    "record": "analysis.record", "reduce_": "reduce", "restore_": "reduce",
    "save": "serialization.checkpoint", "vit16": "backbones.vit16",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `tntprune --help` need not wait for torch and timm."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tntprune' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"tntprune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, also those that were not used yet."""
    return sorted({*globals(), *__all__})

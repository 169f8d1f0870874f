"""Starting without torch's compiler, for commands that only count.

timm and torchvision load `torch._dynamo` to mark a few functions. That takes half of the time in which `tntprune info`
starts, and a command that never compiles does not need it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class _Later(ModuleType):
    """Stands in for a module of torch's compiler until somebody asks for more than marks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # of a module's own; whoever lists the loaded modules asks for these
        for later in (NAME, f"{NAME}.utils"):
            if isinstance(sys.modules.get(later), _Later):
                del sys.modules[later]
        return getattr(import_module(self.__name__), name)


def start_lean() -> None:
    """Keep torch's compiler from being loaded at start, and do not search for garbage. For a short-lived process.

    The compiler is still loaded when something asks for it, but functions that timm marked before are not marked.
    Does nothing where torch is loaded already.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    whole, utils = _Later(NAME), _Later(f"{NAME}.utils")
    whole.__dict__.update(__path__=[], utils=utils, disable=_disable)
    utils.__dict__.update(is_compile_supported=lambda device: utils.__getattr__("is_compile_supported")(device))
    sys.modules |= {whole.__name__: whole, utils.__name__: utils}


def _disable(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Stand in for `torch._dynamo.disable`: what is never compiled needs no mark."""
    return _disable if function is None else function

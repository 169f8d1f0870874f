"""Recording what a reduced model keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

from torch import nn

from tntprune.backbones.base import refuse_wrapper, tower_of
from tntprune.backbones.trace import Trace
from tntprune.errors import UserError

LOCK = Lock()  # of the traces of all models: only for as long as one is put in


@contextmanager
def record(model: nn.Module) -> Iterator[Trace]:
    """Record which patches a reduced model keeps in this thread, for as long as the context lasts.

    Args:
        model: A reduced model, or its compiled form.

    Yields:
        A `Trace` that each forward pass fills anew.

    Raises:
        UserError: the model is not reduced.
    """
    inner: Any = getattr(model, "_orig_mod", model)
    refuse_wrapper(inner)
    tower: Any = tower_of(inner)
    if not hasattr(tower, "reduction"):
        raise UserError(f"{type(inner).__name__} is not reduced; call tntprune.reduce_ first")
    own, trace = get_ident(), Trace()
    outer = (tower.traces or {}).get(own)
    _set(tower, own, trace)
    try:
        yield trace
    finally:
        _set(tower, own, outer)


def _set(tower: Any, thread: int, trace: Trace | None) -> None:
    """Let one thread record into a trace, or no more; the others' stay, and copies of the model do not see it."""
    with LOCK:
        found = {**(tower.traces or {}), thread: trace}
        tower.traces = {own: kept for own, kept in found.items() if kept is not None}
        if not tower.traces:
            del tower.traces

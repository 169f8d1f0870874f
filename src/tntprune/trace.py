"""Recording what a reduced model keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import Any

import torch
from torch import nn

from tntprune.errors import UserError
from tntprune.tokens import Tokens

LOCK = Lock()  # of the traces of all models: only for as long as one is put in


@dataclass
class Trace:
    """What was kept in the last forward pass.

    Args:
        kept: For each block after which tokens went (0: before the first), (B, n) patch indices in the original
            grid, row by row, ascending.
            Where the number differs from image to image, and for tokens without a place in the grid, -1 comes first.
        carrier: For the same blocks, (B, N): for every patch of the original grid the index of the kept patch whose
            token carries it (its own where it was kept, another's where it was merged), or -1 where it was dropped.
        counts: (B,) patch tokens of each image that entered each block, and then its MLP, block after block; then those
            that are left.
    """

    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    carrier: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: list[torch.Tensor] = field(default_factory=list)
    ended: bool = False

    def begin(self) -> None:
        """Forget the last forward pass."""
        self.kept.clear()
        self.carrier.clear()
        self.counts.clear()
        self.ended = False

    def count(self, tokens: Tokens) -> None:
        """Note how many tokens go into half a block; not when a block is run again in a backward pass."""
        if self.ended:
            return
        size = tokens.size
        whole = torch.full(tokens.index.shape[:1], tokens.count, device=tokens.index.device)
        self.counts.append(whole if size is None else (size > 0).sum(1))

    def add(self, block: int, tokens: Tokens) -> None:
        """Note the tokens that are left after a block."""
        self.kept[block] = tokens.index.detach().sort(1).values
        if tokens.source is not None:
            place = tokens.index.gather(1, tokens.source.clamp(min=0))
            self.carrier[block] = torch.where(tokens.source >= 0, place, -1)


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
    from tntprune.backbones.base import refuse_wrapper, tower_of  # which itself has to know what a trace is

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
        traces = {**(tower.traces or {})}
        traces.pop(thread, None)
        if trace is not None:
            traces[thread] = trace
        tower.traces = traces
        if not traces:
            del tower.traces

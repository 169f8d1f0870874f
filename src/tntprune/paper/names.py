"""What the methods are called, which of them learn, and what can be asked for by name."""

from __future__ import annotations

import difflib
from typing import Literal

from tntprune.errors import UsageError
from tntprune.methods import TNT, Config, DynamicViT, EViT
from tntprune.paper.settings import MODELS

Table = Literal["unpruned", "single", "multi", "ablation"]

BACKBONES = tuple(MODELS.values())  # the paper's, as our commands name them
METHODS = {  # as published.csv names them, and as tables and figures do
    "random": "random drop",
    "topk": "Top-K",
    "zerotprune": "Zero-TPrune",
    "dynamicvit": "DynamicViT",
    "tome": "ToMe",
    "evit": "EViT",
    "tnt": "TNT",
    "tnt-mlp": "TNT, MLP scorer",
    "tnt-relative": "TNT, our recipe",
}
PARTS = {  # of the paper
    "single": "one location, every method and rate",
    "multi": "several locations, every method and rate",
    "ablation": "TNT without, and with other ways of, removing similar tokens",
    "maps": "which tokens stay after each of the blocks 1 to 5",
}
LEARNERS: dict[str, Config] = {  # what is trained; one training serves every rate and place
    "tnt": TNT(recipe="paper"),
    "tnt-mlp": TNT(recipe="paper", scorer="mlp"),
    "tnt-relative": TNT(recipe="relative"),
    "dynamicvit": DynamicViT(),
    "evit": EViT(),
}


def check_only(only: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """The parts and the methods among some names; where none of a kind is named, all of that kind.

    Raises:
        UsageError: a name is neither.
    """
    known = [*PARTS, *METHODS]
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"--only {name}: expected some of {', '.join(known)}{hint}")
    return set(only) & set(PARTS) or set(PARTS), set(only) & set(METHODS) or set(METHODS)

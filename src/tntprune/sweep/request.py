"""What is asked of a sweep: one setting of one model, and how tables call it."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from tntprune.backbones.attach import reduction_of, twin_of
from tntprune.errors import UsageError, UserError
from tntprune.methods import Combination, Config, options
from tntprune.methods.learned import missing_in
from tntprune.reduce import reduce_
from tntprune.serialization.checkpoint import load_, read
from tntprune.serialization.pretrained import PRETRAINED


@dataclass(frozen=True)
class SweepRequest:
    """One setting that is asked for.

    Args:
        model: The name that our commands take.
        config: What removes tokens; None is the unpruned model, or with `reducer` what was saved, as it was saved.
        reducer: A folder with a saved reduction, or "pretrained" for the one that comes with the library. It is put on
            with the options of `config`, but for those that what was learned depends on.
        name: Of its line in tables and figures; "" is the method's own.
        scheme: "unpruned", "single" or "multi"; "" is what the number of locations says.
    """

    model: str
    config: Config | None
    reducer: Path | str | None = None
    name: str = ""
    scheme: str = ""


def name_of(config: Config | None, tuned: bool = False) -> str:
    """Return what tables call a setting that has no name of its own; `tuned`: the model was trained with it."""
    if config is None:
        return "unpruned"
    if tuned:
        return f"{name_of(config)}, fine-tuned"
    if isinstance(config, Combination):
        return " then ".join(map(name_of, config.parts))
    recipe = ", paper's recipe" if getattr(config, "recipe", "") == "paper" else ""
    scorer = ", MLP" if getattr(config, "scorer", "") == "mlp" else ""
    score = {"attention": ", by attention", "both": ", and attention"}.get(getattr(config, "score", ""), "")
    return config.title + recipe + scorer + score


def scheme_of(config: Config | None, depth: int) -> str:
    """Return "unpruned", "single" or "multi": whether tokens go nowhere, at one location, or at several."""
    if config is None:
        return "unpruned"
    parts = config.parts if isinstance(config, Combination) else (config,)
    return "single" if sum(len(part.blocks(depth)) for part in parts) == 1 else "multi"


class TrainedReducer:
    """A saved reduction, read once.

    Args:
        source: A folder, or the word "pretrained".
        model: The model that it is for, with weights or without; only "pretrained" needs it.

    Raises:
        UserError: nothing is there, or it is broken, not a reduction, or not shipped for the model.
    """

    def __init__(self, source: Path | str, model: nn.Module | None = None) -> None:
        self.given = source
        # a relative name may also be that of a repository
        self.source = PRETRAINED if source == PRETRAINED else Path(source).absolute()
        if isinstance(self.source, Path) and not self.source.exists():
            raise UserError(f"{source}: no such folder; expected one that tntprune train or tntprune.save wrote")
        saved = read(self.source, model)
        self.config, self.tensors, self.path, self.weights = saved.config, saved.learned, saved.path, saved.weights
        self.last_block = saved.last_block
        self.tuned = self.weights is not None  # whether the model was trained with it

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, and of the weights beside it."""
        return digest(*filter(None, (self.path, self.weights)))

    def changes(self, config: Config | None) -> dict[str, Any]:
        """Return the options of a config that a saved reduction can be given: all but those that were learned.

        Raises:
            UsageError: the config is of another method.
        """
        if config is not None and config.method != self.config.method:
            raise UsageError(
                f"{self.given} holds {self.config.method}, given the options of {config.method}; expected those of "
                "the same method"
            )
        if config is None or isinstance(config, Combination):
            return {}
        own = options(type(config))
        return {name: getattr(config, name) for name, entry in own.items() if not entry.metadata["learned"]}

    def check(self, shape: nn.Module) -> None:
        """Refuse a reduction that was made for another model than this one, with weights or without.

        Raises:
            UserError: it does not fit.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # nothing can be put into a model without weights
            load_(twin_of(shape), self.source)


def shaped(shape: nn.Module, config: Config | None, saved: TrainedReducer | None) -> nn.Module:
    """Put a setting on a model without weights: for what it costs, and to refuse what cannot be.

    Raises:
        UserError: the model cannot take it, it has to be trained first, or nothing was learned for its locations.
    """
    if config is None:
        return twin_of(shape)
    parts = config.parts if isinstance(config, Combination) else (config,)
    if saved is None and (untrained := [part.method for part in parts if part.must_train]):
        raise UserError(f"{untrained[0]} has to be trained first; expected a reducer, made by tntprune train")
    reduced = reduce_(twin_of(shape), config, last_block=None if saved is None else saved.last_block)
    if saved is not None and (missing := missing_in(saved.tensors, reduction_of(reduced).state_dict())):
        raise UserError(f"{saved.path}: {missing}")
    return reduced


def built(model: nn.Module, host: nn.Module, config: Config | None, saved: TrainedReducer | None) -> nn.Module:
    """Return the model of a setting, which shares the weights of the model that it is put on.

    Args:
        model: The unpruned model.
        host: A model that takes what was saved, weights and all; the unpruned one where they were not trained.
        config: What removes tokens; None is the unpruned model.
        saved: What was learned.
    """
    if saved is not None:
        return load_(twin_of(host), saved.source, **saved.changes(config))
    return model if config is None else reduce_(twin_of(model), config)


def digest(*files: Path) -> str:
    """Return the SHA-256 of files, one after another.

    Raises:
        UserError: one cannot be read.
    """
    found = hashlib.sha256()
    for file in files:
        try:
            with open(file, "rb") as opened:
                while part := opened.read(1 << 20):
                    found.update(part)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); expected a file") from None
    return found.hexdigest()

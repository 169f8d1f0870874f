"""What can be chosen in the explorer: a model, and a reduction that meets a budget."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from tntprune.analysis.macs import macs
from tntprune.backbones.attach import twin_of
from tntprune.backbones.base import find_backbone
from tntprune.backbones.classnames import class_names
from tntprune.backbones.models import HF, load_model
from tntprune.data.folders import classes_of
from tntprune.errors import UsageError, UserError
from tntprune.methods import Config, all_methods, obstacle_to, options
from tntprune.methods.text import as_flags, as_python
from tntprune.reduce import reduce_
from tntprune.search.fitted import fitted
from tntprune.serialization.checkpoint import load_, read
from tntprune.serialization.pretrained import PRETRAINED

STEPS = 200  # keep rates among which the one for a budget is sought
DEPTH = 12  # of the models for which the methods' papers name their blocks


@dataclass(frozen=True)
class ReducedChoice:
    """A model with a reduction.

    Args:
        config: Of the reduction.
        model: In eval mode; it shares its weights with the unpruned model.
        over: Whether even the smallest rate costs more than the budget.
        source: The saved reduction that was put on, or "".
    """

    config: Config
    model: nn.Module
    over: bool
    source: str = ""


class ExploredModel:
    """A model, and the reductions that it can have.

    Args:
        name: As `load_model` takes it.
        weights: See `load_model`.
        reducer: A saved reduction, as `load_` takes it; by default the pretrained one, where there is one.

    Raises:
        UserError: the model or the reduction cannot be loaded.
    """

    def __init__(self, name: str, weights: Path | None = None, reducer: str | None = None) -> None:
        self.name, self.weights = name, weights
        self.model = load_model(name, weights)
        self.saved: Config | None = None
        self.source = reducer or PRETRAINED
        try:
            self.saved = read(self.source, self.model).config
        except UserError:
            if reducer is not None:
                raise

    @cached_property
    def names(self) -> list[str]:
        """Name each class of the model, see `names_of`."""
        return names_of(self.model)

    def methods(self) -> dict[str, str]:
        """Return the title of each method that this model can have by its name, a saved reduction's first."""
        layout = find_backbone(self.model).layout(self.model)
        titles = {name: kind.title for name, kind in all_methods().items() if obstacle_to(kind, layout) is None}
        first = self.saved.method if self.saved is not None else ""
        return {**({first: titles[first]} if first in titles else {}), **titles}

    def reduced(self, method: str, share: float) -> ReducedChoice:
        """Put a method on a model that shares the weights, at the rate whose MACs come nearest to a budget from below.

        Args:
            method: Its name.
            share: Of the unpruned model's MACs, in (0, 1].

        Raises:
            UserError: the method cannot be applied, or has no rate that can be set.
        """
        kind = all_methods()[method]
        saved = self.saved if self.saved is not None and self.saved.method == method else None
        start = (
            saved if saved is not None else kind(**_places(kind, find_backbone(self.model).layout(self.model).depth))
        )
        twin, base = twin_of(self.model), macs(self.model).macs
        config = fitted(twin, lambda keep: start.changed(keep=keep), (share + 1e-9) * base, STEPS)
        over = macs(reduce_(twin, config)).macs / base > share
        if saved is not None:
            return ReducedChoice(config, load_(twin, self.source, keep=config.given[0]), over, self.source)
        return ReducedChoice(config, twin, over)

    def python(self, reduced: ReducedChoice) -> str:
        """Return the Python code that makes a reduced model."""
        own = self.name in ("digits_vit", "vit16") or self.name.startswith(HF)
        path = [] if self.weights is None else ["from pathlib import Path", ""]
        if own or self.weights is not None:
            given = repr(self.name) + ("" if self.weights is None else f", Path({str(self.weights)!r})")
            lines = [*path, "import tntprune", "from tntprune.backbones.models import load_model", ""]
            lines.append(f"model = load_model({given})")
        else:
            lines = ["import timm, tntprune", "", f"model = timm.create_model({self.name!r}, pretrained=True).eval()"]
        if reduced.source:
            lines.append(f"tntprune.load_(model, {reduced.source!r}, keep={reduced.config.given[0]})")
        else:
            lines.append(f"tntprune.reduce_(model, tntprune.{as_python(reduced.config)})")
        return "\n".join([*lines, "print(tntprune.macs(model))"])

    def command(self, reduced: ReducedChoice) -> str:
        """Return the command that draws the kept tokens of a photo."""
        flags = f"--reducer {quote(reduced.source)} --keep {reduced.config.given[0]}" if reduced.source else ""
        weights = "" if self.weights is None else f" --weights {quote(str(self.weights))}"
        return f"tntprune show {self.name} photo.jpg{weights} {flags or as_flags(reduced.config)} --out kept.png"


def names_of(model: nn.Module) -> list[str]:
    """Return a name for each class of a model, its number where no name is known; none for a model without classes."""
    classes, names = classes_of(model), list(class_names(model))
    if len(names) != classes and (subset := infer_imagenet_subset(model)):
        info = ImageNetInfo(subset)
        names = [info.index_to_description(number).split(",")[0] for number in range(info.num_classes())]
    return names if len(names) == classes else [str(number) for number in range(classes)]


def _places(kind: type[Config], depth: int) -> dict[str, int | tuple[int, ...]]:
    """Return where a method acts on a model of any depth, if that is not its default."""
    default: Any = options(kind)["at"].default
    if default is None:
        try:
            kind(keep=0.5)
        except UsageError:  # its rate is that of some blocks
            default = 3
        else:
            return {}
    blocks = default if isinstance(default, tuple) else (default,)
    if max(blocks) < depth:
        return {"at": default}
    return {"at": tuple(sorted({max(1, min(depth - 1, round(block * depth / DEPTH))) for block in blocks}))}

"""Flags that several commands share, and groups of them with what is done with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tntprune.cli.options import MethodOptions
from tntprune.errors import UsageError, UserError, UserNote
from tntprune.methods import Config, all_methods, check_options, find_method
from tntprune.methods.text import config_from_text
from tntprune.system.flags import MANY, MAX_BATCH, MAX_SEED, Whole

if TYPE_CHECKING:
    from torch import nn

MAX_WORKERS = 256
GROUP = tyro.conf.arg(name="", help="")  # the flags of a dataclass stand among those of the command


def _default(value: str) -> str:
    return "" if value in ("", "None", "True") else f"(default: {value})"


def flag(help: str, metavar: str | None = None) -> Any:
    """Describe a flag in the help.

    Args:
        help: What it is, in one line.
        metavar: What stands for its value, where its type does not say enough.
    """
    return tyro.conf.arg(help=help, metavar=metavar, help_behavior_hint=_default)


Model = Annotated[tyro.conf.Positional[str], flag("a timm model, hf:FOLDER_OR_ID, vit16 or digits_vit", "MODEL")]
Weights = Annotated[Path | None, flag("weights to load; without it timm asks the Hub", "FILE")]
Device = Annotated[str, flag("cpu, cuda or mps", "DEVICE")]
Json = Annotated[bool, flag("one JSON object on standard output, everything else on standard error")]
ImgSize = Annotated[tuple[int, int] | None, flag("image size in pixels, if not the model's own", "H W"), Whole(1, 8192)]
OnBadImage = Annotated[
    Literal["error", "skip"], flag("what to do with a photo that cannot be read: stop, or skip it and exit with 3")
]
Seed = Annotated[int, flag("seed of all random choices"), Whole(0, MAX_SEED)]
Limit = Annotated[int | None, flag("use this many photos, chosen at random, always the same ones"), Whole(1, MANY)]
BatchSize = Annotated[int, flag("photos at a time"), Whole(1, MAX_BATCH)]
Workers = Annotated[int | None, flag("processes that read photos (half of the processors)"), Whole(0, MAX_WORKERS)]
Classifier = Annotated[bool, flag("remove the classifier: the output is the embedding (pooled features)")]
MethodName = Annotated[str | None, flag(f"a method: {', '.join(all_methods())}", "NAME")]  # asked for once
Split = Annotated[str | None, flag("split of a data set, or a subfolder of the folder", "NAME")]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where photos come from, where that is no folder."""

    split: Split = None
    root: Annotated[Path | None, flag("folder of torch/ data, and cache of hfds/ data", "DIR")] = None
    samples: Annotated[
        int | None, flag("number of photos in a streamed data set (hfids/, wds/), if it does not say"), Whole(1, MANY)
    ] = None


@dataclass(frozen=True, kw_only=True)
class HostFlags:
    """How a model is loaded."""

    weights: Weights = None
    img_size: ImgSize = None
    device: Device = "cpu"

    def load(self, model: str, device: str | None = None, classifier: bool = True) -> nn.Module:
        """Load a model with its weights, or without its classifier; see `load_model`, which takes long to import."""
        from tntprune.backbones.models import drop_classifier_, load_model

        loaded = load_model(model, self.weights, device or self.device, self.img_size)
        return loaded if classifier else drop_classifier_(loaded)


@dataclass(frozen=True, kw_only=True)
class Reducer:
    """What removes tokens: a method with its options, or a saved reduction."""

    method: MethodName = None
    reducer: Annotated[
        str | None,
        flag("a folder made by train, a plan made by search, a Hub id (user/repo@revision), or pretrained", "RUN"),
    ] = None
    last_block: Annotated[
        Literal["all", "prefix"] | None,
        flag(
            "what the last block computes: all tokens, or the prefix tokens alone: fewer MACs, the same logits, for "
            "models that read the CLS token (all, or as saved)"
        ),
    ] = None
    options: Annotated[MethodOptions, tyro.conf.arg(name="reduction", help=MethodOptions.__doc__)] = field(
        default_factory=MethodOptions
    )

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given.

        Raises:
            UsageError: one that takes values was given none.
        """
        found = {name: value for name, value in vars(self.options).items() if value is not None}
        if empty := [name for name, value in found.items() if value == ()]:
            raise UsageError(f"{empty[0]}: no value given; expected one or more")
        return found

    def config(self, default: str = "", without: Sequence[str] = ()) -> Config:
        """Return the config of the method, or of the default one, with the options that were given.

        Raises:
            UsageError: there is no such method, it lacks an option that was given, or a value is out of range.
        """
        kind = find_method(self.method or default)
        chosen = {name: value for name, value in self.given.items() if name not in without}
        check_options(kind, chosen)
        return kind(**chosen)


@dataclass(frozen=True, kw_only=True)
class Reduction(Reducer):
    """What removes tokens, with further reductions behind it."""

    then: Annotated[
        tuple[str, ...],
        flag('further reductions at other blocks, such as "tome at=6,7,8 r=10"', "TEXT..."),
    ] = ()

    def configs(self, missing: str = "--method; expected --method tnt, for example") -> list[Config]:
        """Return the configs of a method that needs no saved reduction and of those behind it; none without a method.

        Raises:
            UsageError: options or further reductions without a method, or a value is out of range.
        """
        if self.method is not None:
            return [self.config(), *map(config_from_text, self.then)]
        if names := [*self.given, *["then"] * bool(self.then), *["last_block"] * (self.last_block is not None)]:
            raise UsageError(f"--{names[0].replace('_', '-')} was given without {missing}")
        return []

    def apply(self, model: nn.Module, **changes: Any) -> nn.Module:
        """Put on a model what the flags say: a saved reduction, those that need no training, or none.

        Args:
            model: The model.
            changes: Options of the saved reduction that are others than given.

        Raises:
            UsageError: options without a method, or a method that is not the saved one.
            UserError: the method has to be trained first, or the reduction does not fit.
        """
        from tntprune.reduce import reduce_
        from tntprune.serialization.checkpoint import load_, read

        if self.reducer is not None:
            saved = read(self.reducer, model).config.method
            if self.method not in (None, saved):
                raise UsageError(
                    f"--method {self.method}, but {self.reducer} holds {saved}; expected --method {saved}, or none"
                )
            more = map(config_from_text, self.then)
            return load_(model, self.reducer, *more, last_block=self.last_block, **{**self.given, **changes})
        configs = self.configs("--method or --reducer; expected one of them")
        for config in configs:
            if config.must_train:
                raise UserError(
                    f"{config.method} has to be trained first; expected --reducer RUN, made by tntprune train MODEL "
                    f"--method {config.method} --data DIR --out RUN"
                )
        if not configs:
            return model
        reduce_(model, *configs, last_block=self.last_block)
        tell_drained(model)
        return model


def tell_drained(model: nn.Module) -> None:
    """Warn where a method that acts in every block unless told otherwise leaves a single patch token.

    Warns:
        UserNote: it does.
    """
    from tntprune.backbones.attach import reduction_of

    method = reduction_of(model)
    patches, steps = method.layout.patches, method.steps(method.layout.patches)
    if method.config.at is None and steps and patches > 16 and steps[-1].leaving == 1:
        name, acts = method.config.method, len(steps)
        warnings.warn(
            f"{name} removes tokens in {acts} blocks and leaves 1 of {patches} patch tokens; for one block give --at, "
            f"as in --method {name} --at 3 --keep 0.5, or keep more",
            UserNote,
            stacklevel=2,
        )

"""The options of every method, and of a training, as flags that are made from the configs themselves."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Union, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from tntprune.data.augment import Augmentation
from tntprune.methods import all_methods, options
from tntprune.system.flags import Whole, Within, hints_of
from tntprune.training.config import Training
from tntprune.training.recipes import Recipe, scratch

SHARE, FACTOR = Within(0, 1), Within(0, 100)
IMAGES: dict[str, tuple[Any, ...]] = {  # options of the augmentation
    "crop": ("smallest share of the area in random crops", Within(0, 1, above=True)),
    "hflip": ("probability of mirror images", SHARE),
    "auto_augment": ("timm's automatic augmentation, or none; such as rand-m9-mstd0.5-inc1",),
    "color_jitter": ("strength of changes in brightness, contrast, saturation", FACTOR),
    "random_erasing": ("probability of an erased rectangle", SHARE),
    "mixup": ("blend two photos; the authors' is 0.8", FACTOR),
    "cutmix": ("paste one photo into another; the authors' is 1", FACTOR),
    "repeats": ("copies of a photo per epoch; the authors' is 3", Whole(1, 1000)),
}
TUNED = ("backbone_lr", "freeze_epochs", "unfreeze", "rank", "distill")  # of a model that has its weights


class _Flag(NamedTuple):
    """A flag that need not be given."""

    name: str
    kind: Any
    help: str
    marks: Iterable[Within] = ()


def _flags(about: str, found: Iterable[_Flag]) -> Any:
    made = [
        (one.name, Annotated[(one.kind | None, tyro.conf.arg(help=one.help, help_behavior_hint=""), *one.marks)], None)
        for one in found
    ]
    return make_dataclass("Flags", made, frozen=True, namespace={"__doc__": about})


def _of_methods() -> Iterator[_Flag]:
    """Yield each option of the methods, with all that the methods which have it take."""
    known = all_methods()
    for name in dict.fromkeys(name for kind in known.values() for name in options(kind)):
        users = {method: options(kind)[name] for method, kind in known.items() if name in options(kind)}
        kind: Any = Union[tuple(get_type_hints(known[method])[name] for method in users)]  # noqa: UP007 - made at run time
        only = "" if len(users) == len(known) else f" [{', '.join(sorted(users))}]"
        yield _Flag(name, kind, next(iter(users.values())).metadata["help"] + only)


def _of_training(recipe: Recipe | None = None, without: Collection[str] = ()) -> Iterator[_Flag]:
    """Yield the options of a training and of its images, with their defaults or those of a recipe."""
    configs: tuple[Any, ...] = (recipe.training, recipe.augmentation) if recipe else (Training(), Augmentation())
    for config in configs:
        for entry in fields(config):
            (kind, marks), default = hints_of(config.__class__)[entry.name], getattr(config, entry.name)
            about, *more = IMAGES.get(entry.name) or (entry.metadata.get("help", ""),)
            told = f" ({default:g})" if isinstance(default, float) else f" ({default or 'none'})"
            if default != entry.default:
                about = re.split(r";| \(", about)[0] + told
            elif not about.endswith(")"):
                about += told
            if entry.name not in (*without, "seed"):
                yield _Flag(entry.name, kind, about, (*marks, *more))


if TYPE_CHECKING:

    class MethodOptions:
        """Flags that are made at run time."""

    class TrainingFlags(MethodOptions):  # noqa: D101
        pass

    class ScratchFlags(MethodOptions):  # noqa: D101
        pass
else:
    MethodOptions = _flags(
        "Options of the method. Without them its defaults apply. Name a method to see all of its options, as in "
        "--method tnt --help.",
        _of_methods(),
    )
    TrainingFlags = _flags("Options of the training.", _of_training())
    ScratchFlags = _flags("Options of the training.", _of_training(scratch(), TUNED))


def shown_for(method: str) -> ConstructorRegistry:
    """Make the rule by which the help shows one method's options, or those of all methods where none is named."""
    known, registry = all_methods(), ConstructorRegistry()
    shown = [set(options(kind)) for name, kind in known.items() if name == method or method not in known]
    names = set.intersection(*shown)

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type is not MethodOptions:
            return None
        kinds = get_type_hints(MethodOptions, include_extras=True)
        found = (StructFieldSpec(name, kind, default=None) for name, kind in kinds.items() if name in names)
        return StructConstructorSpec(MethodOptions, tuple(found))

    return registry

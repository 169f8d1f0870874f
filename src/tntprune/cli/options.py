"""The options of every method as flags of the command line, made from the configs themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, make_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from tntprune.errors import UsageError, UserError
from tntprune.methods import Config, all_methods, check_options, find_method, options
from tntprune.methods.text import config_from_text

if TYPE_CHECKING:
    from torch import nn


def _flag(hint: Any) -> Any:
    """A field's type as the command line takes it: sequences and single values become tuples."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    many = [part for part in parts if get_origin(part) is Sequence]
    if many:
        return tuple[get_args(many[0])[0], ...]  # type: ignore[misc]
    return Union[tuple(part for part in parts if part is not NoneType)]  # noqa: UP007 - made at run time


def _metavar(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"{get_args(hint)[0].__name__.upper()}..."
    parts = get_args(hint) if get_origin(hint) is Union else (hint,)
    words = [  # of one option that several methods have, each word once
        "|".join(map(str, get_args(part))) if get_origin(part) is Literal else part.__name__.upper() for part in parts
    ]
    return "|".join(dict.fromkeys("|".join(words).split("|")))


def _fields() -> list[tuple[str, Any, Any]]:
    found: dict[str, tuple[str, Any, Any]] = {}
    known = all_methods()
    for config in known.values():
        for name, entry in options(config).items():
            if name in found:
                continue
            users = [m for m, c in known.items() if name in options(c)]
            hint = _flag(Union[tuple(get_type_hints(known[m])[name] for m in users)])  # noqa: UP007 - made at run time
            only = "" if len(users) == len(known) else f" [{', '.join(sorted(users))}]"
            about = tyro.conf.arg(help=entry.metadata["help"] + only, metavar=_metavar(hint), help_behavior_hint="")
            found[name] = (name, Annotated[hint | None, about], field(default=None))
    return list(found.values())


if TYPE_CHECKING:

    class MethodOptions:
        """Options of the methods; what is not given takes the method's default."""
else:
    MethodOptions = make_dataclass("MethodOptions", _fields(), frozen=True)
    MethodOptions.__doc__ = "Options of the methods; what is not given takes the method's default."


def given(flags: MethodOptions) -> dict[str, Any]:
    """The options that were given.

    Raises:
        UsageError: one that takes values was given none.
    """
    found = {name: value for name, value in vars(flags).items() if value is not None}
    if empty := [name for name, value in found.items() if value == ()]:
        raise UsageError(f"{empty[0]}: no value given; expected one or more")
    return found


def config_from(method: str, flags: MethodOptions) -> Config:
    """A config from its method's name and the flags.

    Raises:
        UsageError: there is no such method, it lacks an option that was given, or a value is out of range.
    """
    kind, chosen = find_method(method), given(flags)
    check_options(kind, chosen)
    return kind(**chosen)


def configs_from(method: str | None, flags: MethodOptions, then: Sequence[str]) -> list[Config]:
    """The configs of a method that needs no saved reduction, and of those that come after it; none without a method.

    Raises:
        UsageError: options or further reductions without a method, or a value is out of range.
    """
    if method is None:
        if given(flags) or then:
            name = next(iter(given(flags)), "then").replace("_", "-")
            raise UsageError(f"--{name} was given without --method; expected --method tnt, for example")
        return []
    return [config_from(method, flags), *map(config_from_text, then)]


def apply(
    model: nn.Module, method: str | None, reducer: str | None, flags: MethodOptions, then: Sequence[str] = ()
) -> nn.Module:
    """Put on a model what the flags say: a saved reduction, those that need no training, or none.

    Raises:
        UsageError: options without a method, or a method that is not the saved one.
        UserError: the method has to be trained first, or the reduction does not fit.
    """
    from tntprune.reduce import reduce_
    from tntprune.serialization.checkpoint import load_, read

    if reducer is not None:
        saved = read(reducer, model).config.method
        if method not in (None, saved):
            raise UsageError(f"--method {method}, but {reducer} holds {saved}; expected --method {saved}, or none")
        return load_(model, reducer, *map(config_from_text, then), **given(flags))
    if method is None and (given(flags) or then):
        name = next(iter(given(flags)), "then").replace("_", "-")
        raise UsageError(f"--{name} was given without --method or --reducer; expected one of them")
    configs = configs_from(method, flags, then)
    for config in configs:
        if config.must_train:
            raise UserError(f"{config.method} has to be trained first; expected --reducer RUN, made by tntprune train")
    return reduce_(model, *configs) if configs else model

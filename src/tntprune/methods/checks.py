"""What configs check, and the options that a config has."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import Field, fields
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from tntprune.errors import UsageError

if TYPE_CHECKING:
    from tntprune.methods.config import Config


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return one value or several as a tuple."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def show(values: Sequence[Any]) -> str:
    """Values as they stand on a command line."""
    return " ".join(map(str, values))


def is_int(value: Any) -> bool:
    """Return whether a value is a whole number, and neither True nor False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number in the range of floats, and neither True nor False."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check(holds: bool, message: str) -> None:
    """Refuse what does not hold.

    Raises:
        UsageError: with the message.
    """
    if not holds:
        raise UsageError(message)


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse what is not a whole number in a range.

    Raises:
        UsageError: naming the option.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"{least} or larger" if most is None else f"{least} to {most}"
        raise UsageError(f"{name}={value}: expected a whole number, {limits}")


def check_words(config: Config, *names: str) -> None:
    """Refuse words that an option does not allow.

    Raises:
        UsageError: naming the option and its words.
    """
    for name in names:
        allowed, value = choices(type(config), name), getattr(config, name)
        check(value in allowed, f"{name}={value!r}: expected {' or '.join(map(repr, allowed))}")


def check_flags(config: Config, *names: str) -> None:
    """Refuse what is neither True nor False, nor None where that is the default.

    Raises:
        UsageError: naming the option.
    """
    for name in names:
        value = getattr(config, name)
        allowed = isinstance(value, bool) or (value is None and options(type(config))[name].default is None)
        check(allowed, f"{name}={value!r}: expected True or False")


def choices(config: type[Config], name: str) -> tuple[Any, ...]:
    """Return the words an option allows, None among them where it does; () where the option takes no words."""
    kind: Any = config
    hint = _hints(kind)[name]
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    return words + ((None,) if words and NoneType in parts else ())


_hints = cache(get_type_hints)  # evaluated once: a plan makes hundreds of configs


def options(config: type[Config]) -> dict[str, Field[Any]]:
    """Return the options of a method by name."""
    return {f.name: f for f in fields(config) if f.name not in config.without}


def check_options(config: type[Config], given: Sequence[str] | dict[str, Any]) -> None:
    """Refuse options that the method does not have.

    Raises:
        UsageError: naming the first such option and those that exist.
    """
    for name in given:
        check(name in options(config), f"{config.method} has no option {name!r}; it has {', '.join(options(config))}")

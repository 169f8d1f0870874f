"""What a value must be, beside its type. The marks stand in the annotation of a flag, or of a field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from tntprune.errors import UsageError

MAX_SEED = 2**32 - 1  # times a million and the step's number it is still below 2**53
MAX_MICRO_BATCHES = 512  # and with a micro-batch's number above that, it fits torch's 64 bits
MAX_BATCH = 65536
MANY = 10**12  # of anything that is only counted


@dataclass(frozen=True)
class Within:
    """The range of a number, or of each number of several.

    Args:
        least: The smallest value.
        most: The largest value.
        above: Whether `least` itself is too small.
        below: Whether `most` itself is too large.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    kinds: ClassVar[tuple[type, ...]] = (int, float)
    called: ClassVar[str] = "number"

    def check(self, name: str, value: Any) -> None:
        """Refuse what is no number, or one outside the range.

        Raises:
            UsageError: naming the flag, the number and the range.
        """
        good = isinstance(value, self.kinds) and not isinstance(value, bool)
        good = good and (value > self.least if self.above else value >= self.least)
        if good and (value < self.most if self.below else value <= self.most):
            return
        given, least, most = (f"{one:g}" if isinstance(one, float) else one for one in (value, self.least, self.most))
        limits = f"{'above' if self.above else 'from'} {least} to {'below ' if self.below else ''}{most}"
        raise UsageError(f"{name}={given}: expected a {self.called} {limits}")


@dataclass(frozen=True)
class Whole(Within):
    """The range of a whole number, or of each of several."""

    kinds = (int,)
    called = "whole number"


@dataclass(frozen=True)
class Written:
    """The mark of text that goes into a file, or names one that is written: it must be valid Unicode."""

    def check(self, name: str, value: Any) -> None:
        """Refuse bytes that are no text in this locale.

        Raises:
            UsageError: naming the flag.
        """
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{name}={str(value)!a}: not valid text here; expected UTF-8, in a UTF-8 locale") from None


@cache
def hints_of(declared: Callable[..., Any]) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the type and the marks of each flag of a function or dataclass, those of dataclasses in it too."""
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for name, hint in get_type_hints(declared, include_extras=True).items():
        kind = hint.__origin__ if get_origin(hint) is Annotated else hint
        found[name] = kind, getattr(hint, "__metadata__", ())
        if is_dataclass(kind):
            found |= hints_of(kind)  # type: ignore[arg-type]
    return found


def check_flags(declared: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check values against the words and the marks in their annotations.

    Args:
        declared: The function or dataclass that declares the flags.
        given: Values by parameter; of a dataclass of flags, its fields are checked too.

    Raises:
        UsageError: a value is out of its range, none of its words, or cannot be written.
    """
    for name, value in given.items():
        if is_dataclass(value):
            check_flags(type(value), vars(value))
        kind, marks = hints_of(declared)[name]
        kinds = set(get_args(kind)) if get_origin(kind) in (Union, UnionType, tuple) else {kind}
        if value is None and NoneType in kinds:
            continue
        kinds -= {NoneType, Ellipsis}
        words = [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]
        for one in value if isinstance(value, tuple) else (value,):
            if len(kinds) == 1 and words and one not in words:
                raise UsageError(f"{name}={one!r}: expected one of {', '.join(map(repr, words))}")
            for mark in marks:
                if isinstance(mark, Within | Written):
                    mark.check(name, one)

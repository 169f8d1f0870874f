"""What the value of a flag must be, beside its type. The marks stand in the flag's annotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

from tntprune.errors import UsageError

MAX_SEED = 2**32 - 1  # times a million and the step's number it is still below 2**53
MAX_PARTS = 512  # and with a part's number above that, it fits torch's 64 bits
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

    def check(self, name: str, value: Any) -> None:
        """Refuse a number outside the range.

        Raises:
            UsageError: naming the flag, the number and the range.
        """
        enough = value > self.least if self.above else value >= self.least
        if not (enough and (value < self.most if self.below else value <= self.most)):
            whole = isinstance(value, int)
            given = str(value) if whole else f"{value:g}"
            least, most = (str(end) if isinstance(end, int) else f"{end:g}" for end in (self.least, self.most))
            limits = f"{'above' if self.above else 'from'} {least} to {'below ' if self.below else ''}{most}"
            raise UsageError(f"{name}={given}: expected a {'whole ' if whole else ''}number {limits}")


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


def check_flags(declared: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check the values of flags against the marks in their annotations.

    Args:
        declared: The function or dataclass that declares the flags.
        given: Values by parameter; of a dataclass of flags, its fields are checked too.

    Raises:
        UsageError: a value is out of its range, or cannot be written.
    """
    hints = get_type_hints(declared, include_extras=True)
    for name, value in given.items():
        if is_dataclass(value):
            check_flags(type(value), vars(value))
        for mark in getattr(hints[name], "__metadata__", ()):
            if isinstance(mark, Within | Written) and value is not None:
                for one in value if isinstance(value, tuple) else (value,):
                    mark.check(name, one)

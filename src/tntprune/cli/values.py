"""How the words behind a flag become its value, and what stands for the value in the help."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

VALUES = ConstructorRegistry()
FREE = (int, float, str, Path)
NAMES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "BOOL"}
BOOLS = {"True": True, "False": False, "true": True, "false": False}


def _words(kind: Any) -> dict[str, Any]:
    """Return the words that a type consists of, if it does, with their values."""
    return BOOLS if kind is bool else {word: word for word in get_args(kind)} if get_origin(kind) is Literal else {}


@VALUES.primitive_rule
def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read one value of any of several types, or for tuples and sequences any number of values.

    An optional value may be the word None, which is as good as no flag.
    """
    parts = get_args(info.type) if get_origin(info.type) in (Union, UnionType) else (info.type,)
    many = [get_args(part) for part in parts if get_origin(part) in (tuple, Sequence)]
    kinds = [many[0][0]] if many else [part for part in parts if part is not NoneType]
    if info.type is bool or not all(kind in FREE or _words(kind) for kind in kinds):
        return None  # a bool has no value behind it, and all else has flags of its own
    fixed = {word: value for kind in kinds for word, value in _words(kind).items()}
    free = [kind for kind in kinds if kind in FREE]
    names = dict.fromkeys(name for kind in kinds for name in ([NAMES[kind]] if kind in NAMES else _words(kind)))
    count = len(many[0]) if many and len(many[0]) > 1 and Ellipsis not in many[0] else 1
    metavar = " ".join(["|".join(names)] * count) + "..." * (bool(many) and count == 1)

    def value(word: str) -> Any:
        for kind in () if word in fixed else free:
            with suppress(ValueError):
                return kind(word)
        return fixed[word]

    def read(words: list[str]) -> Any:
        if words == ["None"] and NoneType in parts:
            return None
        try:
            found = tuple(map(value, words))
        except KeyError:
            found = ()
        if len(found) != (len(words) if count == 1 else count):
            raise ValueError(f"{' '.join(words)}: expected {metavar}")
        return found if many else found[0]

    return PrimitiveConstructorSpec(
        nargs="*" if many else 1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: list(map(str, value if isinstance(value, tuple) else (value,))),
        choices=None if free else tuple(fixed),
    )

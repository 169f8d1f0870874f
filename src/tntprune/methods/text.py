"""Configs from one line of text, such as "tome at=6,7,8 r=10"."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tntprune.errors import UsageError
from tntprune.methods.checks import check_options
from tntprune.methods.config import Config
from tntprune.methods.registry import find_method


def config_from_text(text: str) -> Config:
    """Return a config from one line: a method's name and its options, such as "tome at=6,7,8 r=10".

    Raises:
        UsageError: there is no such method or option, or a value is out of range.
    """
    name, *pairs = text.split() or [""]
    kind = find_method(name)
    chosen = options_from(pairs, name)
    check_options(kind, chosen)
    return kind(**chosen)


def options_from(pairs: Sequence[str], after: str) -> dict[str, Any]:
    """Options from words such as "at=6,7,8".

    Args:
        pairs: The words.
        after: What they stand behind, for the message.

    Raises:
        UsageError: a word is none of option=value.
    """
    chosen: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (equals and value):
            raise UsageError(f"{pair!r} after {after}: expected option=value, or option=value,value")
        values = [_parse(part) for part in value.split(",")]
        chosen[key.replace("-", "_")] = tuple(values) if len(values) > 1 else values[0]
    return chosen


def _parse(text: str) -> Any:
    for read in (json.loads, float):
        try:
            return read(text.lower() if text in ("True", "False", "None") else text)
        except ValueError:
            continue
    return text

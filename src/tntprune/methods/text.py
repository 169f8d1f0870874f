"""Configs from one line of text, such as "tome at=6,7,8 r=10"."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
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


def changed_options(config: Config) -> dict[str, Any]:
    """Return the options of a config that are not at their defaults, several values as a tuple."""
    found = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        default = entry.default if isinstance(entry.default, tuple) else (entry.default,)
        if (value if isinstance(value, tuple) else (value,)) != default and value is not None:
            found[entry.name] = value[0] if isinstance(value, tuple) and len(value) == 1 else value
    return found


def described(config: Config) -> str:
    """Return a config as one line, as `config_from_text` reads it: its method and the options that were changed."""
    if parts := getattr(config, "parts", None):
        return " then ".join(map(described, parts))
    options = changed_options(config).items()
    return " ".join([config.method, *(f"{name}={_joined(value, ',')}" for name, value in options)])


def as_flags(config: Config) -> str:
    """Return a config as flags of the command line, such as "--method tome --r 13"."""
    flags = [f"--{name.replace('_', '-')} {_joined(value, ' ')}" for name, value in changed_options(config).items()]
    return " ".join([f"--method {config.method}", *flags])


def as_python(config: Config) -> str:
    """Return the Python expression that makes a config, such as "ToMe(r=13)"."""
    options = ", ".join(f"{name}={value!r}" for name, value in changed_options(config).items())
    return f"{type(config).__name__}({options})"


def _joined(value: Any, separator: str) -> str:
    return separator.join(map(str, value)) if isinstance(value, tuple) else str(value)

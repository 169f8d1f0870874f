"""Configs as JSON, and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tntprune.errors import UsageError
from tntprune.methods.checks import check, check_options, is_int
from tntprune.methods.combination import Combination
from tntprune.methods.config import Config
from tntprune.methods.registry import find_method, package_of

VERSION = 1  # raised when a field changes its meaning


def to_dict(config: Config) -> dict[str, Any]:
    """Return a config as plain JSON values."""
    about = {"version": VERSION, "method": config.method}
    if parts := getattr(config, "parts", None):
        return {**about, "parts": [to_dict(part) for part in parts]}
    package = package_of(type(config))
    own = {name: value for name, value in asdict(config).items() if name not in config.without}
    return {**about, **({"package": package} if package else {}), **own}


def from_dict(data: dict[str, Any], depth: int | None = None) -> Config:
    """Return a config from what `to_dict` made, in this version or an earlier one.

    Args:
        data: The JSON values.
        depth: Blocks of the model; None if the config is only to be described.

    Raises:
        UsageError: it comes from a newer version, or has an unknown method or option.
    """
    data = dict(data)
    version, name = data.pop("version", None), data.pop("method", None)
    package = str(data.pop("package", ""))
    known = is_int(version) and 0 < version <= VERSION
    check(known, f"config of version {version}; this tntprune reads up to {VERSION}: upgrade it")
    if name == "combination":
        parts = data.get("parts")
        if not isinstance(parts, list) or not all(isinstance(part, dict) and "parts" not in part for part in parts):
            raise UsageError("a combination without its parts; expected what tntprune.save writes")
        return Combination(parts=tuple(from_dict(part, depth) for part in parts))
    config = find_method(str(name), package)
    data = config.updated({config.renamed.get(option, option): value for option, value in data.items()}, depth)
    check_options(config, data)
    return config(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})

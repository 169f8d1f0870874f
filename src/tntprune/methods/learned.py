"""What a method has learned, by name, and handing it on to another one."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from tntprune.errors import UserError
from tntprune.methods.base import Method
from tntprune.methods.config import Config


def renamed(config: Config, learned: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what was learned under the names that it has now, whatever version saved it."""
    parts = {f"parts.{number}.": part for number, part in enumerate(getattr(config, "parts", ()))} or {"": config}
    found = {}
    for name, value in learned.items():
        prefix = next((prefix for prefix in parts if name.startswith(prefix)), "")
        kind, dot, rest = name.removeprefix(prefix).partition(".")
        names = parts[prefix].renamed_parameters if prefix in parts else {}
        found[f"{prefix}{names.get(kind, kind)}{dot}{rest}"] = value
    return found


def missing_in(learned: Iterable[str], wanted: Iterable[str]) -> str | None:
    """Return what was not learned though it is wanted, as a sentence's end; None if nothing is missing.

    Args:
        learned: Names such as scorers.6.layers.0.weight.
        wanted: The same.
    """
    known = set(learned)
    missing = next((name for name in sorted(wanted) if name not in known), None)
    if missing is None:
        return None
    part, others = blocks_of([missing]), blocks_of(known)
    if not part or not others or part[0] in others:
        return f"has nothing for {missing}; expected what this version's tntprune.save writes"
    return f"has nothing for block {part[0]}; expected those that it was trained for: {', '.join(map(str, others))}"


def blocks_of(learned: Iterable[str]) -> list[int]:
    """Return the blocks that something was learned for, by names such as scorers.6.layers.0.weight."""
    numbers = (re.match(r"(?:parts\.\d+\.)?\w+\.(\d+)", name) for name in learned)
    return sorted({int(found[1]) for found in numbers if found})


def inherit(method: Method, learned: dict[str, torch.Tensor]) -> None:
    """Give a method what another one of its kind has learned, which may have learned it for more locations.

    Raises:
        UserError: something that it needs is not there.
    """
    wanted = method.state_dict()
    if missing := missing_in(learned, wanted):
        raise UserError(f"what was learned {missing}")
    method.load_state_dict({name: with_dimension(learned[name]) for name in wanted})


def with_dimension(value: torch.Tensor) -> torch.Tensor:
    """Give a single number one dimension. Earlier files have none; FSDP2 shards no tensor without one."""
    return value.reshape(1) if value.ndim == 0 else value

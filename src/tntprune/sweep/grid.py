"""Methods x locations x rates, as they are written on a command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from tntprune.errors import UsageError
from tntprune.methods import Combination, Config, find_method
from tntprune.methods.text import config_from_text, options_from
from tntprune.serialization.pretrained import PRETRAINED
from tntprune.sweep.request import TrainedReducer

if TYPE_CHECKING:
    from torch import nn


def of_methods(text: str, at: Sequence[str], rates: Sequence[str]) -> list[Config]:
    """Return the settings of a method that needs no training.

    Args:
        text: "tome r=13", "evit", or several that share a model: "evit at=4 then tome at=7,10 r=10".
        at: Locations, each "3" or "3,4,5", for a method whose text says none.
        rates: Shares that stay, each "0.5" or one for each location, "0.9,0.8,0.7", for a method whose text does not
            say how many stay.

    Raises:
        UsageError: there is no such method or option, a value is out of range, or no list of rates has as many values
            as there are locations.
    """
    parts = re.split(r"\s+then\s+", text.strip())
    if len(parts) > 1:
        return [Combination(parts=tuple(map(config_from_text, parts)))]
    name, *pairs = text.split() or [""]
    varied = _varied(text, pairs, find_method(name).rivals, at, rates)
    return [config_from_text(" ".join([name, *pairs, *more])) for more in varied]


def of_reducer(
    text: str, at: Sequence[str], rates: Sequence[str], model: nn.Module | None = None
) -> tuple[Path | str, list[Config | None]]:
    """Read a saved reduction, and list its settings; see `of_methods`.

    Args:
        text: The folder, or "pretrained", and options to change behind it: "runs/tnt similar=40".
        at: Locations.
        rates: Shares that stay.
        model: The model, with weights or without; only "pretrained" needs it.

    Returns:
        The folder or "pretrained", and the configs to run; None is what was saved, as it was saved.

    Raises:
        UsageError: see `of_methods`.
        UserError: there is no saved reduction.
    """
    found = re.fullmatch(r"(.*?)((?:\s+[\w-]+=\S+)*)", text.strip(), re.DOTALL)
    name, pairs = (found[1], found[2].split()) if found else (text, [])
    folder = PRETRAINED if name == PRETRAINED else Path(name)
    saved = TrainedReducer(folder, model).config
    if isinstance(saved, Combination):
        saved.changed(**options_from(pairs, str(folder)))
        return folder, [None]
    return folder, [
        saved.changed(**options_from([*pairs, *more], str(folder))) if pairs or more else None
        for more in _varied(text, pairs, saved.rivals, at, rates)
    ]


def _varied(
    text: str, pairs: Sequence[str], rivals: Iterable[str], at: Sequence[str], rates: Sequence[str]
) -> list[list[str]]:
    """Return what is added to the options of a method: each location with each rate, or list of as many rates."""
    given = {pair.partition("=")[0].replace("-", "_") for pair in pairs}
    places = [f"at={place}" for place in at if "at" not in given] or [""]
    shares = [f"keep={rate}" for rate in rates if not given.intersection(rivals)] or [""]
    found = [
        [word for word in (place, share) if word]
        for place, share in product(places, shares)
        if not (place and share) or share.count(",") in (0, place.count(","))
    ]
    if not found:
        raise UsageError(
            f"{text}: no rates for so many locations ({places[0]} {shares[0]}); expected one rate, or one for each"
        )
    return found


def by_model(texts: Sequence[str], models: Sequence[str], what: str) -> list[tuple[str, str]]:
    """Pair files or folders with the models that they are for: "NAME=FILE", or "FILE" for the only model.

    Raises:
        UsageError: there are several models and no name.
    """
    found = []
    for text in texts:
        name, equals, file = text.partition("=")
        if equals and name in models:
            found.append((name, file))
        elif len(models) == 1:
            found.append((models[0], text))
        else:
            raise UsageError(f"{what} {text!r}: {len(models)} models were given; expected MODEL={what.upper()}")
    return found

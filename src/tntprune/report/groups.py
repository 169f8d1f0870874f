"""Rows put together that can be compared: the same images, the same precision, the same backbone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tntprune.errors import UserError
from tntprune.methods import all_methods
from tntprune.sweep.results import Row

SCHEMES = {"single": "one location", "multi": "several locations"}
PLAIN = ("version", "method", "parts")  # what a config's options are not


@dataclass(frozen=True)
class Backbone:
    """One unpruned model and what was made of it.

    Args:
        label: Its name, with what tells it from others of that name.
        base: The unpruned row.
        rows: The others, by method and multiply-accumulates.
    """

    label: str
    base: Row
    rows: tuple[Row, ...]

    def lines(self, scheme: str) -> dict[str, list[Row]]:
        """Group the rows of a scheme into lines, the most expensive row first.

        Rows of one name that act at different blocks are different lines. A line whose blocks are not those of the
        method's paper says so: "ToMe, one block".
        """
        rows = [row for row in self.rows if row.scheme == scheme]
        places: dict[str, set[str]] = {}
        for row in rows:
            places.setdefault(row.name, set()).add(_places(row))
        found: dict[str, list[Row]] = {}
        for row in rows:
            label = f"{row.name}{_moved(row)}"
            if len(places[row.name]) > 1:
                label = f"{row.name} at {_places(row)}"
            found.setdefault(label, []).append(row)
        return {label: sorted(line, key=lambda row: -row.macs) for label, line in found.items()}


@dataclass(frozen=True)
class Group:
    """Rows measured on the same images in the same way.

    Args:
        label: What is the same in all of them.
        backbones: Each with its rows.
    """

    label: str
    backbones: tuple[Backbone, ...]

    @cached_property
    def schemes(self) -> tuple[str, ...]:
        """Those of which there are rows."""
        present = {row.scheme for backbone in self.backbones for row in backbone.rows}
        return tuple(scheme for scheme in SCHEMES if scheme in present)


def grouped(rows: Iterable[Row]) -> list[Group]:
    """The rows by what they can be compared with, in the order in which each first comes.

    Raises:
        UserError: there are none, or an unpruned model's row is missing.
    """
    found: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Row]]] = {}
    for row in rows:
        own = row.setting
        group = found.setdefault((own.data, own.images, own.precision, own.batch_size), {})
        group.setdefault((own.model, own.weights, own.img_size), []).append(row)
    if not found:
        raise UserError("no rows to report; expected those that tntprune sweep wrote")
    return [_group(backbones) for backbones in found.values()]


def _group(backbones: dict[tuple[Any, ...], list[Row]]) -> Group:
    own = next(iter(backbones.values()))[0].setting
    batches = f"batches of {own.batch_size}" if own.batch_size > 1 else "one image at a time"
    label = f"{own.images:,} images (data {own.data[:8]}), {own.precision}, {batches}"
    models = [model for model, _, _ in backbones]
    made = []
    for (model, weights, size), rows in backbones.items():
        name = model
        if models.count(model) > 1:
            name += f" ({f'{size[0]} x {size[1]}, ' if size else ''}weights {weights[:8]})"
        base = next((row for row in rows if row.setting.config is None), None)
        if base is None:
            raise UserError(
                f"no row of the unpruned {name} on {label}, and nothing to compare its {len(rows)} rows with; "
                "give the file that has it as well, or let tntprune sweep measure it"
            )
        others = sorted(
            (row for row in rows if row.setting.config is not None), key=lambda row: (order(row), -row.macs)
        )
        made.append(Backbone(name, base, tuple(others)))
    return Group(label, tuple(made))


def order(row: Row) -> tuple[int, str]:
    """Where a row's method stands among the others: as in our registry, then by name."""
    method = (row.setting.config or {}).get("method")
    names = list(all_methods())
    return names.index(method) if method in names else len(names), row.name


def line_names(groups: Sequence[Group]) -> list[str]:
    """Every line's name, in one order for all figures and tables of a page."""
    found: dict[str, tuple[int, str]] = {}
    for group in groups:
        for backbone in group.backbones:
            for scheme in group.schemes:
                for label, rows in backbone.lines(scheme).items():
                    found.setdefault(label, order(rows[0]))
    return sorted(found, key=lambda label: (*found[label], label))


def options_of(config: dict[str, Any] | None) -> dict[str, str]:
    """A config's options as text: where it acts, and what is not at its default."""
    if config is None:
        return {}
    if parts := config.get("parts"):
        return {"parts": " + ".join(f"{part.get('method')} {in_words(options_of(part))}" for part in parts)}
    kind = all_methods().get(str(config.get("method")))
    fields = kind.__dataclass_fields__ if kind else {}
    found = {}
    for name, value in config.items():
        usual = fields[name].default if name in fields else None
        value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if name not in PLAIN and value is not None and (name == "at" or value != usual):
            found[name] = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return found


def in_words(options: dict[str, str]) -> str:
    """Options in one line."""
    return " ".join(value if name == "parts" else f"{name}={value}" for name, value in options.items())


def _places(row: Row) -> str:
    at = _at(row)
    return "its own blocks" if at is None else ",".join(map(str, at))


def _at(row: Row) -> tuple[Any, ...] | None:
    """Blocks that the row's config names, or None where the method chooses them."""
    at = (row.setting.config or {}).get("at")
    return None if at is None else tuple(at) if isinstance(at, list | tuple) else (at,)


def _moved(row: Row) -> str:
    """Say how many blocks a method acts in, if its paper has other ones: ", one block"; else ""."""
    kind = all_methods().get(str((row.setting.config or {}).get("method")))
    usual = kind.__dataclass_fields__["at"].default if kind else 3
    at = _at(row)
    if at is None or isinstance(usual, int) or at == usual:  # a single usual block is a mere default
        return ""
    return ", one block" if len(at) == 1 else f", {len(at)} blocks"

"""Rows put together that can be compared: the same images, the same precision, the same backbone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tntprune.errors import UserError
from tntprune.methods import METHODS, Config, all_methods
from tntprune.sweep.results import ResultRow

SCHEMES = {"single": "one location", "multi": "several locations"}
PLAIN = ("version", "method", "parts")  # what a config's options are not


@dataclass(frozen=True)
class BackboneRows:
    """One unpruned model and what was made of it.

    Args:
        label: Its name, with what tells it from others of that name.
        base: The unpruned row.
        rows: The others, by method and multiply-accumulates.
    """

    label: str
    base: ResultRow
    rows: tuple[ResultRow, ...]

    def lines(self, scheme: str) -> dict[str, list[ResultRow]]:
        """Return the rows of a scheme in lines, the most expensive row first.

        Rows of one name that act at different blocks are different lines. A line whose blocks are not those of the
        method's paper says so: "ToMe, one block".
        """
        return self._lines.get(scheme, {})

    @cached_property
    def _lines(self) -> dict[str, dict[str, list[ResultRow]]]:
        places: dict[tuple[str, str], set[str]] = {}
        for row in self.rows:
            places.setdefault((row.scheme, row.name), set()).add(_places(row))
        found: dict[str, dict[str, list[ResultRow]]] = {}
        for row in self.rows:
            several = len(places[row.scheme, row.name]) > 1
            label = f"{row.name} at {_places(row)}" if several else f"{row.name}{_moved(row)}"
            found.setdefault(row.scheme, {}).setdefault(label, []).append(row)
        return {
            scheme: {label: sorted(line, key=lambda row: -row.macs) for label, line in lines.items()}
            for scheme, lines in found.items()
        }


@dataclass(frozen=True)
class Group:
    """Rows measured on the same images in the same way.

    Args:
        label: What is the same in all of them.
        backbones: Each with its rows.
    """

    label: str
    backbones: tuple[BackboneRows, ...]

    @property
    def schemes(self) -> tuple[str, ...]:
        """Those of which there are rows."""
        return tuple(scheme for scheme in SCHEMES if any(backbone.lines(scheme) for backbone in self.backbones))


def grouped(rows: Iterable[ResultRow]) -> list[Group]:
    """Group rows by what they can be compared with, in the order in which each group first comes.

    Raises:
        UserError: there are none, or an unpruned model's row is missing.
    """
    found: dict[tuple[Any, ...], dict[tuple[Any, ...], list[ResultRow]]] = {}
    for row in rows:
        own = row.setting
        group = found.setdefault((own.data, own.images, own.precision, own.batch_size), {})
        group.setdefault((own.model, own.weights, own.img_size), []).append(row)
    if not found:
        raise UserError("no rows to report; expected those that tntprune sweep wrote")
    return [_group(backbones) for backbones in found.values()]


def _group(backbones: dict[tuple[Any, ...], list[ResultRow]]) -> Group:
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
        others = sorted((row for row in rows if row.setting.config is not None), key=lambda r: (order(r), -r.macs))
        made.append(BackboneRows(name, base, tuple(others)))
    return Group(label, tuple(made))


def _kind(config: dict[str, Any] | None) -> type[Config] | None:
    name = str((config or {}).get("method"))
    return METHODS.get(name) or all_methods().get(name)


def order(row: ResultRow) -> tuple[int, str]:
    """Return where a row's method stands among the others: as in our registry, then by name."""
    kind = _kind(row.setting.config)
    return len(METHODS) if kind is None else list(METHODS.values()).index(kind), row.name


def line_names(groups: Sequence[Group]) -> list[str]:
    """Return every line's name, in one order for all figures and tables of a page."""
    found: dict[str, tuple[int, str]] = {}
    for group in groups:
        for backbone in group.backbones:
            for scheme in group.schemes:
                for label, rows in backbone.lines(scheme).items():
                    found.setdefault(label, order(rows[0]))
    return sorted(found, key=lambda label: (*found[label], label))


def options_of(config: dict[str, Any] | None) -> dict[str, str]:
    """Return a config's options as text: where it acts, and what is not at its default."""
    if config is None:
        return {}
    if parts := config.get("parts"):
        return {"parts": " + ".join(f"{part.get('method')} {in_words(options_of(part))}" for part in parts)}
    kind = _kind(config)
    fields = kind.__dataclass_fields__ if kind else {}
    found = {}
    for name, value in config.items():
        usual = fields[name].default if name in fields else None
        value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if name not in PLAIN and value is not None and (name == "at" or value != usual):
            found[name] = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return found


def in_words(options: dict[str, str]) -> str:
    """Return options in one line."""
    return " ".join(value if name == "parts" else f"{name}={value}" for name, value in options.items())


def _places(row: ResultRow) -> str:
    at = _at(row)
    return "its own blocks" if at is None else ",".join(map(str, at))


def _at(row: ResultRow) -> tuple[Any, ...] | None:
    """Return the blocks that the row's config names, or None where the method chooses them."""
    at = (row.setting.config or {}).get("at")
    return None if at is None else tuple(at) if isinstance(at, list | tuple) else (at,)


def _moved(row: ResultRow) -> str:
    """Return in how many blocks a method acts, if its paper has other ones: ", one block"; else ""."""
    kind, at = _kind(row.setting.config), _at(row)
    usual = kind.__dataclass_fields__["at"].default if kind else 3
    if at is None or isinstance(usual, int) or at == usual:  # a single usual block is a mere default
        return ""
    return ", one block" if len(at) == 1 else f", {len(at)} blocks"

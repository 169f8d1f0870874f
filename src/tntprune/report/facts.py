"""How rows were measured: on what, with what, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from tntprune.report.groups import Group
from tntprune.report.page import paragraphs
from tntprune.report.tables import BUSY, Table, commands
from tntprune.sweep.results import Row

SPEED = (
    "Speed is that of the forward pass alone, without reading or moving images. Speed-up is the median over the rounds "
    "of the ratio to the unpruned model, which takes turns with the pruned one; images/s of different runs are not "
    "compared, because the machine differs from run to run. Memory is what a pass needs beside weights and images."
)
MOST = 8  # different values of a fact that are shown


def measured(rows: Sequence[Row], groups: Sequence[Group]) -> str:
    """The section of a page that says so, as HTML."""
    facts = [("Images", "; ".join(group.label for group in groups)), ("Skipped", _skipped(rows))]
    for name, heading in (("hardware", "Hardware"), ("versions", "Versions"), ("date", "Dates")):
        values = Counter(_words(row.about[name]) for row in rows if row.about.get(name))
        several = [f"{value} ({count} rows)" for value, count in values.items()]
        told = "; ".join(values if len(values) == 1 else several[:MOST])
        more = f"; and {len(values) - MOST} more" if len(values) > MOST else ""
        facts.append((heading, told + more if values else "not recorded"))
    timed = Counter(row.timed_on for row in rows if row.timed_on)
    if set(timed) - {row.about.get("hardware") for row in rows}:
        facts.append(("Speed measured on", "; ".join(str(machine) for machine in timed)))
    seconds = [row.about["seconds"] for row in rows if isinstance(row.about.get("seconds"), int | float)]
    if seconds:
        facts.append(("Time", f"{sum(seconds) / 60:,.1f} minutes for {len(seconds)} rows"))
    if bases := [backbone for group in groups for backbone in group.backbones if backbone.base.images_per_s]:
        facts.append(("Unpruned", "; ".join(f"{one.label} {one.base.images_per_s:,.1f} images/s" for one in bases)))
    facts.append(("Other programs", _busy(rows)))
    listed = Table([], [list(fact) for fact in facts], words=[1]).html()
    again = commands(rows).html()
    return (
        paragraphs([SPEED] if any(row.images_per_s is not None for row in rows) else [])
        + listed
        + f"<details><summary>The command of each of the {len(rows)} rows</summary>{again}</details>"
    )


def _words(value: Any) -> str:
    return ", ".join(f"{name} {own}" for name, own in value.items()) if isinstance(value, dict) else str(value)


def _skipped(rows: Sequence[Row]) -> str:
    most = max(row.skipped for row in rows)
    if most == 0:
        return "none; every image could be read"
    some = sum(row.skipped > 0 for row in rows)
    return f"up to {most:,} images that could not be read, in {some} of {len(rows)} rows; they are not counted"


def _busy(rows: Sequence[Row]) -> str:
    known = [row.busy for row in rows if row.busy is not None]
    if not known:
        return "speed was not measured" if all(row.images_per_s is None for row in rows) else "not recorded"
    marked = sum(busy > BUSY for busy in known)
    return (
        f"used {median(known):.2f} processors in the median row while speed was measured, {max(known):.2f} at most; "
        f"{f'{marked} rows are marked †' if marked else 'no row is marked for it'}"
    )

"""Every table and figure of the paper as settings to be run, each beside what its authors reported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tntprune.errors import UsageError
from tntprune.paper.ablation import ablation
from tntprune.paper.authors import authors_of, ranking
from tntprune.paper.entries import COLUMNS, MAPPED, MAPS, Agenda, Entry, TokenMap, unpruned
from tntprune.paper.names import BACKBONES, METHODS, check_only
from tntprune.paper.settings import MODELS, published
from tntprune.paper.substitute import substitute


def make_plan(backbones: Sequence[str] = BACKBONES, only: Sequence[str] = ()) -> Agenda:
    """The plan for some backbones: the paper's own, or any other supported model in the place of one.

    Args:
        backbones: Names of models.
        only: Parts of the paper (single, multi, ablation, maps) and methods; nothing is everything.

    Raises:
        UsageError: a name is unknown, or nothing is left.
        UserError: a model is not supported.
    """
    parts, methods = check_only(tuple(only))
    plans = []
    for backbone in dict.fromkeys(backbones):
        if backbone in BACKBONES:
            figure = TokenMap(backbone, METHODS["tnt"], MAPS, "tnt")
            maps = (figure,) if backbone in MAPPED else ()
            plans.append(Agenda(_of_paper(backbone), ablation(backbone), maps=maps))
        else:
            plans.append(substitute(backbone))
    entries = [
        entry
        for plan in plans
        for entry in plan.entries
        if entry.config is None or (entry.table in parts and entry.method in methods)
    ]
    rows = [e for plan in plans for e in plan.ablation if "ablation" in parts and e.method in methods]
    drawn = tuple(one for plan in plans for one in plan.maps if "maps" in parts and one.training in methods)
    if not drawn and all(entry.config is None for entry in (*entries, *rows)):
        raise UsageError(f"--only {' '.join(only)}: the paper has nothing of that for {', '.join(backbones)}")
    compared = {entry.backbone for entry in (*entries, *rows) if entry.config is not None}
    entries = [entry for entry in entries if entry.backbone in compared]
    left_out = tuple(one for plan in plans for one in plan.left_out if one[1] in methods)
    return Agenda(tuple(entries), tuple(rows), tuple(_bases([*entries, *rows])), drawn, left_out)


def _bases(entries: Iterable[Entry]) -> list[Entry]:
    """An unpruned entry for every model that is run and has none."""
    listed = {entry.model for entry in entries if entry.config is None}
    wanted = {entry.model: entry for entry in entries if entry.model not in listed}
    return [unpruned(model, entry.backbone) for model, entry in wanted.items()]


def _of_paper(backbone: str) -> tuple[Entry, ...]:
    ranks = ranking(name for name, model in MODELS.items() if model == backbone)
    found = []
    for one in published():
        if MODELS[one.row["backbone"]] != backbone:
            continue
        row = {name: one.row[name] for name in COLUMNS}
        table: Any = one.row["scheme"] or "unpruned"
        name = METHODS.get(one.row["method"], "unpruned")
        rank = ranks.get(one.name, 0)
        found.append(
            Entry(table, backbone, one.model, name, row, one.config, rank, authors_of(one), True, one.note)
        )  # fmt: skip
    return tuple(found)

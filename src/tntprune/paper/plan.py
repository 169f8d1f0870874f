"""Every table and figure of the paper as settings to be run, each beside what its authors reported.

A model that the paper does not have gets the whole plan too, each setting beside the row that is nearest to it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tntprune.backbones.base import find_backbone
from tntprune.backbones.models import shape_of
from tntprune.errors import UsageError, UserError
from tntprune.methods import TNT, Config, Random, ToMe, ZeroTPrune, obstacle_to
from tntprune.methods.base import Layout
from tntprune.methods.steps import truncated
from tntprune.paper.entries import (
    BACKBONES,
    COLUMNS,
    MAPS,
    METHODS,
    Entry,
    PaperPlan,
    TokenMap,
    ablation,
    unpruned,
)  # fmt: skip
from tntprune.paper.settings import MODELS, MULTI, PARAMETERS, PATCHES, Columns, published, ranking, setting

PARTS = ("single", "multi", "ablation", "maps")  # of the paper
MAPPED = ("deit_base_distilled_patch16_224", "deit_small_distilled_patch16_224")  # of the paper's two figures
NEAREST = "deit_tiny_distilled"
ELSEWHERE = "deit_small_distilled"  # for what the nearest backbone lacks: EViT, and TNT with a linear scorer
DEPTH = 12  # blocks that the paper's settings count with
EVIT = "the rows of EViT on DeiT-S are mislabelled; the rate is that of the row of the same rank on DeiT-B"


def make_plan(backbones: Sequence[str] = BACKBONES, only: Sequence[str] = ()) -> PaperPlan:
    """Return the plan for some backbones: the paper's own, or any other supported model in the place of one.

    Args:
        backbones: Names of models.
        only: Parts of the paper (single, multi, ablation, maps) and methods; nothing is everything.

    Raises:
        UsageError: a name is unknown, or nothing is left.
        UserError: a model is not supported.
    """
    known = [*PARTS, *METHODS]
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"--only {name}: expected some of {', '.join(known)}{hint}")
    parts, methods = (set(only) & set(kind) or set(kind) for kind in (PARTS, METHODS))
    plans = [_of_paper(name) if name in BACKBONES else substitute(name) for name in dict.fromkeys(backbones)]
    entries = [
        entry
        for plan in plans
        for entry in plan.entries
        if entry.config is None or (entry.table in parts and entry.method in methods)
    ]
    rows = [e for plan in plans for e in plan.ablation if "ablation" in parts and e.method in methods]
    drawn = tuple(one for plan in plans for one in plan.maps if "maps" in parts and one.training in methods)
    compared = {entry.backbone for entry in (*entries, *rows) if entry.config is not None}
    if not drawn and not compared:
        raise UsageError(f"--only {' '.join(only)}: the paper has nothing of that for {', '.join(backbones)}")
    entries = [entry for entry in entries if entry.backbone in compared]
    left_out = tuple(one for plan in plans for one in plan.left_out if one[1] in methods)
    return PaperPlan(tuple(entries), tuple(rows), tuple(_bases([*entries, *rows])), drawn, left_out)


def _bases(entries: Iterable[Entry]) -> list[Entry]:
    """Return an unpruned entry for every model that is run and has none."""
    listed = {entry.model for entry in entries if entry.config is None}
    wanted = {entry.model: entry for entry in entries if entry.model not in listed}
    return [unpruned(model, entry.backbone) for model, entry in wanted.items()]


def _of_paper(backbone: str) -> PaperPlan:
    ranks = ranking(name for name, model in MODELS.items() if model == backbone)
    entries = []
    for one in published():
        if MODELS[one.row["backbone"]] == backbone:
            row = {name: one.row[name] for name in COLUMNS}
            table: Any = one.row["scheme"] or "unpruned"
            name, rank = METHODS.get(one.row["method"], "unpruned"), ranks.get(one.name, 0)
            entries.append(
                Entry(table, backbone, one.model, name, row, one.config, rank, one.authors, True, one.authors.note)
            )
    maps = (TokenMap(backbone, METHODS["tnt"], MAPS, "tnt"),) if backbone in MAPPED else ()
    return PaperPlan(tuple(entries), ablation(backbone), maps=maps)


def substitute(model: str) -> PaperPlan:
    """Return all methods, both schemes, all rates, the ablation and the maps for a model that the paper does not have.

    Counts that the paper gives as numbers of tokens, ToMe's r and TNT's similar tokens, are scaled where the model has
    another number of patches than the paper's 196. What has no row in the paper is there too: random drop at several
    locations, at Top-K's rates, and TNT with our own recipe.

    Raises:
        UsageError: there is no such model.
        UserError: it is not supported, or has fewer blocks than the paper's settings count with.
    """
    shape = shape_of(model)
    layout = find_backbone(shape).layout(shape)
    if layout.depth < DEPTH:
        raise UserError(f"{model}: {layout.depth} blocks; expected at least {DEPTH}, where the paper's settings act")
    near = next(one for one in published() if one.row["method"] == "none" and one.row["backbone"] == NEAREST)
    entries, left_out = [], {}
    for entry in _beside_nearest(model, layout):
        assert entry.config is not None
        if reason := obstacle_to(type(entry.config), layout, entry.config):
            left_out[entry.method] = (model, entry.method, reason)
        else:
            entries.append(entry)
    order = list(METHODS)
    entries.sort(key=lambda e: (e.scheme != "single", e.rank, order.index(e.method)))
    rows = [replace(entry, config=fitted(entry.config, layout)) for entry in ablation(model, stands_in=True)]
    scaled = fitted(MAPS, layout)
    maps = (
        TokenMap(model, METHODS["tnt"], scaled, "tnt"),
        TokenMap(model, METHODS["tnt-relative"], replace(scaled, recipe="relative"), "tnt-relative"),
    )
    first = unpruned(model, model, near.authors, own=False)
    return PaperPlan((first, *entries), tuple(rows), maps=maps, left_out=tuple(left_out.values()))


def fitted(config: Config | None, layout: Layout) -> Any:
    """Return a config with its counts of tokens scaled from 196 patches to a model's."""
    scale = layout.patches / PATCHES
    if isinstance(config, TNT | ZeroTPrune):
        return replace(config, similar=round(config.similar * scale))
    if isinstance(config, ToMe) and config.r is not None:
        return replace(config, r=tuple(round(r * scale) for r in config.rs))
    return config


def _beside_nearest(model: str, layout: Layout) -> Iterator[Entry]:
    ranks = ranking((NEAREST, ELSEWHERE, "deit_base_distilled"))
    rows = [one for one in published() if one.name in ranks]
    places: dict[tuple[str, int], Columns] = {}  # regime and bucket are the nearest one's
    evit: dict[int, str] = {}  # what EViT ran, by rank, on the one backbone whose rows say it right
    for one in rows:
        rank, scheme = ranks[one.name], one.row["scheme"]
        if one.row["backbone"] == NEAREST:
            places[scheme, rank] = {name: one.row[name] for name in ("regime", "gflops_bucket")}
        elif (one.row["backbone"], scheme, one.row["method"]) == ("deit_base_distilled", "multi", "evit"):
            evit[rank] = one.printed
    for one in rows:
        method, rank = one.row["method"], ranks[one.name]
        if one.row["backbone"] != (ELSEWHERE if method in ("evit", "tnt") else NEAREST):
            continue
        table: Any = one.row["scheme"]
        parameter, note = one.as_run, one.authors.note
        if method == "evit" and table == "multi":
            parameter, note = evit[rank], EVIT
        elif method == "evit":
            parameter = one.printed
        filled = next(column for column in PARAMETERS if one.row[column])
        own = {column: one.row[column] for column in COLUMNS} | places[table, rank] | {filled: parameter}
        config = fitted(setting({**one.row, **own}, parameter), layout)
        if method == "tome" and table == "single":
            config = replace(config, r=(layout.patches - truncated(layout.patches, float(parameter)),))
        own["backbone"] = model
        entry = Entry(table, model, model, METHODS[method], own, config, rank, one.authors, own=False, note=note)
        yield entry
        if method == "topk" and table == "multi":
            yield _extra(entry, "random", Random(at=MULTI, keep=tuple(map(float, parameter.split()))))
        if method == "tnt":
            yield _extra(entry, "tnt-relative", replace(config, recipe="relative"))


def _extra(entry: Entry, method: str, config: Config) -> Entry:
    """Return a setting that the paper has no row for, at the rates of one that it has."""
    row = {**entry.row, "method": method}
    return replace(entry, name=METHODS[method], row=row, config=config, authors=None, note="")

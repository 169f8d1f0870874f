"""The whole plan for a model that the paper does not have, each setting beside the row that is nearest to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tntprune.backbones.base import find_backbone
from tntprune.backbones.models import shape_of
from tntprune.errors import UserError
from tntprune.methods import TNT, Config, Random, ToMe, ZeroTPrune, implementation
from tntprune.methods.base import Layout
from tntprune.methods.steps import truncated
from tntprune.paper.ablation import ablation
from tntprune.paper.authors import Authors, authors_of, ranking
from tntprune.paper.entries import COLUMNS, MAPS, Agenda, Entry, TokenMap, unpruned
from tntprune.paper.names import METHODS
from tntprune.paper.settings import MULTI, PARAMETERS, PATCHES, Published, Row, published, setting

NEAREST = "deit_tiny_distilled"
ELSEWHERE = "deit_small_distilled"  # for what the nearest backbone lacks: EViT, and TNT with a linear scorer
DEPTH = 12  # blocks that the paper's settings count with
EVIT = "the rows of EViT on DeiT-S are mislabelled; the rate is that of the row of the same rank on DeiT-B"


def substitute(model: str) -> Agenda:
    """All methods, both schemes, all rates, the ablation and the maps.

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
    entries, left_out = [unpruned(model, model, authors_of(near), own=False)], {}
    for entry in _entries(model, layout):
        assert entry.config is not None
        reason = implementation(type(entry.config)).obstacle(layout, entry.config)
        if reason:
            left_out[entry.method] = (model, entry.method, reason)
        else:
            entries.append(entry)
    order = list(METHODS)
    entries[1:] = sorted(entries[1:], key=lambda e: (e.scheme != "single", e.rank, order.index(e.method)))
    rows = [replace(entry, config=fitted(entry.config, layout)) for entry in ablation(model, stands_in=True)]
    scaled = fitted(MAPS, layout)
    maps = (
        TokenMap(model, METHODS["tnt"], scaled, "tnt"),
        TokenMap(model, METHODS["tnt-relative"], replace(scaled, recipe="relative"), "tnt-relative"),
    )
    return Agenda(tuple(entries), tuple(rows), maps=maps, left_out=tuple(left_out.values()))


def fitted(config: Config | None, layout: Layout) -> Any:
    """A config with its counts of tokens scaled from 196 patches to a model's."""
    scale = layout.patches / PATCHES
    if isinstance(config, TNT | ZeroTPrune):
        return replace(config, similar=round(config.similar * scale))
    if isinstance(config, ToMe) and config.r is not None:
        return replace(config, r=tuple(round(r * scale) for r in config.rs))
    return config


def _entries(model: str, layout: Layout) -> Iterator[Entry]:
    ranks = ranking((NEAREST, ELSEWHERE, "deit_base_distilled"))
    rows = {one.name: one for one in published() if one.name in ranks}
    regimes = {(one.row["scheme"], ranks[one.name]): one.row for one in rows.values() if one.row["backbone"] == NEAREST}
    rates = {  # what EViT ran, by rank, on the one backbone whose rows say it right
        ranks[one.name]: one.printed
        for one in rows.values()
        if (one.row["backbone"], one.row["scheme"], one.row["method"]) == ("deit_base_distilled", "multi", "evit")
    }
    for name, one in rows.items():
        method, scheme, rank = one.row["method"], one.row["scheme"], ranks[name]
        if one.row["backbone"] != (ELSEWHERE if method in ("evit", "tnt") else NEAREST):
            continue
        parameter, note = one.as_run, one.note
        if method == "evit" and (one.as_run != one.printed or scheme == "multi"):
            parameter, note = (rates[rank], EVIT) if scheme == "multi" else (one.printed, one.note)
        where = regimes[scheme, rank]
        row = _row(model, one, parameter, where)
        config = fitted(setting({**one.row, **row, "backbone": one.row["backbone"]}, parameter), layout)
        if method == "tome" and scheme == "single":
            config = replace(config, r=(layout.patches - truncated(layout.patches, float(parameter)),))
        entry = Entry(
            _table(scheme), model, model, METHODS[method], row, config, rank, authors_of(one), own=False, note=note
        )
        yield entry
        if method == "topk" and scheme == "multi":
            kept = tuple(float(rate) for rate in parameter.split())
            yield _extra(entry, "random", Random(at=MULTI, keep=kept))
        if method == "tnt":
            yield _extra(entry, "tnt-relative", replace(config, recipe="relative"))


def _table(scheme: str) -> Any:
    return scheme


def _extra(entry: Entry, method: str, config: Config) -> Entry:
    """A setting that the paper has no row for, at the rates of one that it has."""
    nothing: Authors | None = None
    return replace(
        entry, name=METHODS[method], row={**entry.row, "method": method}, config=config, authors=nothing, note=""
    )


def _row(model: str, one: Published, parameter: str, where: Row) -> Row:
    """The columns of published.csv for a setting that stands beside a row; regime and bucket are the nearest one's."""
    row = {column: one.row[column] for column in COLUMNS}
    filled = next(column for column in PARAMETERS if one.row[column])
    places = {name: where[name] for name in ("regime", "gflops_bucket")}
    return {**row, **places, "backbone": model, filled: parameter}

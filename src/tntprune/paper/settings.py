"""Every row of the paper's appendix tables, with the setting that gives its multiply-accumulates.

The authors' are the columns of published.csv up to `images_per_s`, as they are printed: top-1, GFLOPs (in truth
multiply-accumulates, in billions) and images/s on one A40. Nothing of that was measured here.
Ours are the columns behind them, `as_run`, `note` and `not_met`, and everything in this file: how each method was run
was worked out from the printed GFLOPs, because most of it is said nowhere. That fixes how many tokens stand where, not
how they were chosen. `HOW` says for each method what is known; a row's note says where it departs from what is printed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tntprune.methods import TNT, Config, DynamicViT, EViT, Random, ToMe, TopK, ZeroTPrune

Columns = dict[str, str]  # of a row of published.csv, by name

PARAMETERS = ("keep", "tokens", "rates", "rho", "r")  # columns of which each reduced row fills in one
PATCHES = 196  # of every model in the tables
MULTI = (3, 4, 5)  # the paper's blocks for TNT and Top-K

MODELS = {
    "deit_base_distilled": "deit_base_distilled_patch16_224",
    "deit_small_distilled": "deit_small_distilled_patch16_224",
    "deit_tiny_distilled": "deit_tiny_distilled_patch16_224",
    "vit16_mlp768": "vit16",
}
ON_PLAIN = ("dynamicvit", "evit")  # these rows count right with one prefix token only: on plain, not distilled, DeiT

HOW = {
    "none": "",
    "random": "After block 3, on ViT/16 after block 2.",
    "topk": "Inside blocks 3, 4 and 5, in single-layer rows inside block 3; shares are of what arrives, truncated.",
    "tnt": "After blocks 3, 4 and 5, with 40 similar tokens removed before block 1; single-layer after block 3 with "
    "25, on ViT/16 after block 2 with 30.",
    "tnt-mlp": "As tnt, with an MLP scorer that nothing public defines: a hidden layer of twice the width fits.",
    "tome": "Inside every block; single-layer all at once inside block 3, on ViT/16 inside block 2. On ViT/16 whole "
    "keys were compared, as only that width fits.",
    "zerotprune": "50 iterations after block 3, on ViT/16 after block 2, 25 or 30 similar tokens being part of what "
    "goes; multi-layer with the printed 30, 5, 5, 1, 1 iterations, and similar tokens going beyond what the rates "
    "leave: 10, 5 or 2 at each layer as the rates fall, which is fitted to the GFLOPs and printed nowhere.",
    "dynamicvit": "On plain DeiT, although the tables say distilled, after blocks 3, 6 and 9; single-layer is the same "
    "with one share three times, so that one location drops and three predictors run.",
    "evit": "On plain DeiT, although the tables say distilled, inside blocks 4, 7 and 10, with the fused token; "
    "single-layer inside block 4 on B and inside block 3 on S.",
}


@dataclass(frozen=True)
class Authors:
    """What the paper reports of a setting, and of the unpruned model in the same table.

    Args:
        source: Which row of the paper that is.
        backbone: As published.csv names it.
        top1: Percent.
        gmacs: Billions of multiply-accumulates, which the paper calls GFLOPs.
        images_per_s: On one A40; None where none is printed.
        base: The same three figures of the unpruned model.
        note: What is odd about the row, or guessed; "" if nothing.
        not_met: Why the setting does not give the printed GFLOPs; "" where it does.
    """

    source: str
    backbone: str
    top1: float
    gmacs: float
    images_per_s: int | None
    base: tuple[float, float, int]
    note: str = ""
    not_met: str = ""

    @property
    def drop(self) -> float:
        """Points of accuracy below the unpruned model."""
        return self.base[0] - self.top1

    @property
    def share(self) -> float:
        """Of the unpruned model's multiply-accumulates."""
        return self.gmacs / self.base[1]

    @property
    def speedup(self) -> float | None:
        """Times as many images/s as the unpruned model."""
        return None if self.images_per_s is None else self.images_per_s / self.base[2]

    def agrees(self, macs: int) -> bool:
        """Return whether a count is the printed one, within its rounding (0.015 to be fair to it) or half a percent."""
        return abs(macs / 1e9 - self.gmacs) <= max(0.015, 0.005 * self.gmacs)


@dataclass(frozen=True)
class Published:
    """One row.

    Args:
        row: Every column of published.csv, as it stands there.
        name: What tells the row from all others.
        model: The model that was run, by the name that our commands take.
        config: The setting that gives its multiply-accumulates; None for an unpruned model.
        printed: The parameter that is printed, "0.9 0.9 0.8" for example.
        as_run: The one that was run: another one where the printed one is a misprint.
        authors: What is printed.
    """

    row: Columns
    name: str
    model: str
    config: Config | None
    printed: str
    as_run: str
    authors: Authors

    @property
    def how(self) -> str:
        """How the method was run, as far as the figures show it."""
        return HOW[self.row["method"]]


def read_csv(name: str) -> list[Columns]:
    """Read one of our files of what the authors printed."""
    return list(csv.DictReader(files("tntprune.paper").joinpath(name).read_text(encoding="utf-8").splitlines()))


def authors_of(row: Columns, source: str) -> Authors:
    """Return what a row of one of our files says of its authors' figures."""
    base = _unpruned()[row["backbone"]]
    return Authors(
        source, row["backbone"], *_figures(row), base=(*_figures(base)[:2], int(base["images_per_s"])),
        note=row["note"], not_met=row["not_met"],
    )  # fmt: skip


def _figures(row: Columns) -> tuple[float, float, int | None]:
    return float(row["top1"]), float(row["gflops"]), int(row["images_per_s"]) if row["images_per_s"] else None


@cache
def _unpruned() -> dict[str, Columns]:
    return {row["backbone"]: row for row in read_csv("published.csv") if row["method"] == "none"}


@cache
def published() -> tuple[Published, ...]:
    """Return all rows, in the paper's order."""
    return tuple(map(_published, read_csv("published.csv")))


def _published(row: Columns) -> Published:
    printed = next((row[name] for name in PARAMETERS if row[name]), "")
    as_run, model, bucket = row["as_run"] or printed, MODELS[row["backbone"]], row["gflops_bucket"]
    if row["method"] in ON_PLAIN:
        model = model.replace("_distilled", "")
    words = (row["backbone"], row["scheme"], row["method"], printed, bucket and f"at {bucket}")
    name = " ".join(filter(None, words))
    return Published(row, name, model, setting(row, as_run), printed, as_run, authors_of(row, name))


def ranking(backbones: Iterable[str]) -> dict[str, int]:
    """Return the place of each row of some backbones of published.csv, by its name: 1 keeps most tokens."""
    return {name: rank for backbone in backbones for name, rank in _ranks(backbone).items()}


@cache
def _ranks(backbone: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for scheme in ("single", "multi"):
        rows = [one for one in published() if (one.row["backbone"], one.row["scheme"]) == (backbone, scheme)]
        amounts = {one.name: float(one.printed if scheme == "single" else one.row["gflops_bucket"]) for one in rows}
        places = {amount: rank for rank, amount in enumerate(sorted(set(amounts.values()), reverse=True), 1)}
        found |= {name: places[amount] for name, amount in amounts.items()}
    return found


def setting(row: Columns, parameter: str) -> Config | None:
    """Return what a row ran, had it run a parameter; None for an unpruned model."""
    method, single = row["method"], row["scheme"] == "single"
    vit = row["backbone"] == "vit16_mlp768"  # the paper's ViT/16, not a DeiT
    layer = 2 if vit else 3  # where single-layer rows prune
    rates = () if row["tokens"] else tuple(map(float, parameter.split()))
    amount: dict[str, Any] = {"keep": rates} if rates else {"tokens": int(parameter or 0)}
    match method, single:
        case "random", _:
            return Random(at=layer, **amount)
        case "topk", _:
            return TopK(at=layer if single else MULTI, **amount)
        case (("tnt" | "tnt-mlp"), _):
            similar = 40 if not single else 30 if vit else 25
            scorer: Any = "mlp" if method == "tnt-mlp" else "linear"
            return TNT(at=layer if single else MULTI, similar=similar, recipe="paper", scorer=scorer, **amount)
        case "tome", _:
            metric: Any = "concat" if vit else "mean"
            if not single:
                return ToMe(r=int(parameter), metric=metric)
            stay = int(parameter) if vit else int(PATCHES * rates[0] + 1e-9)
            return ToMe(at=layer, r=PATCHES - stay, metric=metric)
        case "zerotprune", True:
            similar = 30 if vit else 25
            return ZeroTPrune(at=layer, similar=similar, beyond=False, stages="is", iterations=50, **amount)
        case "zerotprune", False:
            second = rates[1]  # the first layer that prunes
            similar = 10 if second > 0.5 else 5 if second == 0.5 else 2
            return ZeroTPrune(at=(1, 3, 6, 9, 11), similar=similar, stages="is", iterations=(30, 5, 5, 1, 1), **amount)
        case "dynamicvit", True:
            return DynamicViT(tokens=(int(parameter),) * 3) if vit else DynamicViT(keep=rates * 3)
        case "dynamicvit", False:
            return DynamicViT(keep=rates)
        case "evit", True:
            return EViT(at=4 if row["backbone"] == "deit_base_distilled" else 3, keep=rates)
        case "evit", False:
            return EViT(keep=rates)
    return None

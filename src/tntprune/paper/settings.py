"""Every row of the paper's appendix tables, with the setting that gives its multiply-accumulates.

The authors' are the columns of published.csv up to `images_per_s`, as they are printed: top-1, GFLOPs (in truth
multiply-accumulates, in billions) and images/s on one A40. Nothing of that was measured here.
Ours are the columns behind them, `as_run`, `note` and `not_met`, and everything in this file: how each method was run
was worked out from the printed GFLOPs, because most of it is said nowhere. That fixes how many tokens stand where, not
how they were chosen. `HOW` says for each method what is known; a row's note says where it departs from what is printed.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tntprune.methods import TNT, Config, DynamicViT, EViT, Random, ToMe, TopK, ZeroTPrune

Row = dict[str, str]

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
class Published:
    """One row.

    Args:
        row: Every column of published.csv, as it stands there.
        model: The model that was run, by the name that our commands take.
        config: The setting that gives its multiply-accumulates; None for an unpruned model.
        printed: The parameter that is printed, "0.9 0.9 0.8" for example.
        as_run: The one that was run: another one where the printed one is a misprint.
        note: What is odd about the row, or guessed; "" if nothing.
        not_met: Why the setting does not give the printed GFLOPs; "" where it does.
    """

    row: Row
    model: str
    config: Config | None
    printed: str
    as_run: str
    note: str
    not_met: str

    @property
    def name(self) -> str:
        """What tells the row from all others."""
        bucket = self.row["gflops_bucket"]
        words = (self.row["backbone"], self.row["scheme"], self.row["method"], self.printed, bucket and f"at {bucket}")
        return " ".join(filter(None, words))

    @property
    def how(self) -> str:
        """How the method was run, as far as the figures show it."""
        return HOW[self.row["method"]]

    @property
    def top1(self) -> float:
        """Printed top-1 accuracy in percent."""
        return float(self.row["top1"])

    @property
    def images_per_s(self) -> int | None:
        """Printed throughput; none is printed for random drop."""
        return int(self.row["images_per_s"]) if self.row["images_per_s"] else None

    @property
    def gmacs(self) -> float:
        """Printed GFLOPs, which are billions of multiply-accumulates."""
        return float(self.row["gflops"])

    def agrees(self, macs: int) -> bool:
        """Whether a count is the printed one, within its rounding (0.015 to be fair to it) or half a percent."""
        return abs(macs / 1e9 - self.gmacs) <= max(0.015, 0.005 * self.gmacs)


@cache
def published() -> tuple[Published, ...]:
    """All rows, in the paper's order."""
    text = files("tntprune.paper").joinpath("published.csv").read_text(encoding="utf-8")
    return tuple(_published(row) for row in csv.DictReader(text.splitlines()))


def _published(row: Row) -> Published:
    printed = next((row[name] for name in PARAMETERS if row[name]), "")
    as_run = row["as_run"] or printed
    model = MODELS[row["backbone"]]
    if row["method"] in ON_PLAIN:
        model = model.replace("_distilled", "")
    return Published(row, model, setting(row, as_run), printed, as_run, row["note"], row["not_met"])


def setting(row: Row, parameter: str) -> Config | None:
    """What a row ran, had it run a parameter; None for an unpruned model."""
    vit = row["backbone"] == "vit16_mlp768"
    case = _Case(row, parameter, single=row["scheme"] == "single", vit=vit)
    return SETTINGS[row["method"]](case) if row["method"] in SETTINGS else None


@dataclass(frozen=True)
class _Case:
    """What a setting depends on."""

    row: Row
    parameter: str  # the printed one, or the one that was run instead
    single: bool  # one layer, or several
    vit: bool  # the paper's ViT/16, or a DeiT

    @property
    def layer(self) -> int:
        """Where single-layer rows prune."""
        return 2 if self.vit else 3

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(float(rate) for rate in self.parameter.split())

    @property
    def amount(self) -> dict[str, Any]:
        """`keep`, or `tokens` in single-layer rows of ViT/16."""
        return {"tokens": int(self.parameter)} if self.row["tokens"] else {"keep": self.rates}


def _random(case: _Case) -> Config:
    return Random(at=case.layer, **case.amount)


def _topk(case: _Case) -> Config:
    return TopK(at=case.layer if case.single else MULTI, **case.amount)


def _tnt(case: _Case) -> Config:
    scorer: Any = "mlp" if case.row["method"] == "tnt-mlp" else "linear"
    if case.single:
        return TNT(at=case.layer, similar=30 if case.vit else 25, recipe="paper", scorer=scorer, **case.amount)
    return TNT(at=MULTI, similar=40, recipe="paper", scorer=scorer, **case.amount)


def _tome(case: _Case) -> Config:
    metric: Any = "concat" if case.vit else "mean"
    if not case.single:
        return ToMe(r=int(case.parameter), metric=metric)
    stay = int(case.parameter) if case.vit else int(PATCHES * float(case.parameter) + 1e-9)
    return ToMe(at=case.layer, r=PATCHES - stay, metric=metric)


def _zerotprune(case: _Case) -> Config:
    if case.single:
        similar = 30 if case.vit else 25
        return ZeroTPrune(at=case.layer, similar=similar, beyond=False, stages="is", iterations=50, **case.amount)
    second = case.rates[1]  # the first layer that prunes
    similar = 10 if second > 0.5 else 5 if second == 0.5 else 2
    return ZeroTPrune(at=(1, 3, 6, 9, 11), similar=similar, stages="is", iterations=(30, 5, 5, 1, 1), **case.amount)


def _dynamicvit(case: _Case) -> Config:
    if not case.single:
        return DynamicViT(keep=case.rates)
    return DynamicViT(tokens=(int(case.parameter),) * 3) if case.vit else DynamicViT(keep=case.rates * 3)


def _evit(case: _Case) -> Config:
    if not case.single:
        return EViT(keep=case.rates)
    return EViT(at=4 if case.row["backbone"] == "deit_base_distilled" else 3, keep=case.rates)


SETTINGS: dict[str, Callable[[_Case], Config]] = {
    "random": _random, "topk": _topk, "tnt": _tnt, "tnt-mlp": _tnt, "tome": _tome, "zerotprune": _zerotprune,
    "dynamicvit": _dynamicvit, "evit": _evit,
}  # fmt: skip

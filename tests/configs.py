"""Every method with its options, for the tests that run each of them."""

from __future__ import annotations

import pytest
import torch

from tntprune import (
    ATC,
    ATS,
    DTEM,
    MCTF,
    TNT,
    AViT,
    DiffRate,
    DynamicViT,
    EViT,
    EvoViT,
    PiToMe,
    Random,
    ToFu,
    ToMe,
    TopK,
    ZeroTPrune,
)  # fmt: skip
from tntprune.backbones.attach import reduction_of
from tntprune.reduce import reduce_

CONFIGS = {
    "random": Random(at=2, keep=0.5),
    "random-several": Random(at=(1, 3), keep=(0.8, 0.5)),
    "random-start": Random(at=0, tokens=9),
    "tnt": TNT(at=2, keep=0.5, recipe="relative"),
    "tnt-paper": TNT(at=2, keep=0.5, recipe="paper"),
    "tnt-mlp": TNT(at=2, keep=0.5, recipe="relative", scorer="mlp"),
    "tnt-similar": TNT(at=3, keep=0.5, similar=5),
    "tnt-similar-merge": TNT(at=3, keep=0.5, similar=5, similar_how="merge"),
    "tnt-sequential": TNT(at=3, keep=0.5, similar=5, partition="sequential"),
    "tnt-several": TNT(at=(1, 2, 4), keep=(0.9, 0.8, 0.5), similar=6),
    "tnt-several-merge": TNT(at=(1, 2), keep=0.8, similar=6, similar_how="merge"),
    "tnt-similar-each": TNT(at=(1, 2), keep=0.8, similar=3, similar_at="score"),
    "tnt-only-similar": TNT(at=2, keep=0.9, similar=25),
    "tnt-embedding": TNT(at=0, tokens=9, noise_blocks=(0, 1), recipe="relative"),
    "tnt-merging": TNT(at=2, keep=0.5),
    "tnt-attention": TNT(at=(1, 3), keep=0.7, score="attention"),
    "tnt-both": TNT(at=2, keep=0.5, score="both", how="drop"),
    "tnt-merging-inside": TNT(at=(1, 2, 4), keep=(0.8, 0.7, 0.5), inside=True, metric="mean"),
    "tnt-windows": TNT(at=(2, 4), keep=(0.6, 0.5), window=4),
    "topk": TopK(at=2, keep=0.5),
    "topk-after": TopK(at=(2, 3), keep=0.7, inside=False, rows="mean"),
    "evit": EViT(at=(2, 4), keep=0.7),
    "evit-normalised": EViT(at=2, keep=0.5, normalise=True, inside=False),
    "dynamicvit": DynamicViT(at=(2, 4), keep=0.6),
    "tome": ToMe(r=5),
    "tome-passes": ToMe(at=(2, 4), keep=0.4, inside=False, metric="x", proportional=False),
    "tome-mlerp": ToMe(r=5, average="mlerp"),
    "tome-windows": ToMe(r=5, window=4),
    "pitome": PiToMe(r=5),
    "pitome-passes": PiToMe(at=(2, 4), keep=0.4, inside=False, metric="x"),
    "tofu": ToFu(r=5),
    "zerotprune": ZeroTPrune(at=(1, 3), keep=0.8, similar=4),
    "zerotprune-is": ZeroTPrune(at=2, keep=0.5, similar=5, beyond=False, stages="is", feature="x", variance=None),
    "ats": ATS(at=(2, 4), keep=0.6),
    "avit": AViT(gate_center=5.0),
    "avit-fixed": AViT(at=2, keep=0.5),
    "evovit": EvoViT(at=(2, 4), keep=0.5),
    "mctf": MCTF(r=5),
    "mctf-passes": MCTF(at=(2, 4), keep=0.4, inside=False, metric="mean", proportional=False),
    "atc": ATC(at=(2, 4), keep=0.8),
    "atc-average": ATC(at=2, r=20, linkage="average", inside=False, metric="x", proportional=False),
    "dtem": DTEM(r=5),
    "dtem-passes": DTEM(at=(2, 4), keep=0.4, inside=False, metric="x", width=5),
    "diffrate": DiffRate(at=(2, 4), prune=(9, 5), merge=(8, 20)),
    "diffrate-budget": DiffRate(budget=0.7),
}
FIRST = (  # one of each kind of method
    "random", "tnt", "tnt-merging", "topk", "evit", "dynamicvit", "tome", "zerotprune", "ats", "avit", "evovit",
    "pitome", "tofu", "mctf", "atc",
    "dtem", "diffrate",
)  # fmt: skip
SOME = ("random", "tnt-similar", "tnt-several", "tnt-similar-merge", "tnt-merging-inside", "evit", "tome", "ats")
EACH = (
    "tnt-similar-merge",
    "tnt-merging",
    "tnt-attention",
    "tnt-merging-inside",
    "tnt-windows",
    "topk",
    "evit",
    "dynamicvit",
    "tome",
    "tome-passes",
    "tome-windows",
    "pitome",
    "tofu",
    "zerotprune",
    "ats",
    "avit",
    "evovit",
    "mctf",
    "atc",
    "dtem",
    "diffrate",
)
LOOSE = (
    "ats",
    "avit",
    "evovit",
)  # what they keep is no fixed number; they have tests of their own


def run(model, images):
    with torch.inference_mode():
        return model(images)


def stirred(model, config):
    """A reduced model whose scorers are not near zero, so that scores differ."""
    reduce_(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reduction_of(model).parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


def first(values, chosen):
    """Values to parametrise with; those that are not chosen are left to the wide tests."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.wide) for value in values]

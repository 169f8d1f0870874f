"""The closed form against the paper's own figures and against counting a real run."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import timm
import torch
from fvcore.nn import FlopCountAnalysis

from conftest import make, photos_for
from tntprune import TNT, Random, macs, reduce_, vit16
from tntprune.reduce import base_of

TABLES = Path(os.environ.get("TNTPRUNE_TABLES", Path(__file__).parents[2] / "shared" / "paper" / "tables.csv"))
MISPRINTS = {  # notes.md: each of these rows prints something else than was run
    ("deit_base_distilled", "tnt", "0.45"): "10.31 is printed for 10.36",
    ("vit16_mlp768", "tnt", "3.90"): "the rates are printed as .65 .85 .7 where .6 .8 .7 was run",
    ("deit_tiny_distilled", "tnt-mlp", "0.93"): "0.96 fits neither reading; 0.94 to 0.95 is computed",
}
NAMES = {
    "deit_base_distilled": "deit_base_distilled_patch16_224",
    "deit_small_distilled": "deit_small_distilled_patch16_224",
    "deit_tiny_distilled": "deit_tiny_distilled_patch16_224",
}


def rows():
    if not TABLES.is_file():
        return []
    with TABLES.open() as file:
        return [row for row in csv.DictReader(file) if row["method"] in ("none", "tnt", "tnt-mlp", "random")]


def on_paper(row) -> float:
    """GMACs of a row of the paper, from its settings alone."""
    with torch.device("meta"):
        model = vit16() if row["backbone"] == "vit16_mlp768" else timm.create_model(NAMES[row["backbone"]])
    vit = row["backbone"] == "vit16_mlp768"
    if row["method"] == "none":
        return macs(model).macs / 1e9
    amount = {"tokens": int(row["tokens"])} if row["tokens"] else {}
    if row["keep"]:
        amount = {"keep": float(row["keep"])}
    if row["method"] == "random":
        config = Random(at=2 if vit else 3, **amount)
    elif row["scheme"] == "single":
        scorer = "mlp" if row["method"] == "tnt-mlp" else "linear"
        config = TNT(at=2 if vit else 3, similar=30 if vit else 25, recipe="paper", scorer=scorer, **amount)
    else:
        scorer = "mlp" if row["method"] == "tnt-mlp" else "linear"
        rates = tuple(float(rate) for rate in row["rates"].split())
        config = TNT(at=(3, 4, 5), keep=rates, similar=40, recipe="paper", scorer=scorer)
    return macs(reduce_(model, config)).macs / 1e9


@pytest.mark.realdata
@pytest.mark.parametrize(
    "row", rows(), ids=lambda r: "-".join(v for k, v in r.items() if v and k not in ("top1", "images_per_s"))
)
def test_the_papers_gflops_are_met(row):
    key = (row["backbone"], row["method"], row["keep"] or row["gflops_bucket"])
    allowed = 0.02 if row["method"] == "tnt-mlp" else 0.01
    difference = abs(round(on_paper(row), 2) - float(row["gflops"]))
    if key in MISPRINTS:
        assert difference > 0.005, f"no misprint after all: {MISPRINTS[key]}"
    else:
        assert difference <= allowed + 1e-9


def test_the_figures_that_the_notes_give():
    """Here too, so that something is checked where the paper's tables are not at hand."""
    expected = {
        "deit_base_distilled": 17.68,
        "deit_small_distilled": 4.63,
        "deit_tiny_distilled": 1.27,
        "vit16_mlp768": 9.17,
    }
    for backbone, gflops in expected.items():
        assert round(on_paper({"backbone": backbone, "method": "none"}), 2) == gflops
    row = {
        "backbone": "deit_small_distilled",
        "method": "tnt",
        "scheme": "single",
        "keep": "0.5",
        "tokens": "",
        "rates": "",
    }
    assert round(on_paper(row), 2) == 2.87


CONFIGS = [
    None,
    Random(at=2, keep=0.5),
    TNT(at=2, keep=0.5, similar=4, recipe="paper"),
    TNT(at=(1, 3), keep=(0.8, 0.5), similar=7, recipe="paper", scorer="mlp"),
    TNT(at=3, keep=0.25, similar=4),
]
COUNTED = [
    "plain",
    "distilled",
    "registers",
    "no_cls",
    "avg_with_cls",
    "map_pool",
    "layer_scale",
    "pre_norm",
    "non_square",
    "patch_8x4",
    "test_vit",
    "test_vit2",
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("kind", COUNTED)
def test_predicted_equals_counted(kind, config):
    """fvcore runs the model and counts every product; fused attention is off, because it would be missed."""
    model = make(kind)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    if config is not None:
        reduce_(model, config)
    counter = (
        FlopCountAnalysis(model, photos_for(model, 1)).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    )
    counted, predicted = counter.total(), macs(model).macs
    assert abs(counted - predicted) <= 0.002 * counted, (counted, predicted)


def test_parts_add_up_and_the_base_is_the_base(model):
    base = macs(model)
    assert base.macs == base.base_macs and base.reduction == {}
    assert base.macs == sum(base.per_block) + base.embed + base.head
    reduce_(model, TNT(at=2, keep=0.5, similar=4))
    found = macs(model)
    assert found.base_macs == base.macs == macs(base_of(model)).macs
    assert found.macs == sum(found.per_block) + sum(found.reduction.values()) + found.embed + found.head
    assert found.per_block[:2] == base.per_block[:2] and found.per_block[2] < base.per_block[2]
    assert found.tokens[:2] == base.tokens[:2] and len(set(found.tokens[2:])) == 1


def test_the_mode_makes_no_difference():
    model = reduce_(make("plain"), TNT(at=2, keep=0.5))
    assert macs(model) == macs(model.train())


def test_counting_needs_no_weights_and_no_run():
    with torch.device("meta"):
        model = timm.create_model("vit_giant_patch14_dinov2")
    assert macs(reduce_(model, Random(at=10, keep=0.5))).macs < macs(model).base_macs


def test_it_prints_as_a_table():
    text = str(macs(reduce_(make("plain"), Random(at=2, keep=0.5))))
    assert text.count("\n") == 8 and "block  3:   32 patch tokens" in text

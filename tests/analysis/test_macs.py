"""The closed form against counting a real run. tests/test_published.py holds it against the paper's figures."""

from __future__ import annotations

import pytest
import timm
import torch
from fvcore.nn import FlopCountAnalysis

from conftest import make, photos_for
from tntprune import ATC, DTEM, MCTF, TNT, DiffRate, Random, macs, reduce_
from tntprune.backbones.attach import base_of
from tntprune.backbones.models import shape_of


@pytest.mark.parametrize(
    ("name", "base", "config", "pruned"),
    [
        ("deit_base_distilled_patch16_224", 17.68, TNT(at=3, keep=0.5, similar=25, recipe="paper"), 11.03),
        ("deit_small_distilled_patch16_224", 4.63, TNT(at=3, keep=0.5, similar=25, recipe="paper"), 2.87),
        ("deit_tiny_distilled_patch16_224", 1.27, Random(at=3, keep=0.5), 0.77),
        ("vit16", 9.17, TNT(at=2, tokens=100, similar=30, recipe="paper"), 5.33),
    ],
)
def test_the_papers_models(name, base, config, pruned):
    """As printed; test_published.py has every row."""
    model = shape_of(name)
    assert round(macs(model).macs / 1e9, 2) == base
    assert round(macs(reduce_(model, config)).macs / 1e9, 2) == pruned


CONFIGS = [
    None,
    Random(at=2, keep=0.5),
    TNT(at=2, keep=0.5, similar=4, recipe="paper"),
    TNT(at=(1, 3), keep=(0.8, 0.5), similar=7, recipe="paper", scorer="mlp"),
    TNT(at=3, keep=0.25, similar=4),
    MCTF(r=5),
    ATC(at=(1, 3), keep=0.8, linkage="average"),
    TNT(at=(1, 3), keep=(0.8, 0.5)),
    DTEM(at=(1, 3), keep=0.4),
    DiffRate(at=(1, 3), keep=0.7),
    TNT(at=(1, 3), keep=0.8, inside=True, metric="mean"),
]
WITHOUT_CLS = ("no_cls", "map_pool", "rope_mixed", "test_vit2")
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
    "eva02",
    "dinov3",
    "rope_mixed",
    "beit",
    "test_vit",
    "test_vit2",
]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param(kind, config, marks=[] if kind == "plain" or config is CONFIGS[-1] else pytest.mark.wide)
        for kind in COUNTED
        for config in CONFIGS
        if not (isinstance(config, DiffRate) and kind in WITHOUT_CLS)
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "method", "none"),
)
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

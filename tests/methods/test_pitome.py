"""PiToMe against loops over images and tokens, written from the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch.utils.flop_counter import FlopCounterMode

from conftest import SMALL, make, photos_for
from merging_reference import Token, merged_to, naive
from reference import check_whole
from tntprune import PiToMe, UserError, macs, reduce_
from tntprune.methods.pitome import energy, match_by_energy
from tntprune.ops import tokens as ops
from tntprune.ops.tokens import start

WHOLE = {
    "all": (PiToMe(r=7), dict.fromkeys(range(1, 7), 7)),
    "clamped": (PiToMe(at=(2, 3), r=(5, 40)), {2: 5, 3: 40}),
    "concat, after, mlerp": (
        PiToMe(at=(1, 4), r=9, metric="concat", inside=False, average="mlerp", proportional=False), {1: 9, 4: 9},
    ),
    "several passes": (PiToMe(at=(2, 4), keep=0.4, metric="x"), {}),
}  # fmt: skip
MARGINS = {block: 0.9 - 0.9 * block / 6 for block in range(1, 7)}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", ["plain", "distilled", "avg_with_cls"])
def test_whole_models_equal_the_loops(kind, name):
    config, r = WHOLE[name]
    model = make(kind)
    images = photos_for(model, 2)
    with torch.inference_mode():
        expected = [naive(model, image, config, r, margins=MARGINS) for image in images]
    check_whole(reduce_(model, config), images, expected)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(3, 20), seed=st.integers(0, 999), margin=st.floats(0, 0.9), data=st.data())
def test_one_pass_equals_the_loops(n, seed, margin, data):
    gone = data.draw(st.integers(1, n // 2))
    x = torch.randn(2, n, 4, generator=torch.Generator().manual_seed(seed))
    found = ops.merge(start(x, 0, follow=True), *match_by_energy(x, gone, margin))
    for b in range(2):
        image = merged_to([Token(x[b, i], x[b, i], i, [i]) for i in range(n)], n - gone, 0, margin=margin)
        torch.testing.assert_close(found.x[b], torch.stack([t.x for t in image]), atol=1e-5, rtol=1e-5)
        assert found.index[b].tolist() == [t.place for t in image]
        assert found.size[b].tolist() == [len(t.patches) for t in image]


def test_tokens_of_a_cluster_are_merged_and_rare_ones_are_protected():
    generator = torch.Generator().manual_seed(0)
    rare = torch.eye(8)[:5]
    cluster = torch.ones(1, 8) + 0.05 * torch.randn(11, 8, generator=generator)
    x = torch.cat([rare[:2], cluster[:6], rare[2:], cluster[6:]])[None]
    stay, into, source, _ = match_by_energy(x, 5, 0.6)
    assert stay[0].tolist()[:5] == [0, 1, 8, 9, 10] and len(stay[0]) == 6  # and one of the cluster
    assert set(into[0].tolist() + source[0].tolist()) < {*range(2, 8), *range(11, 16)}


def test_energy_falls_below_nothing_under_the_margin():
    x = F.normalize(torch.tensor([[[1.0, 0], [1, 0], [0, 1]]]), dim=-1)
    far = torch.tensor(-0.5).exp() - 1
    torch.testing.assert_close(energy(x, 0.5), torch.stack([2 + far, 2 + far, 1 + 2 * far])[None] / 3)
    assert energy(x, 0.0)[0].tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3])  # from the margin on: 0 counts as 0


def test_large_grids_are_compared_in_blocks_of_rows(monkeypatch):
    x = F.normalize(torch.randn(2, 37, 6, generator=torch.Generator().manual_seed(0)), dim=-1)
    whole = energy(x, 0.4)
    monkeypatch.setattr(ops, "TABLE", 60)
    assert len(ops.row_blocks(37, 37)) > 30
    torch.testing.assert_close(energy(x, 0.4), whole)


def test_costs_are_those_of_the_energy_of_the_matches_and_of_one_sum_for_each_token():
    model = make("plain")  # 64 patches, 4 heads of 8, width 32
    for metric, width in (("mean", 8), ("concat", 32), ("x", 32)):
        found = macs(reduce_(model, PiToMe(at=3, r=9, metric=metric)))
        assert found.reduction == {3: (64 * 64 + 9 * 9) * width + 9 * 32}
    assert macs(reduce_(model, PiToMe(at=3, tokens=10))).reduction == {
        3: (64**2 + 32**2 + 32**2 + 16**2 + 16**2 + 6**2) * 8 + 54 * 32  # to 32, 16 and then 10
    }


def test_the_comparisons_counted_are_those_that_are_made():
    x = torch.randn(1, 64, 8)
    with FlopCounterMode(display=False) as counter:
        match_by_energy(x, 9, 0.5)
    assert counter.get_total_flops() == 2 * (64 * 64 + 9 * 9) * 8


def test_equal_tokens_merge_without_a_trace():
    model = make("distilled")
    images = torch.rand(2, 3, 1, 1).expand(2, 3, 32, 32)
    with torch.inference_mode():
        model.pos_embed.zero_()
        expected = model(images)
        torch.testing.assert_close(reduce_(model, PiToMe(r=9))(images), expected, atol=1e-5, rtol=1e-5)


def test_blocks_that_do_not_open_say_what_would_do():
    model = VisionTransformer(**SMALL, block_fn=ParallelScalingBlock).eval()
    with pytest.raises(UserError, match=r"pitome cannot be applied here: .*metric='x'.* would do"):
        reduce_(model, PiToMe(r=4))
    reduce_(model, replace(PiToMe(at=2, r=4), inside=False, metric="x", proportional=False))
    assert macs(model).tokens == [64, 64, 60, 60, 60, 60]

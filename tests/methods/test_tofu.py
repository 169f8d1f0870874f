"""ToFu against loops over images and tokens, written from the paper."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch.utils.flop_counter import FlopCounterMode

from conftest import SMALL, make, photos_for
from merging_reference import naive
from reference import check_equal_tokens, check_whole
from tntprune import ToFu, ToMe, UsageError, UserError, macs, reduce_
from tntprune.backbones.attach import reduction_of
from tntprune.ops.tokens import start

EVERY = dict.fromkeys(range(1, 7), 7)
WHOLE = {  # with the first block that merges
    "second half": (ToFu(r=7), EVERY, 4),
    "from block 2": (ToFu(at=(1, 2, 3), r=(5, 6, 7), merge_from=2, proportional=False), {1: 5, 2: 6, 3: 7}, 2),
    "mean, after": (ToFu(r=7, average="mean", inside=False, metric="concat"), EVERY, 4),
    "several passes": (ToFu(at=(2, 4), keep=0.3), {}, 4),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", ["plain", "distilled", "avg_with_cls"])
def test_whole_models_equal_the_loops(kind, name):
    config, r, first = WHOLE[name]
    model = make(kind)
    images = photos_for(model, 2)
    averages = {block: config.average if block >= first else "none" for block in range(1, 7)}
    r = {block: one for block, one in r.items() if config.inside or block < 6}
    with torch.inference_mode():
        expected = [naive(model, image, config, r, averages) for image in images]
    check_whole(reduce_(model, config), images, expected)


@torch.inference_mode()
def test_merging_everywhere_is_tome_with_mlerp_and_pruning_everywhere_keeps_tokens_as_they_are():
    model = make("plain")
    images = photos_for(model)
    merging = reduce_(model, ToFu(r=9, merge_from=1))(images)
    assert torch.equal(merging, reduce_(model, ToMe(r=9, average="mlerp"))(images))
    reduce_(model, ToFu(r=9, merge_from=7))
    seen = []
    reduction_of(model).register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    pruning = model(images)
    assert not torch.equal(pruning, merging) and len(seen) == 6
    for before, after in seen:
        for b in range(len(images)):
            old = dict(zip(before.index[b].tolist(), before.patches[b]))
            assert all(torch.equal(x, old[place]) for place, x in zip(after.index[b].tolist(), after.patches[b]))
        assert after.size.sum(1).tolist() == [64] * 3


def test_pruning_costs_no_sum():
    found = macs(reduce_(make("plain"), ToFu(at=(3, 4), r=9)))
    assert found.reduction == {3: 32 * 32 * 8, 4: 27 * 28 * 8 + 9 * 32}
    method = reduction_of(reduce_(make("plain"), ToFu(at=(3, 4), r=9, metric="x")))
    for step, sums in zip(method.steps(64), (0, 28 * 9 * 32)):  # as a one-hot product; 9 x 32 of it are not 0
        with FlopCounterMode(display=False) as counter:
            method(start(torch.randn(1, 1 + step.entering, 32), 1), step)
        compared = (step.entering // 2) * (step.entering - step.entering // 2) * 32
        assert counter.get_total_flops() == 2 * (compared + sums)


@pytest.mark.parametrize("merge_from", [1, None, 7])
def test_equal_tokens_go_without_a_trace(merge_from):
    """A token that stays counts for those that went: an image of equal patches comes out as if none did."""
    check_equal_tokens(make("avg_with_cls"), ToFu(r=9, merge_from=merge_from))


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "all"])
def test_a_bad_block_says_what_is_expected(value):
    with pytest.raises(UsageError, match=f"merge_from={value}: expected a whole number, 1 or larger"):
        ToFu(merge_from=value)


def test_blocks_that_do_not_open_say_what_would_do():
    model = VisionTransformer(**SMALL, block_fn=ParallelScalingBlock).eval()
    with pytest.raises(UserError, match=r"tofu cannot be applied here: .*inside=False.* would do"):
        reduce_(model, ToFu(r=4))
    reduce_(model, ToFu(at=2, r=4, inside=False, metric="x", proportional=False))
    assert macs(model).tokens == [64, 64, 60, 60, 60, 60]

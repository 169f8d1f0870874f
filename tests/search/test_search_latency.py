"""Nothing is timed here: a clock that counts work stands in for the machine's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from conftest import SMALL, make, photos_for
from tntprune import (
    ATC,
    ATS,
    TNT,
    EViT,
    EvoViT,
    PiToMe,
    Random,
    ToFu,
    ToMe,
    UsageError,
    UserError,
    ZeroTPrune,
    reduce_,
)  # fmt: skip
from tntprune.backbones.attach import base_of
from tntprune.methods import Combination, Config
from tntprune.methods.steps import Place, Step
from tntprune.search import timing
from tntprune.search.latency import LatencyCurve, Line, about, timed_options, work
from tntprune.search.timing import explained, measure_latency, time_schedules
from tntprune.system import clock

DROPS = TNT(recipe="relative")


def curve(config: Config = DROPS, **changes: Any) -> LatencyCurve:
    """A made-up curve of a model with 4 blocks and 10 patch tokens; 5 of its 45 seconds are around the blocks."""
    blocks = {
        "whole": Line((1, 5, 10), (1.0, 5.0, 10.0)),
        "whole biased": Line((1, 10), (2.0, 20.0)),
        "attention": Line((1, 10), (0.1, 1.0)),
        "attention biased": Line((1, 10), (0.2, 2.0)),
        "mlp": Line((1, 10), (0.5, 5.0)),
    }
    tome = config.method == "tome"
    steps = (0.0, 0.25, 10.0 if tome else 0.0, 0.0, 0.0, 0.0, 0.0)  # for each, and for all tokens that enter
    made = LatencyCurve({}, timed_options(config), "2026-01-01", 10, 4, 45.0, blocks, "heads" * tome, tome, steps)
    return replace(made, **changes)


def test_between_two_counts_lies_a_straight_line_and_beyond_the_ends_nothing_changes():
    line = Line((2, 4, 8), (1.0, 5.0, 3.0))
    assert [line.at(n) for n in (1, 2, 3, 4, 6, 8, 9)] == [1.0, 1.0, 3.0, 5.0, 4.0, 3.0, 3.0]


def test_a_prediction_is_the_sum_of_its_parts():
    blocks = 10 + 10 + 5 + 3  # with 10 patch tokens, 10, then 5, then 3
    walk = (0.5, *curve().steps[1:])
    assert curve(steps=walk).predict(DROPS.changed(at=(2, 3), tokens=(5, 3))) == pytest.approx(
        blocks + 5 + 0.25 + 0.25 + 0.5
    )
    assert curve().predict(DROPS.changed(keep=1.0)) == pytest.approx(45.0)  # nothing goes


def test_inside_a_block_its_halves_see_other_numbers_and_sizes_count_from_the_next_block_on():
    found = curve(ToMe()).predict(ToMe(at=(2, 4), tokens=(6, 4)))
    blocks = 10 + (1.0 + 3.0) + 12 + (1.2 + 2.0)  # 6 patch tokens from inside block 2 on, 4 in the last MLP
    assert found == pytest.approx(blocks + 5 + (0.25 + 10) + (0.25 + 6))
    lines = {name: line for name, line in curve().blocks.items() if name != "whole biased"}
    halves = curve(ToMe(), blocks=lines).predict(ToMe(at=(2, 4), tokens=(6, 4)))  # of blocks that take no sizes whole
    assert halves == pytest.approx(found - 12 + (1.2 + 3.0))


def test_a_larger_number_may_be_faster_and_is_told():
    blocks = {**curve().blocks, "whole": Line((1, 4, 7, 8, 10), (1.0, 5.0, 5.1, 3.0, 4.0))}
    made = curve(blocks=blocks)
    assert made.slower() == {4: 8, 7: 8}
    assert made.predict(DROPS.changed(at=1, tokens=7)) > made.predict(DROPS.changed(at=1, tokens=8))
    assert curve().slower() == {}


def test_what_was_not_measured_is_refused_in_one_line():
    for config, words in (
        (Random(), "for tnt with method=tnt, not random"),
        (DROPS.changed(scorer="mlp"), "with scorer=linear, not mlp"),
        (DROPS.changed(at=1, tokens=11), "only 10 patch tokens arrive"),
    ):
        with pytest.raises(UsageError, match=words):
            curve().predict(config)


def test_a_curve_comes_back_from_its_file_as_it_was(tmp_path):
    for made in (curve(), curve(ToMe())):
        made.save(tmp_path / "curve.json")
        assert LatencyCurve.load(tmp_path / "curve.json") == made
    for text, words in (
        ("{", "no JSON"), ("[]", "version None"), ('{"version": 99}', "version 99"), ('{"version": 2}', "broken"),
        ('{"version": 1}', "version 1"),
    ):  # fmt: skip
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(UserError, match=words):
            LatencyCurve.load(tmp_path / "other.json")
    with pytest.raises(UserError, match="cannot be read"):
        LatencyCurve.load(tmp_path / "none.json")


def test_a_curve_of_something_else_is_refused():
    model = make("plain")
    made = curve(about=about(model, 2, "fp32"))
    made.check(model, DROPS.changed(at=3), batch_size=2)
    made.check(reduce_(make("plain"), ToMe(r=3)), DROPS.changed(at=3), batch_size=2)  # what is on it does not matter
    for args, words in (
        ((make("registers"), DROPS, 2, "fp32"), "shape"),
        ((model, DROPS, 1, "fp32"), "for batch size 2, and 1 is asked for"),
        ((model, DROPS, 2, "bf16"), "dtype fp32, and bf16"),
        ((model, Random(), 2, "fp32"), "not random"),
    ):
        with pytest.raises(UserError, match=words):
            made.check(args[0], args[1], batch_size=args[2], dtype=args[3])
    merging = curve(ToMe())
    older = replace(merging, method={name: one for name, one in merging.method.items() if name != "average"})
    older.predict(ToMe(at=2, r=3))  # from before there was this option
    with pytest.raises(UsageError, match="tome with average=mean, not mlerp"):
        older.predict(ToMe(at=2, r=3, average="mlerp"))
    with pytest.raises(UserError, match="threads 64"):
        replace(made, about={**made.about, "threads": 64}).check(model, DROPS, batch_size=2)


def test_whole_models_tell_what_steps_cost_and_nothing_costs_less_than_nothing():
    steps = [[Step(Place(1), n, m, m)] for n in (100, 60, 20) for m in (n // 2, n // 4)]
    steps += [[Step(Place(0), 100, 100, 80), Step(Place(1), 80, m, m)] for m in (60, 30)] + [
        [Step(Place(2), 60, 50, 40)]
    ]
    units = [work(some, 100) for some in ([], *steps)]
    truth = torch.tensor([0.01, 0.02, 0.0, 0.3, 0.05, 0.0, 0.2])
    rest = [float((torch.tensor(some) * truth).sum()) for some in units]
    assert explained(units, rest, [1.0] * len(units)) == pytest.approx(truth.tolist(), abs=1e-5)
    assert explained(units, [-0.01 * number for number in range(len(units))], [1.0] * len(units)) == (0.0,) * 7
    one, two = explained([(1.0, 0.0), (1.0, 1.0), (1.0, 1.0)], [0.01, 0.5, 0.7], [0.1, 1.0, 1.0])
    assert (one, two) == pytest.approx((0.01, 0.59))


class Work:
    """A clock that counts tokens, more in a step of 8 and in the MLP of an odd number of tokens."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def watch(self, model: Any) -> None:
        """Let the modules of a model, and of its copies, advance the clock."""

        def advance(each: float, odd: float = 0.0) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                tokens = args[0].shape[1]
                self.now += each * tokens + odd * (tokens % 2)

            return hook

        for block in model.blocks:
            block.attn.qkv.register_forward_hook(advance(1.0))
            block.mlp.fc1.register_forward_hook(advance(2.0, odd=20.0))
        model.head.register_forward_hook(advance(10.0))


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """The benchmark's clock counts work, also that of steps: one for each token that enters."""
    counter, plain = Work(), torch.nn.Module.__call__

    def call(self: Any, *args: Any, **more: Any) -> Any:
        if len(args) > 1 and isinstance(args[1], Step):
            counter.now += args[0].count
        return plain(self, *args, **more)

    def turns(calls: Any, rounds: int, device: Any, **options: Any) -> Any:
        return clock.in_turns(calls, 2, device, warmup=0, progress=False)  # this clock shows the same in every round

    monkeypatch.setattr(timing, "in_turns", turns)
    monkeypatch.setattr(clock.time, "perf_counter", counter.perf_counter)
    monkeypatch.setattr(torch.nn.Module, "__call__", call)
    yield counter
    monkeypatch.undo()


@pytest.fixture
def small() -> VisionTransformer:
    """Four blocks, and 36 patch tokens."""
    torch.manual_seed(0)
    return VisionTransformer(**{**SMALL, "img_size": 24, "depth": 4}).eval()


CASES: list[tuple[Config, Config]] = [
    (TNT(at=2), TNT(at=(1, 2, 3), tokens=(30, 21, 10))),
    (DROPS, DROPS.changed(at=(1, 3), tokens=(25, 14), similar=5)),
    (Random(at=2), Random(at=(0, 3), tokens=(31, 7))),
    (ToMe(r=3), ToMe(tokens=(33, 30, 21, 12))),
    (PiToMe(r=3), PiToMe(tokens=(33, 30, 21, 12))),
    (ToFu(r=3), ToFu(tokens=(33, 30, 21, 12))),
    (ToMe(at=2, r=3, inside=False, metric="x"), ToMe(at=(1, 3), tokens=(25, 20), inside=False, metric="x")),
    (EViT(at=2), EViT(at=(1, 3), tokens=(25, 12), inside=True)),
    (ZeroTPrune(at=2, iterations=1), ZeroTPrune(at=(2, 3), tokens=(25, 12), iterations=1)),
]  # fmt: skip


@pytest.mark.parametrize("measured, wanted", CASES, ids=lambda config: config.method)
def test_the_prediction_is_what_the_clock_shows(
    clocked: Work, small: VisionTransformer, measured: Config, wanted: Config
):
    clocked.watch(small)
    with_all_counts = 1e9  # a clock of work counts in thousands of seconds
    found = measure_latency(small, measured, batch_size=2, seconds=with_all_counts, progress=False)
    assert len(found.blocks["whole"].counts) == 36
    images = photos_for(small, 2)
    for config in (None, wanted):
        run = base_of(small) if config is None else reduce_(base_of(small), config)
        before = clocked.now
        with torch.inference_mode():
            run(images)
        told = found.unpruned if config is None else found.predict(config)
        assert told == pytest.approx(clocked.now - before, rel=1e-3)
    assert found.slower()  # an odd number of tokens is slower than the next even one
    (share,) = time_schedules(small, [wanted], 2, "fp32", 1.0, progress=False)
    assert share * found.unpruned == pytest.approx(found.predict(wanted), rel=1e-3)


def test_with_less_time_fewer_counts_are_measured_and_both_sides_of_every_tile(clocked: Work):
    model = make("plain")
    clocked.watch(model)
    found = measure_latency(model, Random(at=2), seconds=1e4, progress=False)
    counts = found.blocks["whole"].counts
    assert 9 <= len(counts) < 64 and {1, 15, 16, 31, 32, 47, 48, 63, 64} <= set(counts)


def test_what_cannot_be_told_from_counts_is_refused():
    model = make("plain")
    pair = Combination(parts=(Random(at=1), ToMe(at=3, r=2)))
    for config, words in (
        (ATS(at=2), "differs from image to image"),
        (EvoViT(at=2), "brings tokens back"),
        (ATC(at=2), "each token that goes takes a step of its own"),
        (pair, "several methods"),
    ):
        with pytest.raises(UserError, match=words):
            measure_latency(model, config, progress=False)
    for wrong in ({"batch_size": 0}, {"dtype": "fp8"}, {"seconds": 0}):
        with pytest.raises(UsageError):
            measure_latency(model, Random(), progress=False, **wrong)

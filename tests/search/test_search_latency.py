"""Nothing is timed here: a clock that counts work stands in for the machine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import make, photos_for
from tntprune import ATS, TNT, EViT, EvoViT, Random, ToMe, TopK, UsageError, UserError, ZeroTPrune, reduce_
from tntprune.backbones.attach import base_of
from tntprune.methods import Combination, Config
from tntprune.methods.base import Method
from tntprune.methods.steps import Place, Step
from tntprune.search import LatencyCurve, latency, measure_latency
from tntprune.search.costs import Line, Part, StepCost, kind, timed_options
from tntprune.search.steps import fit, settle
from tntprune.system import clock


def curve(**changes: Any) -> LatencyCurve:
    """A made-up curve of a model with 4 blocks and 10 patch tokens whose parts add up to half of its time."""
    blocks = {
        "whole": Line((1, 5, 10), (1.0, 5.0, 10.0)),
        "attention": Line((1, 10), (0.1, 1.0)),
        "attention biased": Line((1, 10), (0.2, 2.0)),
        "mlp": Line((1, 10), (0.5, 5.0)),
    }
    parts = (
        Part("tnt", timed_options(TNT(recipe="relative")), "", False, dict.fromkeys(range(4), 0)),
        Part("tome", timed_options(ToMe()), "heads", True, dict.fromkeys(range(1, 5), 1)),
    )
    flat = (0.0,) * 10
    steps = {
        "tnt 0 ranked": StepCost((0.25, *flat), 0.0, sized=False),
        "tome 1 ranked": StepCost((0.0, 100.0, *flat[1:]), 0.0, sized=True),  # 1 for each token that enters
    }
    made = LatencyCurve({}, "2026-01-01", 10, 4, 90.0, Line((0, 10), (0.0, 5.0)), blocks, parts, steps)
    return replace(made, **changes)


def test_between_two_counts_lies_a_straight_line_and_beyond_the_ends_nothing_changes():
    line = Line((2, 4, 8), (1.0, 5.0, 3.0))
    assert [line.at(n) for n in (1, 2, 3, 4, 6, 8, 9)] == [1.0, 1.0, 3.0, 5.0, 4.0, 3.0, 3.0]


def test_a_prediction_is_the_sum_of_its_parts_scaled_to_the_unpruned_model():
    made = curve(walk=0.5, step_factor=2.0)
    blocks = 10 + 10 + 5 + 3  # with 10 patch tokens, 10, then 5, then 3
    around, steps = 1.5, 0.25 + 0.25
    assert made.predict(TNT(recipe="relative", at=(2, 3), tokens=(5, 3))) == pytest.approx(
        2 * (blocks + around + 2 * steps) + 0.5
    )
    assert curve().predict(TNT(recipe="relative", keep=1.0)) == pytest.approx(90.0)  # nothing goes


def test_inside_a_block_its_halves_see_other_numbers_and_sizes_count_from_the_next_block_on():
    blocks = 10 + (1.0 + 3.0) + (1.2 + 3.0) + (1.2 + 2.0)  # 6 patch tokens from inside block 2 on, 4 in the last MLP
    steps, around = 10 + 6, 2.0
    found = curve().predict(ToMe(at=(2, 4), tokens=(6, 4)))
    assert found == pytest.approx(2 * (blocks + around + steps))


def test_several_reductions_of_one_model_add_up():
    both = Combination(parts=(TNT(recipe="relative", at=1, tokens=6), ToMe(at=3, tokens=4)))
    blocks = 10 + 6 + (0.6 + 2.0) + (0.8 + 2.0)
    assert curve().predict(both) == pytest.approx(2 * (blocks + 2.0 + 0.25 + 6))


def test_a_larger_number_may_be_faster_and_is_told():
    blocks = {**curve().blocks, "whole": Line((1, 4, 7, 8, 10), (1.0, 5.0, 5.1, 3.0, 4.0))}
    made = curve(blocks=blocks)
    assert made.slower() == {4: 8, 7: 8}
    assert made.predict(TNT(recipe="relative", at=1, tokens=7)) > made.predict(TNT(recipe="relative", at=1, tokens=8))
    assert curve().slower() == {}


def test_what_was_not_measured_is_refused_in_one_line():
    for config, words in (
        (Random(), "for tnt and tome, not random"),
        (TNT(recipe="relative", scorer="mlp"), "with scorer=linear, not mlp"),
        (TNT(recipe="relative", at=1, tokens=4, similar=2), "no both step of tnt"),
        (TNT(recipe="relative", at=1, tokens=11), "only 10 patch tokens arrive"),
    ):
        with pytest.raises(UsageError, match=words):
            curve().predict(config)


def test_a_curve_comes_back_from_its_file_as_it_was(tmp_path):
    made = curve(walk=0.125)
    made.save(tmp_path / "curve.json")
    assert LatencyCurve.load(tmp_path / "curve.json") == made
    for text, words in (
        ("{", "no JSON"), ("[]", "version None"), ('{"version": 99}', "version 99"), ('{"version": 1}', "broken"),
    ):  # fmt: skip
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(UserError, match=words):
            LatencyCurve.load(tmp_path / "other.json")
    with pytest.raises(UserError, match="cannot be read"):
        LatencyCurve.load(tmp_path / "none.json")


def test_a_curve_of_something_else_is_refused():
    model = make("plain")
    made = curve(about=latency.about(model, 2, "fp32"))
    made.check(model, TNT(recipe="relative", at=3), batch_size=2)
    made.check(
        reduce_(make("plain"), ToMe(r=3)), TNT(recipe="relative", at=3), batch_size=2
    )  # what is on it does not matter
    for args, words in (
        ((make("registers"), TNT(recipe="relative"), 2, "fp32"), "shape"),
        ((model, TNT(recipe="relative"), 1, "fp32"), "for batch size 2, and 1 is asked for"),
        ((model, TNT(recipe="relative"), 2, "bf16"), "dtype fp32, and bf16"),
        ((model, Random(), 2, "fp32"), "not random"),
    ):
        with pytest.raises(UserError, match=words):
            made.check(args[0], args[1], batch_size=args[2], dtype=args[3])
    with pytest.raises(UserError, match="threads 64"):
        replace(made, about={**made.about, "threads": 64}).check(model, TNT(recipe="relative"), batch_size=2)


def test_the_polynomial_finds_work_for_tokens_and_for_pairs():
    steps = [Step(Place(1), e, n, n) for e in (200, 150, 100, 50) for n in (e - 5, e // 2, e // 4)]
    cost = fit(steps, [1e-4 + 1e-7 * s.entering + 2e-9 * s.entering * s.leaving for s in steps], sized=False)
    for step in (Step(Place(3), 120, 80, 80), Step(Place(3), 190, 100, 100)):
        true = 1e-4 + 1e-7 * step.entering + 2e-9 * step.entering * step.leaving
        assert cost.at(step) == pytest.approx(true, rel=0.05)


def test_whole_models_tell_how_long_steps_take_in_them_and_what_is_always_there():
    rest, steps = (1.0, 0.8, 0.6, 0.4), (0.0, 0.3, 0.1, 0.2)
    exact = [a + 1.5 * b + 0.01 for a, b in zip(rest, steps, strict=True)]
    assert settle(rest, steps, exact) == pytest.approx((1.5, 0.01), abs=0.02)
    assert settle(rest, steps, [a + b for a, b in zip(rest, steps, strict=True)]) == pytest.approx((1.0, 0.0))
    little = (0.0, 0.01, 0.005, 0.008)  # steps that take next to no time tell next to nothing, and break nothing
    factor, walk = settle(rest, little, [0.98, 0.82, 0.59, 0.41])
    assert 0.5 < factor < 1.5 and 0 <= walk < 0.02
    assert settle(rest, steps, [0.9 * a for a in rest]) == (0.5, 0.0)


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
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """The benchmark's clock counts work, also that of steps: one for each token that enters."""
    counter, plain = Work(), Method.forward

    def forward(self: Method, tokens: Any, place: Place, plan: Any, heads: Any = None) -> Any:
        counter.now += tokens.count * (place in plan)
        return plain(self, tokens, place, plan, heads)

    def turns(calls: Any, rounds: int, device: Any, **options: Any) -> Any:
        return clock.in_turns(calls, 2, device, warmup=0, progress=False)  # this clock shows the same in every round

    monkeypatch.setattr(latency, "in_turns", turns)
    monkeypatch.setattr(clock.time, "perf_counter", counter.perf_counter)
    monkeypatch.setattr(Method, "forward", forward)
    yield counter
    monkeypatch.undo()


CASES: list[tuple[Config, Config]] = [
    (TNT(at=2), TNT(at=(1, 3, 4), tokens=(50, 33, 20))),
    (Random(at=2), Random(at=(0, 5), tokens=(31, 7))),
    (ToMe(r=3), ToMe(tokens=(60, 55, 51, 46, 33, 30))),
    (ToMe(at=2, r=3), ToMe(at=(3, 5), tokens=(41, 30))),
    (TopK(at=2), TopK(at=(2, 4), tokens=(45, 20))),
    (EViT(at=2), EViT(at=(2, 4), tokens=(44, 20), inside=True)),
    (ZeroTPrune(at=2, iterations=1), ZeroTPrune(at=(3, 4), tokens=(45, 20), iterations=1)),
]  # fmt: skip


@pytest.mark.parametrize("measured, wanted", CASES, ids=lambda config: config.method)
def test_the_prediction_is_what_the_clock_shows(work: Work, measured: Config, wanted: Config):
    model = make("plain")
    work.watch(model)
    with_all_counts = 1e9  # a clock of work counts in thousands of seconds
    found = measure_latency(model, measured, batch_size=2, seconds=with_all_counts, progress=False)
    assert len(found.blocks["whole"].counts) == 64 and kind(Step(Place(1), 9, 9, 5)) == "similar"
    images = photos_for(model, 2)
    for config in (None, wanted):
        run = base_of(model) if config is None else reduce_(base_of(model), config)
        before = work.now
        with torch.inference_mode():
            run(images)
        told = found.unpruned if config is None else found.predict(config)
        assert told == pytest.approx(work.now - before, rel=1e-3)
    assert found.slower()  # an odd number of tokens is slower than the next even one
    assert LatencyCurve.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_with_less_time_fewer_counts_are_measured_and_both_sides_of_every_tile(work: Work):
    model = make("plain")
    work.watch(model)
    found = measure_latency(model, Random(), seconds=1e4, progress=False)
    counts = found.blocks["whole"].counts
    assert 9 <= len(counts) < 64 and {1, 15, 16, 31, 32, 47, 48, 63, 64} <= set(counts)


def test_what_cannot_be_told_from_counts_is_refused():
    model = make("plain")
    for config, words in ((ATS(at=2), "differs from image to image"), (EvoViT(at=2), "brings tokens back")):
        with pytest.raises(UserError, match=words):
            measure_latency(model, config, progress=False)
    for wrong in ({"batch_size": 0}, {"dtype": "fp8"}, {"seconds": 0}):
        with pytest.raises(UsageError):
            measure_latency(model, Random(), progress=False, **wrong)

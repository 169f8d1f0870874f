from __future__ import annotations

import random
import signal
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from conftest import SMALL, make, photos_for
from tntprune import (
    ATC,
    ATS,
    MCTF,
    TNT,
    AViT,
    DynamicViT,
    EViT,
    EvoViT,
    PiToMe,
    Random,
    ToFu,
    ToMe,
    TopK,
    UsageError,
    UserError,
    ZeroTPrune,
    load_,
    macs,
    record,
    reduce_,
)
from tntprune.backbones.attach import is_reduced, reduction_of, twin_of
from tntprune.methods import Combination
from tntprune.report.search_plot import draw_front
from tntprune.search.budget import budget
from tntprune.search.budget_search import BudgetSearch
from tntprune.search.find_plan import find_plan
from tntprune.search.found import doubts
from tntprune.search.interval import least_photos, of_difference, of_mean, wilson
from tntprune.search.judge import BATCH, Answers, Judge
from tntprune.search.scout import Deadline, Scout, Tried
from tntprune.search.shapes import Shape, family, fit, moved, simple
from tntprune.search.space import Space
from tntprune.search.verified import Verified, front, rank_correlation
from tntprune.serialization.plan import write_plan

METHODS = [
    TNT(), TNT(recipe="relative", similar=9), Random(), TopK(), EViT(), EViT(fuse=False), DynamicViT(), ToMe(),
    ToMe(inside=False, r=3), PiToMe(), ToFu(), ZeroTPrune(), ZeroTPrune(beyond=False), AViT(), EvoViT(), MCTF(), ATC(),
]  # fmt: skip


def label(config) -> str:
    return config.method


class Bar:
    """A progress bar that shows nothing."""

    def set_postfix_str(self, text, refresh) -> None: ...

    def update(self) -> None: ...


def drawn(space: Space, rng: random.Random) -> tuple[int, ...]:
    """Patch tokens after each block of a space, at random."""
    return tuple(sorted((rng.randint(space.least, space.patches - 1) for _ in space.blocks), reverse=True))


@pytest.mark.parametrize("method", METHODS, ids=label)
def test_what_a_schedule_costs_is_what_the_reduced_model_costs(method):
    space, rng = Space(make("plain"), method), random.Random(1)
    assert space.base_macs == macs(make("plain")).macs
    for similar in space.similars:
        for _ in range(4):
            try:
                config = space.config(drawn(space, rng), similar)
                found = space.macs(config)
            except UsageError:
                continue
            assert found == macs(reduce_(make("plain"), config)).macs


def test_a_plan_with_a_short_last_block(tmp_path):
    model = make("plain")
    method = ToMe(r=5)
    space = Space(model, method, last_block="prefix")
    assert space.blocks == tuple(range(1, 6)) and not space.free  # nothing is left to go in the last one
    config = space.config((50, 40, 30, 20, 10))
    assert space.macs(config) == macs(space.put(config)).macs < Space(model, method).macs(config)
    assert space.base_macs == macs(model).macs
    few = {"macs": 0.6, "moves": 0, "photos": 16, "progress": False}
    found = find_plan(model, photos_for(model, 16), method=Random(), last_block="prefix", **few)
    assert found.plan.last_block == "prefix" and found.chosen.cost == macs(reduce_(make("plain"), found.plan)).macs
    write_plan(tmp_path / "plan.json", found.plan)
    assert reduction_of(reduce_(model, tmp_path / "plan.json")).last_block == "prefix"
    again = find_plan(model, photos_for(model, 16), **few)  # as the model's own reduction has it
    assert again.plan.last_block == "prefix"
    with pytest.raises(UsageError, match="with a budget of time, which is told from whole blocks; expected 'all'"):
        find_plan(model, photos_for(model, 16), speedup=1.5, progress=False)
    with pytest.raises(UserError, match="its head reads the patch tokens"):
        Space(make("no_cls"), Random(), last_block="prefix")


@pytest.mark.parametrize("method", [one for one in METHODS if one != ZeroTPrune()], ids=label)
def test_as_many_tokens_are_left_as_were_asked_for(method):
    space = Space(make("plain"), method)
    wanted = [50 - 7 * number for number in range(len(space.blocks))]
    model = space.put(space.config(wanted))
    steps = reduction_of(model).steps(64)
    assert {step.place.block: step.leaving for step in steps if step.place.block in space.blocks} == dict(
        zip(space.blocks, wanted)
    )
    with torch.inference_mode(), record(model):
        model(photos_for(model))


def test_where_similar_tokens_go_beyond_what_is_asked_for_no_more_is_asked_for_than_arrives():
    space = Space(make("plain"), ZeroTPrune())
    config = space.config([50, 43, 36, 29, 22])
    assert [step.leaving for step in reduction_of(space.put(config)).steps(64)] == [50, 36, 22]


def test_only_what_has_a_fixed_number_of_tokens_can_be_searched():
    pair = Combination(parts=(Random(at=1), ToMe(at=3, r=2)))
    for kind, method, words in (
        ("plain", ATS(), "ats leaves another number"),
        ("plain", pair, "combination cannot be searched"),
        ("no_cls", EViT(), "the model has none"),
    ):
        with pytest.raises(UserError, match=words):
            Space(make(kind), method)
    with pytest.raises(UsageError, match="at=9"):
        Space(make("plain"), Random(), blocks=(2, 9))
    assert Space(make("plain"), Random(), blocks=(4, 2)).blocks == (2, 4)


def test_blocks_are_those_that_something_was_learned_for():
    learned = reduction_of(reduce_(make("plain"), TNT(at=2, noise_blocks=(1, 2, 4)))).state_dict()
    assert Space(make("plain"), TNT(noise_blocks=(1, 2, 4)), learned).blocks == (1, 2, 4)
    everything = Space(make("plain"), TNT())
    assert everything.blocks == (0, 1, 2, 3, 4, 5)
    learned = reduction_of(everything.put(everything.everywhere())).state_dict()
    assert Space(make("plain"), TNT(), learned).blocks == (0, 1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def large() -> torch.nn.Module:
    """196 patches, as a ViT has at 224 pixels."""
    return VisionTransformer(**{**SMALL, "img_size": 56, "depth": 12}).eval()


@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
def test_shapes_use_a_budget_up_and_never_go_beyond_it(large, share):
    space = Space(large, ToMe())
    limit = share * space.base_macs
    shapes = [shape for shape in family(space) if sum(weight > 0 for weight in shape.weights) > 3]
    found = [fit(shape, space, space.macs, limit) for shape in shapes]
    met = [schedule for schedule in found if schedule is not None]
    assert len(met) > len(shapes) / 2
    for schedule in met:
        assert limit * 0.996 < schedule.cost <= limit, schedule
        assert all(a >= b for a, b in pairwise(schedule.left))
    for schedule in met[::5]:
        assert schedule.cost == macs(reduce_(twin_of(large), schedule.config)).macs


def test_a_budget_that_a_shape_cannot_meet_gives_none(large):
    space = Space(large, Random())
    last = Shape(tuple(float(block == 11) for block in space.blocks))
    assert fit(last, space, space.macs, 0.8 * space.base_macs) is None
    assert fit(last, space, space.macs, 0.95 * space.base_macs) is not None


def test_simple_schedules_are_one_block_the_papers_blocks_and_all_blocks(large):
    space = Space(large, Random())
    names = [f"block {block} alone" for block in (3, 4, 5, 6)]
    assert [shape.name for shape in simple(space)] == [
        *names, "the paper's [3, 4, 5]", "uniform rates", "uniform counts",
    ]  # fmt: skip
    alone = fit(simple(space)[0], space, space.macs, 0.7 * space.base_macs)
    assert alone.config.at == (3,) and 0.69 * space.base_macs < alone.cost <= 0.7 * space.base_macs
    assert [shape.name for shape in simple(Space(large, Random(), blocks=(1, 9)))] == [
        "block 1 alone", "block 9 alone", "uniform rates", "uniform counts",
    ]  # fmt: skip
    assert [shape.name for shape in simple(Space(large, Random(), blocks=(2,)))] == ["block 2 alone"]
    paper, rates, counts = (fit(shape, space, space.macs, 0.7 * space.base_macs) for shape in simple(space)[-3:])
    assert paper.config.at == (3, 4, 5)
    kept = [b / a for a, b in pairwise((196, *paper.config.tokens))]
    assert max(kept) - min(kept) < 0.02
    assert rates.config.at == counts.config.at == tuple(range(1, 12))
    gone = [a - b for a, b in pairwise((196, *counts.config.tokens))]
    assert max(gone) - min(gone) <= 1


def test_moves_change_little_and_keep_the_budget(large):
    space, rng = Space(large, TNT(recipe="relative")), random.Random(0)
    assert len(space.similars) > 1 and Space(large, TNT()).similars == (0,)
    limit = 0.6 * space.base_macs
    schedule = fit(Shape((1.0,) * len(space.blocks)), space, space.macs, limit)
    seen = set()
    for _ in range(30):
        other = fit(moved(schedule, space, rng), space, space.macs, limit)
        if other is not None:
            seen.add(other.config)
            assert 0.98 * limit < other.cost <= limit
            schedule = other
    assert len(seen) > 20


@pytest.mark.parametrize(
    "method", [ToMe(), Random(), EViT(), ZeroTPrune(), TNT(), AViT(), EvoViT(), MCTF(), ATC()], ids=label
)
def test_answers_are_those_of_the_whole_models(method):
    base = make("plain")
    images, labels = photos_for(base, 40), torch.arange(40) % 7
    judge = Judge(Space(base, method), images, labels)
    space = judge.space
    for left in ([60, 50, 40, 30, 20, 10], [64, 64, 64, 20, 20, 20], [5, 5, 5, 5, 5, 5]):
        config = space.config(left[: len(space.blocks)])
        found = judge.ask(config)
        with torch.inference_mode():
            want, got = base(images).log_softmax(1), space.put(config)(images).log_softmax(1)
        assert torch.allclose(found.distance, F.kl_div(got, want, reduction="none", log_target=True).sum(1), atol=1e-5)
        assert torch.equal(found.right, got.argmax(1) == labels)
        figures = found.figures()
        assert figures["agreement"] == pytest.approx(100 * (got.argmax(1) == want.argmax(1)).double().mean().item())
        drop = (want.argmax(1) == labels).double().mean() - (got.argmax(1) == labels).double().mean()
        assert figures["top1_drop"] == pytest.approx(100 * drop.item())
        half = judge.ask(config, upto=1)
        assert len(half) == BATCH and torch.equal(judge.ask(config, half).distance, found.distance)
        again = judge.ask(config, found)
        assert len(again) == 40 and again.figures() == figures  # the last batch, a partial one, is not counted twice


def test_a_schedule_that_loses_too_much_is_asked_no_further():
    base = make("plain")
    images = photos_for(base, 4 * BATCH)
    with torch.inference_mode():
        guesses = base(images).argmax(1)
    labels = torch.cat([guesses[: 3 * BATCH], guesses[3 * BATCH :] + 1]) % 7  # wrong on the last of four batches
    judge = Judge(Space(base, Random()), images, labels)
    assert judge.repairs() == judge.repairs(3 * BATCH) == BATCH
    config = judge.space.config([2] * 6)
    lost = judge.ask(config).lost.cumsum(0)
    assert lost[BATCH - 1] > 3
    for most in (0.0, float(lost[BATCH - 1]) - 3, float(lost[-1]), 4.0 * BATCH):
        asked = len(judge.ask(config, most=most))
        stops = [count for count in range(0, 4 * BATCH, BATCH) if count and lost[count - 1] - BATCH > most]
        assert asked == (stops[0] if stops else 4 * BATCH)
    same = Judge(Space(base, Random()), images, None)
    assert same.repairs() == 0 and len(same.ask(config, most=3.0)) == BATCH


def test_a_clearly_worse_schedule_is_asked_no_further():
    base = make("plain")
    judge = Judge(Space(base, Random()), photos_for(base, 4 * BATCH), None)
    good, bad = judge.space.config([63] * 6), judge.space.config([2] * 6)
    rival = judge.ask(good)
    assert len(judge.ask(bad, rival=rival)) < 4 * BATCH == len(judge.ask(good, rival=rival))


class Rigged:
    """A judge with a known best: what goes at a block costs its square, and most at the first blocks and the last."""

    batches = 4

    def __init__(self, space: Space, *more) -> None:
        self.space = space

    def __len__(self) -> int:
        return 4 * BATCH

    def loss(self, config) -> float:
        gone, before = dict.fromkeys(self.space.blocks, 0), self.space.patches
        for at, tokens in zip(config.at, config.tokens):
            gone[at], before = before - tokens, tokens
        return sum((9.0 if block in (1, 2, 11) else 1.0) * count**2 for block, count in gone.items())

    def repairs(self, start: int = 0) -> int:
        return 0

    def ask(self, config, before=None, upto=None, rival=None, most=None) -> Answers:
        count = BATCH * (4 if upto is None else min(4, upto))
        none = torch.zeros(count)
        return Answers(torch.full((count,), self.loss(config)), none, none == 0, none[:0] == 0)


def test_the_search_comes_near_a_known_optimum_and_beats_uniform(large):
    space = Space(large, Random(), blocks=range(1, 12))
    rigged, limit = Rigged(space), 0.7 * space.base_macs
    scout = Scout(space, rigged, rigged, space.macs, 0, Deadline(1000), Bar(), {})
    best = scout.improve(scout.rounds(scout.fitted(family(space), limit))[0], limit, 100)
    uniform = min(one.distance() for shape in simple(space) for one in ask_all(scout, shape, limit))
    rng = random.Random(5)
    other = float("inf")  # the best of many, drawn around what one would guess
    for _ in range(400):
        weights = tuple((1 / 9 if block in (1, 2, 11) else 1.0) * rng.uniform(0.6, 1.4) for block in space.blocks)
        schedule = fit(Shape(weights), space, space.macs, limit)
        other = min(other, rigged.loss(schedule.config))
    assert best.schedule.cost <= limit
    assert best.distance() < 0.75 * uniform and best.distance() < 1.03 * other


def ask_all(scout: Scout, shape: Shape, limit: float) -> list[Tried]:
    found = scout.fitted([shape], limit)
    for one in found:
        scout.ask(one)
    return found


def small_search(model, **more):
    given = {"method": ToMe(), "macs": 0.6, "moves": 4, "photos": 40, "progress": False, **more}
    return find_plan(model, photos_for(model, 40), **given)


@pytest.fixture(scope="module")
def found():
    """The result of a small search."""
    model = make("plain")
    before = model(photos_for(model))
    result = small_search(model)
    assert not is_reduced(model) and torch.equal(model(photos_for(model)), before)
    return result


def test_a_search_gives_a_plan_that_meets_its_budget(found, tmp_path):
    model = make("plain")
    limit = 0.6 * macs(model).macs
    assert found.chosen.macs <= limit and found.complete and found.photos == (20, 20)
    assert found.plan.predicted["macs"] == found.chosen.macs == macs(reduce_(make("plain"), found.plan.config)).macs
    assert all(found.chosen.lost <= point.lost for point in found.references)
    names = [point.name for point in found.references]
    assert names == [shape.name for shape in simple(Space(model, ToMe()))] and not found.notes
    assert all(a.cost < b.cost and a.distance > b.distance for a, b in pairwise(found.front))
    costs = [point.cost for point in (*found.front, *found.others)]
    assert min(costs) < 0.85 * limit and max(costs) > 1.05 * limit
    write_plan(tmp_path / "plan.json", found.plan)
    assert reduction_of(load_(make("plain"), tmp_path / "plan.json")).config == found.chosen.config
    for word in ("tome, 60 % of the MACs", "Chosen: tome keeps ", "uniform rates", "95 % interval", "was complete"):
        assert word in str(found)
    assert reduction_of(reduce_(make("plain"), found.plan)).config == found.chosen.config
    assert reduction_of(load_(make("plain"), found.plan, at=2, tokens=9)).config.at == (2,)
    with pytest.raises(UsageError, match="of a plan in memory"):
        load_(make("plain"), found.plan, revision="main")


def test_the_same_seed_gives_the_same_plan():
    few = {"blocks": (1, 2), "moves": 2, "macs": 0.8}
    one, again, other = (small_search(make("plain"), seed=seed, **few) for seed in (0, 0, 3))
    assert one.to_dict()["front"] == again.to_dict()["front"] and one.chosen == again.chosen
    assert one.plan.predicted != other.plan.predicted


def test_the_photos_that_verify_are_not_those_that_were_searched_on():
    model = make("plain")
    same = photos_for(model, 1).expand(20, -1, -1, -1)
    images = torch.cat([same, photos_for(model, 20, seed=5)])
    found = find_plan(model, images, method=Random(), macs=0.8, moves=0, photos=40, blocks=(2, 3), progress=False)
    assert found.chosen.searched["kl"] != found.chosen.held_out["kl"]


def test_a_method_that_learns_is_trained_first_or_brings_what_it_learned(monkeypatch):
    monkeypatch.setattr("tntprune.training.config.STEPS", 2)
    model = make("plain")
    found = small_search(model, method=TNT(), macs=0.7, moves=1, blocks=(1, 2, 3))
    assert found.plan.learned
    trained = reduce_(make("plain"), TNT(at=(1, 3), tokens=(40, 20), noise_blocks=(1, 3, 5)))
    own = {name: value.clone() for name, value in reduction_of(trained).state_dict().items()}
    found = small_search(trained, method=None, macs=0.7, moves=1)
    assert set(found.chosen.config.at) <= {1, 3, 5}
    assert all(torch.equal(found.plan.learned[name], own[name]) for name in found.plan.learned)
    assert reduction_of(trained).config.at == (1, 3)


def test_when_the_time_is_up_the_best_so_far_is_given():
    found = small_search(make("plain"), macs=0.4, minutes=1e-6)
    assert not found.complete and found.chosen.macs <= 0.4 * found.whole and "the time was up" in str(found)
    assert "These simple schedules cannot cost so little: block 3 alone, the paper's [3, 4, 5]." in found.notes
    assert len(found.references) == 4 and all(found.chosen.lost <= one.lost for one in found.references)


@pytest.mark.parametrize("budget", [{"macs": 0.4}, {"macs": None, "drop": 40.0}])
def test_ctrl_c_verifies_what_is_best_so_far(monkeypatch, budget):
    begun, before = Scout.told, signal.getsignal(signal.SIGINT)

    def told(self, best):
        if not self.deadline.stops:
            signal.raise_signal(signal.SIGINT)
        begun(self, best)

    monkeypatch.setattr(Scout, "told", told)
    found = small_search(make("plain"), **budget)
    assert not found.complete and "was interrupted" in str(found)
    assert found.chosen.lost <= 40.0 if "drop" in budget else found.chosen.macs <= 0.4 * found.whole
    assert signal.getsignal(signal.SIGINT) is before


def test_the_smallest_cost_for_a_loss():
    found = small_search(make("plain"), macs=None, drop=15.0)
    assert found.chosen.lost <= 15.0 and found.chosen.name == "chosen"
    assert all(point.cost >= found.chosen.cost for point in found.others if point.lost <= 15.0)


class Steps:
    """A curve on which time goes with the MACs, but for a number of tokens that is slow."""

    about = {"batch_size": 1, "dtype": "fp32"}

    def __init__(self, model, method, slow: int) -> None:
        self.space, self.slow = Space(model, method), slow
        self.unpruned = self.space.base_macs * 1e-9

    def predict(self, config) -> float:
        bad = sum(count in range(self.slow - 2, self.slow) for count in config.tokens)
        return (self.space.macs(config) + 0.02 * self.space.base_macs * bad) * 1e-9

    def slower(self) -> dict[int, int]:
        return dict.fromkeys(range(self.slow - 2, self.slow), self.slow)


def timed_as(monkeypatch, curve: Steps, times: float = 1.0) -> None:
    """Let schedules take so many times as long as a curve predicts."""

    def measured(model, configs, *more) -> list[float]:
        return [times * curve.predict(config) / curve.unpruned for config in configs]

    monkeypatch.setattr("tntprune.search.find_plan.time_schedules", measured)


@pytest.mark.parametrize("budget", [{"speedup": 1.5}, {"latency": "4.4ms"}], ids=str)
def test_budgets_of_time_go_by_the_curve_and_then_by_the_clock(budget, monkeypatch):
    model = make("plain")
    curve = Steps(model, ToMe(), 40)
    slow = 1.05  # times as slow as predicted is everything
    timed_as(monkeypatch, curve, slow)
    found = small_search(model, macs=None, curve=curve, blocks=(1, 2, 3, 4), moves=2, **budget)
    limit = curve.unpruned / 1.5 if "speedup" in budget else 4.4e-3
    assert found.chosen.seconds == pytest.approx(slow * curve.predict(found.chosen.config))
    assert 0.8 * limit < found.chosen.seconds <= 1.02 * limit
    assert found.plan.predicted["seconds"] == found.chosen.seconds
    assert found.notes[-1] == "On this machine fewer patch tokens take longer than more: 38 than 40, 39 than 40."
    assert " ms" in str(found)


def test_times_of_a_busy_machine_are_said_to_be(monkeypatch):
    model = make("plain")
    curve = Steps(model, ToMe(), 40)
    monkeypatch.setattr("tntprune.search.find_plan.measure_latency", lambda *given, **more: curve)
    monkeypatch.setattr("tntprune.search.find_plan.Watch.others", lambda self: 1.4)
    timed_as(monkeypatch, curve)
    found = small_search(model, macs=None, speedup=1.5, moves=0, blocks=(1, 2))
    assert "Note: the machine was busy: other programs used 1.4 processors" in str(found)
    curve.predict = lambda config: 0.8 * curve.unpruned
    with pytest.raises(UserError, match=r"expected a larger budget \(the machine was busy"):
        small_search(model, macs=None, speedup=1.5, moves=0, blocks=(1, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "none given"),
        (
            {"macs": 0.5, "speedup": 2.0, "drop": 1.0},
            "macs and speedup given; expected one of macs, latency and speedup",
        ),
        ({"macs": 0.5, "drop": -1.0}, "--drop -1: expected a number above 0"),
        ({"macs": 0.0}, "above 0"),
        ({"speedup": 1.0}, "above 1"),
        ({"drop": 100.0}, "below 100"),
        ({"macs": float("nan")}, "above 0"),
        ({"latency": "12"}, "such as 12ms"),
        ({"latency": "0ms"}, "above 0"),
        ({"latency": "-3ms"}, "such as 12ms"),
    ],
)
def test_budgets_out_of_range_are_refused(given, words):
    with pytest.raises(UsageError, match=words):
        budget(**given)


def test_budgets():
    assert budget(latency="12ms").value == 0.012 and budget(latency="1.5 s").value == 1.5
    assert budget(macs=0.8).limit(1e9) == 0.8e9 == budget(macs=0.8e9).limit(1e9) and budget(speedup=4).limit(2.0) == 0.5


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"macs": 1e12}, "the unpruned model takes"),
        ({"macs": 0.01}, "cannot meet 1 % of the MACs"),
        ({"photos": 4}, "photos=4"),
        ({"minutes": 0}, "minutes=0"),
        ({"method": None}, "nothing to search for"),
        ({"method": DynamicViT()}, "needs labels"),
    ],
)
def test_what_cannot_be_searched_is_refused(more, words):
    with pytest.raises(UserError, match=words):
        small_search(make("plain"), **more)
    with pytest.raises(UsageError, match="training mode"):
        small_search(make("plain").train())


def point(cost: int, kl: float, lost: float = 10.0, seconds: float | None = None) -> Verified:
    figures = {"kl": kl, "agreement": 100 - lost, "lost": lost, "lost_low": lost - 1, "lost_high": lost + 1}
    return Verified("", Random(at=1, tokens=cost), cost, seconds, figures, figures, figures)


def test_the_front_is_what_nothing_beats():
    points = [point(3, 0.2), point(1, 0.5), point(2, 0.5), point(2, 0.4), point(4, 0.3), point(5, 0.1)]
    assert [(one.cost, one.distance) for one in front(points)] == [(1, 0.5), (2, 0.4), (3, 0.2), (5, 0.1)]


def test_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1], [1, 2]) == 0 == rank_correlation([1], [1])
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)


def finished(*points: Verified, marks: tuple[Verified, ...] = (), **wanted) -> BudgetSearch:
    """A search that has verified these schedules, with a limit of 10 of whatever costs."""
    search = BudgetSearch.__new__(BudgetSearch)
    search.verified = {one.config: one for one in points}
    search.simple = {str(place): one.config for place, one in enumerate(marks)}
    search.wanted, search.limit, search.timed, search.notes = budget(**(wanted or {"macs": 0.5})), 10.0, None, []
    return search


def test_the_plan_takes_the_best_within_the_limit_and_never_one_that_a_simple_schedule_beats():
    def settled(*points: Verified, marks: tuple[Verified, ...] = ()) -> int:
        return finished(*points, marks=marks).chosen().macs

    searched, cheap, mark, over = point(9, 0.2), point(8, 0.3), point(10, 0.4), point(11, 0.0)
    assert settled(searched, cheap, over) == 9 == settled(searched, cheap, mark, over, marks=(mark,))
    assert settled(searched, point(10, 0.4, lost=9.0), marks=(point(10, 0.4),)) == 10
    assert settled(point(9, 0.2, lost=8.0), point(10, 0.4, lost=9.0), marks=(point(10, 0.4),)) == 9


def test_where_time_counts_what_was_verified_is_timed_and_the_choice_goes_by_that():
    """Predicted are as many seconds as tokens; what is predicted at 12 and more is not timed."""

    def chosen(
        measured: dict[int, float], marks: tuple[Verified, ...] = (), **wanted
    ) -> tuple[int, list[int], list[str]]:
        asked: list[int] = []

        def timed(configs) -> list[float]:
            asked.extend(config.tokens[0] for config in configs)
            return [measured[config.tokens[0]] for config in configs]

        points = [
            point(n, kl, lost=10 * kl, seconds=float(n))
            for n, kl in ((8, 0.4), (9, 0.3), (10, 0.2), (11, 0.1), (13, 0.0))
        ]
        search = finished(*points, marks=marks, **(wanted or {"speedup": 2.0}))
        search.timed = timed
        search.time_verified()
        return search.chosen().macs, asked, search.notes

    asked = [8, 9, 10, 11]
    assert chosen({8: 8.0, 9: 9.0, 10: 10.1, 11: 11.0}) == (10, asked, [])  # within what two measurements differ by
    assert chosen({8: 8.0, 9: 9.0, 10: 10.5, 11: 11.0}) == (9, asked, [])  # slower than predicted
    assert chosen({8: 8.0, 9: 9.0, 10: 9.0, 11: 9.9}) == (11, asked, [])  # faster
    mark = point(10, 0.2, lost=2.0, seconds=10.0)
    assert chosen({8: 8.0, 9: 9.0, 10: 10.5, 11: 11.0}, marks=(mark,))[0] == 9  # a simple one that is too slow
    assert chosen({8: 8.0, 9: 7.0, 10: 10.0, 11: 11.0}, speedup=2.0, drop=4.0)[0] == 9  # the fastest that keeps it
    macs_, _, (note,) = chosen({8: 12.0, 9: 11.5, 10: 13.0, 11: 14.0})
    assert macs_ == 9 and "By measurement no verified schedule meets 2 times as fast" in note


class Graded(Rigged):
    """Photos of which a schedule loses more the more it removes, and least where it removes at block 3 alone.

    The time goes on by `pace` seconds per photo, and 20 times that for the batches of `spikes`.
    """

    clock: list[float] = [0.0]
    pace = 0.0
    spikes: frozenset[int] = frozenset()
    asked = 0

    def share(self, config) -> float:
        """The share of the photos that is lost."""
        share = (1 - self.space.macs(config) / self.space.base_macs) ** 3 / 5
        return share if tuple(config.at) == (3,) else 1.5 * share

    def ask(self, config, before=None, upto=None, rival=None, most=None) -> Answers:
        known, last = 0 if before is None else len(before), BATCH * (4 if upto is None else min(4, upto))
        order = torch.arange(4 * BATCH) * 37 % (4 * BATCH)
        lost = (order < round(self.share(config) * 4 * BATCH)).float()
        count = known
        while count < last and (most is None or float(lost[:count].sum()) <= most):
            Graded.asked += 1
            self.clock[0] += BATCH * self.pace * (20 if Graded.asked in self.spikes else 1)
            count += BATCH
        return Answers(lost[:count] + self.share(config), lost[:count], lost[:count] == 0, torch.ones(0) == 0)


def graded(monkeypatch, model, pace: float = 0.0, spikes: frozenset[int] = frozenset(), **more):
    clock = [0.0]
    for name, value in {"clock": clock, "pace": pace, "spikes": spikes, "asked": 0}.items():
        monkeypatch.setattr(Graded, name, value)
    monkeypatch.setattr("tntprune.search.budget_search.Judge", Graded)
    monkeypatch.setattr("tntprune.search.scout.time.monotonic", lambda: clock[0])
    given = {"method": Random(), "photos": 8 * BATCH, "progress": False, **more}
    return find_plan(model, photos_for(model, 8 * BATCH), **given), clock[0]


def test_no_simple_schedule_is_cheaper_at_the_same_loss(monkeypatch, large):
    found, _ = graded(monkeypatch, large, drop=2.0, moves=10)
    space = Space(large, Random())
    rigged = Graded(space)
    for shape in simple(space):
        for share in (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8):
            other = fit(shape, space, space.macs, share * space.base_macs)
            if other is not None and other.cost < found.chosen.macs - 0.02 * space.base_macs:
                assert 100 * float(rigged.ask(other.config).lost.mean()) > 2.0
    assert found.chosen.config.at == (3,) and found.chosen.lost <= 2.0
    assert "This is block 3 alone, which needs no search." in str(found)


@pytest.mark.parametrize("drop", [60.0, 5.0, 0.3])
def test_late_blocks_that_cannot_reach_half_of_the_cost(monkeypatch, large, drop):
    """The cheapest schedule may lie near the least that the blocks allow: then nothing cheaper is searched."""
    monkeypatch.setattr(Graded, "share", lambda self, config: 0.001 if drop > 0.3 else 0.002)
    found, _ = graded(monkeypatch, large, drop=drop, moves=2, blocks=(5,))
    assert found.chosen.lost <= drop and found.chosen.cost < found.whole


def test_a_loss_that_no_schedule_keeps_is_an_error(monkeypatch, large):
    monkeypatch.setattr(Graded, "share", lambda self, config: 0.5)
    with pytest.raises(
        UserError, match=r"loses at most 2 points on 256 photos.*expected a larger --drop, or more --ph"
    ):
        graded(monkeypatch, large, drop=2.0, moves=2)
    with pytest.raises(UserError, match="expected a larger --drop, or more time"):
        graded(monkeypatch, large, 1.0, drop=2.0, moves=2, minutes=1.0)


@pytest.mark.parametrize("spikes", [frozenset(), frozenset({5}), frozenset(range(10, 400, 9))], ids=str)
@pytest.mark.parametrize("budget", [{"drop": 2.0}, {"macs": 0.5}], ids=str)
def test_a_search_uses_the_time_that_it_was_given_on_a_busy_machine_too(monkeypatch, large, budget, spikes):
    """The clock goes by what is asked: a pass over all photos takes 10 s, and some batches 20 times as long."""
    found, seconds = graded(monkeypatch, large, 10 / (8 * BATCH), spikes, minutes=4.0, **budget)
    assert found.ended == "time" and found.chosen.name == "chosen"
    slowest = 10 if not spikes else 45  # of the last pass
    assert 225 - slowest / 2 < seconds < 240 + slowest
    assert found.chosen.config.at == (3,) or "macs" in budget


def test_little_time_is_enough_for_the_simple_schedules(monkeypatch, large):
    """Twelve passes are as many as the busiest machine that it was tried on gives in four minutes."""
    found, _ = graded(monkeypatch, large, 20 / (8 * BATCH), minutes=4.0, drop=2.0)
    assert found.chosen.config.at == (3,) and found.chosen.macs < 0.57 * found.whole  # of 0.54


def test_a_drop_beside_another_budget(monkeypatch, large):
    whole = macs(large).macs
    fast, _ = graded(monkeypatch, large, drop=2.0, macs=0.6, moves=4)
    assert fast.chosen.lost <= 2.0 and fast.chosen.macs < 0.55 * whole  # the fastest that keeps it
    slow, _ = graded(monkeypatch, large, drop=2.0, macs=0.3, moves=4)
    assert slow.chosen.lost > 2.0 and slow.chosen.macs <= 0.3 * whole  # the least drop at that cost
    assert all(slow.chosen.lost <= one.lost for one in (*slow.references, *slow.front) if one.macs <= 0.3 * whole)
    assert slow.notes[0].startswith("No schedule that was verified within the budget loses at most 2 points.")
    assert slow.plan.budget == {"macs": 0.3, "drop": 2.0} and "30 % of the MACs and at most 2 points lost" in str(slow)


def test_intervals():
    assert wilson(0, 200) == pytest.approx((0, 0.01885), abs=1e-5)
    assert wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    # airway hyper-responsiveness before and after (Bentur 2009): the example of Fagerland, Lydersen and Laake (2014)
    before = torch.tensor([1.0] * 2 + [0.0] * 19)
    after = torch.tensor([1.0] + [0.0] + [1.0] * 7 + [0.0] * 12)
    assert of_difference(before, after) == pytest.approx((-0.507, -0.026), abs=5e-4)
    right, one_wrong = torch.ones(200), torch.ones(200).index_fill(0, torch.tensor([3]), 0)
    assert of_difference(right, one_wrong) == pytest.approx((0, wilson(1, 200)[1]))
    assert of_difference(right, right) == pytest.approx((0, wilson(0, 200)[1]))
    values = torch.tensor([0.1, 0.3])
    assert of_mean(values) == pytest.approx((0.004, 0.396), abs=1e-3)
    assert wilson(0, least_photos(1.0))[1] <= 0.01 < wilson(0, least_photos(1.0) - 1)[1]


def test_an_interval_holds_the_true_loss_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(400):
        draw = torch.rand(100, generator=generator)
        before, after = draw < 0.85, (draw < 0.80) | (draw > 0.98)  # 5 points lost, 2 won
        low, high = of_difference(before.double(), after.double())
        hits += low <= 0.03 <= high
    assert 0.92 < hits / 400 < 0.985


def test_the_user_is_told_when_the_photos_cannot_judge():
    model = make("plain")
    images = photos_for(model, 40)
    with torch.inference_mode():
        labels = model(images).argmax(1)
    few = {"method": ToMe(), "drop": 20.0, "photos": 40, "moves": 0, "blocks": (2, 3), "progress": False}
    found = find_plan(model, images, labels, **few)
    assert "The unpruned model is right on all 40 photos" in str(found)
    assert "40 photos are too few to promise at most 20 points: the 95 % interval of the loss is" in str(found)
    other = find_plan(model, images, 6 - labels, **few)
    assert "is right on all" not in str(other)


def test_a_budget_that_ruins_the_model_is_told():
    sure = {"schedules": 4, "kl_rank": 1.0}
    (ruined,) = doubts(point(9, 0.2, lost=84.5), budget(speedup=2.0), 5000, sure)
    assert "loses 84 points" in ruined and "larger --batch-size" in ruined
    (ruined,) = doubts(point(9, 0.2, lost=84.5), budget(macs=0.1), 5000, sure)
    assert "Use a larger budget." in ruined
    assert not doubts(point(9, 0.2, lost=5.0), budget(speedup=2.0), 5000, sure)


def test_a_rank_correlation_is_only_spoken_of_where_it_is_low():
    wanted = budget(macs=0.5)
    for rank, words in ((0.49, ["rank correlation 0.49, expected 0.5 or more"]), (0.5, [])):
        found = doubts(point(9, 0.2), wanted, 40, {"schedules": 4, "kl_rank": rank})
        assert len(found) == len(words) and all(word in found[0] for word in words)
    enough = doubts(point(9, 0.2, lost=1.0), budget(drop=2.0), 5000, {"schedules": 4, "kl_rank": 1.0})
    assert not enough
    (few,) = doubts(point(9, 0.2, lost=1.0), budget(drop=1.5), 100, {"schedules": 4, "kl_rank": 1.0})
    assert "100 photos are too few to promise at most 1.5 points" in few and "(at least 253), or a larger --drop" in few


@pytest.fixture
def headless() -> torch.nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(**{**SMALL, "num_classes": 0}).eval()


def test_a_model_without_classes_is_judged_by_the_cosine_of_its_embeddings(headless):
    images = photos_for(headless, 40)
    few = {"method": ToMe(), "photos": 40, "moves": 0, "blocks": (1, 2, 3), "progress": False}
    found = find_plan(headless, images, drop=0.5, **few)
    with torch.inference_mode():
        reduced = reduce_(twin_of(headless), found.plan)
        cosine = F.cosine_similarity(headless(images), reduced(images)).mean().item()
    assert found.chosen.overall["cosine"] == pytest.approx(cosine, abs=1e-5)
    assert found.chosen.lost == pytest.approx(100 * (1 - cosine), abs=1e-3) and found.chosen.lost <= 0.5
    assert "Loss: the mean cosine similarity to the unpruned model's embeddings is 0.99" in str(found)
    limited = find_plan(headless, images, macs=0.7, **few)
    assert limited.chosen.macs <= 0.7 * limited.whole and "cosine" in limited.plan.predicted["held_out"]
    with pytest.raises(UserError, match="labels were given for a model without classes"):
        find_plan(headless, images, torch.zeros(40), macs=0.7, **few)


def test_a_model_without_classes_takes_a_folder_of_photos(headless, tmp_path):
    for number, image in enumerate(torch.rand(12, 3, 32, 32)):
        pixels = (255 * image).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    few = {"method": ToMe(), "photos": 12, "moves": 0, "blocks": (2, 3), "progress": False}
    found = find_plan(headless, tmp_path, macs=0.8, workers=0, **few)
    assert found.photos == (6, 6) and not any("labels" in note for note in found.notes)
    draw_front(tmp_path / "front.png", found, "headless")
    assert Image.open(tmp_path / "front.png").size[0] > 900


def test_a_model_that_gives_a_grid_is_refused():
    model = VisionTransformer(**{**SMALL, "num_classes": 0, "global_pool": ""}).eval()
    with pytest.raises(UserError, match="one embedding per image"):
        find_plan(model, photos_for(model, 12), method=ToMe(), macs=0.5, photos=12, progress=False)


def test_a_share_above_one_is_refused():
    with pytest.raises(UsageError, match=r"--macs 1.5: expected multiply-accumulates"):
        budget(macs=1.5)

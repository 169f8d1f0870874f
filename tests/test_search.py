from __future__ import annotations

import random
import signal
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

import tntprune
from conftest import SMALL, make, photos_for
from tntprune import (
    ATS,
    TNT,
    AViT,
    DynamicViT,
    EViT,
    EvoViT,
    Random,
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
from tntprune.config import Combination
from tntprune.plan import write_plan
from tntprune.reduce import is_reduced, reduction_of
from tntprune.search.budget import budget
from tntprune.search.job import Job
from tntprune.search.judge import BATCH, Answers, Judge
from tntprune.search.points import Point, front, rank_correlation
from tntprune.search.run import search
from tntprune.search.scout import Clock, Scout, Tried
from tntprune.search.shapes import Shape, family, fit, moved, references
from tntprune.search.space import Space

METHODS = [
    TNT(), TNT(recipe="relative", similar=9), Random(), TopK(), EViT(), EViT(fuse=False), DynamicViT(), ToMe(),
    ToMe(inside=False, r=3), ZeroTPrune(), ZeroTPrune(beyond=False), AViT(), EvoViT(),
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


@pytest.mark.parametrize("method", [one for one in METHODS if one != ZeroTPrune()], ids=label)
def test_as_many_tokens_are_left_as_were_asked_for(method):
    space = Space(make("plain"), method)
    wanted = [50 - 7 * number for number in range(len(space.blocks))]
    model = space.put(space.config(wanted))
    steps = reduction_of(model).steps(64)
    assert {place.block: step.leaving for place, step in steps.items() if place.block in space.blocks} == dict(
        zip(space.blocks, wanted)
    )
    with torch.inference_mode(), record(model):
        model(photos_for(model))


def test_where_similar_tokens_go_beyond_what_is_asked_for_no_more_is_asked_for_than_arrives():
    space = Space(make("plain"), ZeroTPrune())
    config = space.config([50, 43, 36, 29, 22])
    assert [step.leaving for step in reduction_of(space.put(config)).steps(64).values()] == [50, 36, 22]


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
        assert schedule.cost == macs(reduce_(make_like(large), schedule.config)).macs


def make_like(model: torch.nn.Module) -> torch.nn.Module:
    return tntprune.reduce.twin_of(model)


def test_a_budget_that_a_shape_cannot_meet_gives_none(large):
    space = Space(large, Random())
    last = Shape(tuple(float(block == 11) for block in space.blocks))
    assert fit(last, space, space.macs, 0.8 * space.base_macs) is None
    assert fit(last, space, space.macs, 0.95 * space.base_macs) is not None


def test_references_are_the_papers_blocks_and_all_blocks(large):
    space = Space(large, Random())
    paper, rates, counts = (fit(shape, space, space.macs, 0.7 * space.base_macs) for shape in references(space))
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


@pytest.mark.parametrize("method", [ToMe(), Random(), EViT(), ZeroTPrune(), TNT(), AViT(), EvoViT()], ids=label)
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
        assert torch.allclose(found.kl, F.kl_div(got, want, reduction="none", log_target=True).sum(1), atol=1e-5)
        assert torch.equal(found.right, got.argmax(1) == labels)
        figures = found.figures(judge.right)
        assert figures["agreement"] == pytest.approx(100 * (got.argmax(1) == want.argmax(1)).double().mean().item())
        drop = (want.argmax(1) == labels).double().mean() - (got.argmax(1) == labels).double().mean()
        assert figures["top1_drop"] == pytest.approx(100 * drop.item())
        half = judge.ask(config, upto=1)
        assert len(half) == BATCH and torch.equal(judge.ask(config, half).kl, found.kl)


def test_a_clearly_worse_schedule_is_asked_no_further():
    base = make("plain")
    judge = Judge(Space(base, Random()), photos_for(base, 4 * BATCH), None)
    good, bad = judge.space.config([63] * 6), judge.space.config([2] * 6)
    rival = judge.ask(good)
    assert len(judge.ask(bad, rival=rival)) < 4 * BATCH == len(judge.ask(good, rival=rival))


class Rigged:
    """A judge with a known best: what goes at a block costs its square, and most at the first blocks and the last."""

    batches, right = 4, torch.empty(0)

    def __init__(self, space: Space) -> None:
        self.space = space

    def __len__(self) -> int:
        return 4 * BATCH

    def loss(self, config) -> float:
        gone, before = dict.fromkeys(self.space.blocks, 0), self.space.patches
        for at, tokens in zip(config.at, config.tokens):
            gone[at], before = before - tokens, tokens
        return sum((9.0 if block in (1, 2, 11) else 1.0) * count**2 for block, count in gone.items())

    def ask(self, config, before=None, upto=None, rival=None) -> Answers:
        count = BATCH * (4 if upto is None else min(4, upto))
        return Answers(torch.full((count,), self.loss(config)), torch.ones(count, dtype=torch.bool), torch.empty(0))


def test_the_search_comes_near_a_known_optimum_and_beats_uniform(large):
    space = Space(large, Random(), blocks=range(1, 12))
    rigged, limit = Rigged(space), 0.7 * space.base_macs
    scout = Scout(space, rigged, space.macs, 0, Clock(1000), Bar())
    best = scout.improve(scout.rounds(scout.fitted(family(space), limit))[0], limit, 100)
    uniform = min(one.kl for shape in references(space) for one in ask_all(scout, shape, limit))
    rng = random.Random(5)
    other = float("inf")  # the best of many, drawn around what one would guess
    for _ in range(400):
        weights = tuple((1 / 9 if block in (1, 2, 11) else 1.0) * rng.uniform(0.6, 1.4) for block in space.blocks)
        schedule = fit(Shape(weights), space, space.macs, limit)
        other = min(other, rigged.loss(schedule.config))
    assert best.schedule.cost <= limit
    assert best.kl < 0.75 * uniform and best.kl < 1.03 * other


def ask_all(scout: Scout, shape: Shape, limit: float) -> list[Tried]:
    found = scout.fitted([shape], limit)
    for one in found:
        scout.ask(one)
    return found


def small_search(model, **more):
    given = {"method": ToMe(), "macs": 0.6, "moves": 4, "photos": 40, "progress": False, **more}
    return search(model, photos_for(model, 40), **given)


def test_a_search_gives_a_plan_that_meets_its_budget(tmp_path):
    model = make("plain")
    before = model(photos_for(model))
    found = small_search(model)
    assert not is_reduced(model) and torch.equal(model(photos_for(model)), before)
    limit = 0.6 * macs(model).macs
    assert found.chosen.macs <= limit and found.complete and found.photos == (20, 20)
    assert found.plan.predicted["macs"] == found.chosen.macs == macs(reduce_(make("plain"), found.plan.config)).macs
    assert all(found.chosen.searched["kl"] <= point.searched["kl"] for point in found.references)
    names = [point.name for point in found.references]
    assert names == ["the paper's [3, 4, 5]", "uniform rates", "uniform counts"] and not found.notes
    assert all(a.cost < b.cost and a.kl > b.kl for a, b in pairwise(found.front))
    costs = [point.cost for point in (*found.front, *found.others)]
    assert min(costs) < 0.85 * limit and max(costs) > 1.05 * limit
    write_plan(tmp_path / "plan.json", found.plan)
    assert reduction_of(load_(make("plain"), tmp_path / "plan.json")).config == found.chosen.config
    for word in ("tome, 60 % of the MACs", "chosen", "uniform rates", "rank correlation"):
        assert word in str(found)


def test_the_same_seed_gives_the_same_plan():
    one, again, other = small_search(make("plain")), small_search(make("plain")), small_search(make("plain"), seed=3)
    assert one.plan == again.plan or one.to_dict()["front"] == again.to_dict()["front"]
    assert one.plan.predicted != other.plan.predicted


def test_the_photos_that_verify_are_not_those_that_were_searched_on():
    model = make("plain")
    same = photos_for(model, 1).expand(20, -1, -1, -1)
    images = torch.cat([same, photos_for(model, 20, seed=5)])
    found = search(model, images, method=Random(), macs=0.6, moves=0, photos=40, progress=False)
    assert found.chosen.searched["kl"] != found.chosen.held_out["kl"]


def test_a_method_that_learns_is_trained_first_or_brings_what_it_learned(monkeypatch):
    monkeypatch.setattr("tntprune.training.STEPS", 5)
    model = make("plain")
    found = small_search(model, method=TNT(), macs=0.7)
    assert found.plan.learned
    trained = reduce_(make("plain"), TNT(at=(1, 3), tokens=(40, 20), noise_blocks=(1, 3, 5)))
    own = {name: value.clone() for name, value in reduction_of(trained).state_dict().items()}
    found = small_search(trained, method=None, macs=0.7)
    assert set(found.chosen.config.at) <= {1, 3, 5}
    assert all(torch.equal(found.plan.learned[name], own[name]) for name in found.plan.learned)
    assert reduction_of(trained).config.at == (1, 3)


def test_when_the_time_is_up_the_best_so_far_is_given():
    found = small_search(make("plain"), macs=0.4, minutes=1e-6)
    assert not found.complete and found.chosen.macs <= 0.4 * found.whole and "the time was up" in str(found)
    assert "the paper's [3, 4, 5]: cannot meet this" in found.notes


@pytest.mark.parametrize("budget", [{"macs": 0.4}, {"macs": None, "drop": 40.0}])
def test_ctrl_c_verifies_what_is_best_so_far(monkeypatch, budget):
    begun, before = Scout.told, signal.getsignal(signal.SIGINT)

    def told(self, best):
        if not self.clock.stops:
            signal.raise_signal(signal.SIGINT)
        begun(self, best)

    monkeypatch.setattr(Scout, "told", told)
    found = small_search(make("plain"), **budget)
    assert not found.complete and "it was interrupted" in str(found)
    assert found.chosen.lost <= 40.0 if "drop" in budget else found.chosen.macs <= 0.4 * found.whole
    assert signal.getsignal(signal.SIGINT) is before


def test_the_smallest_cost_for_a_loss():
    found = small_search(make("plain"), macs=None, drop=15.0)
    assert found.chosen.lost <= 15.0 and found.chosen.name == "chosen"
    assert all(point.cost >= found.chosen.cost for point in found.others if point.lost <= 15.0)
    with pytest.raises(UserError, match="loses at most 1e-06 points"):
        small_search(make("plain"), method=Random(order=3), macs=None, drop=1e-6, moves=0)


class Steps:
    """A curve on which time goes with the MACs, but for a number of tokens that is slow."""

    def __init__(self, model, method, slow: int) -> None:
        self.space, self.slow = Space(model, method), slow
        self.unpruned = self.space.base_macs * 1e-9

    def predict(self, config) -> float:
        bad = sum(count in range(self.slow - 2, self.slow) for count in config.tokens)
        return (self.space.macs(config) + 0.02 * self.space.base_macs * bad) * 1e-9

    def slower(self) -> dict[int, int]:
        return dict.fromkeys(range(self.slow - 2, self.slow), self.slow)


@pytest.mark.parametrize("budget", [{"speedup": 1.5}, {"latency": "4.4ms"}], ids=str)
def test_budgets_of_time_go_by_the_curve(budget):
    model = make("plain")
    curve = Steps(model, ToMe(), 40)
    found = small_search(model, macs=None, curve=curve, **budget)
    limit = curve.unpruned / 1.5 if "speedup" in budget else 4.4e-3
    assert found.chosen.seconds == curve.predict(found.chosen.config) <= limit
    assert found.plan.predicted["seconds"] == found.chosen.seconds
    assert found.notes[-1] == "fewer patch tokens that take longer than more: 38 than 40, 39 than 40"
    assert " ms" in str(found)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "none given"),
        ({"macs": 0.5, "drop": 1.0}, "--macs and --drop given"),
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


def point(cost: int, kl: float) -> Point:
    return Point("", Random(), cost, None, False, {"kl": kl}, {"kl": kl, "agreement": 90.0})


def test_the_front_is_what_nothing_beats():
    points = [point(3, 0.2), point(1, 0.5), point(2, 0.5), point(2, 0.4), point(4, 0.3), point(5, 0.1)]
    assert [(one.cost, one.kl) for one in front(points)] == [(1, 0.5), (2, 0.4), (3, 0.2), (5, 0.1)]


def test_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1], [1, 2]) == 0 == rank_correlation([1], [1])
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)


def test_the_plan_takes_the_best_on_all_photos_of_what_is_within_the_budget(large):
    """A schedule that needs no search too; nothing above the budget, and the front names it once."""

    def point(name: str, macs: int, searched: float, held_out: float) -> Point:
        told = [{"kl": kl, "agreement": 90.0} for kl in (searched, held_out)]
        return Point(name, Random(at=1, tokens=macs), macs, None, False, *told)

    chosen, other = point("chosen", 9, 0.2, 0.5), point("", 8, 0.3, 0.3)
    mark, over = point("uniform rates", 10, 0.4, 0.1), point("", 11, 0.0, 0.0)
    job = Job.__new__(Job)
    job.points = [chosen, other, over]
    best = job.settled(chosen, [mark], 10.0)
    assert (best.name, best.macs) == ("chosen", 10) and mark.name == "uniform rates"
    assert [one.name for one in job.points] == ["", "", ""]
    job.points = [chosen, other, over]
    assert job.settled(chosen, [], 10.0).macs == 8
    assert [(one.name, one.macs) for one in job.points] == [("", 9), ("chosen", 8), ("", 11)]
    job.points = [chosen, over]
    assert job.settled(chosen, [], 10.0) is chosen


def test_a_share_above_one_is_refused():
    with pytest.raises(UsageError, match=r"--macs 1.5: expected multiply-accumulates"):
        budget(macs=1.5)

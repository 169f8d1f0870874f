"""Ours beside the authors': on rows made up from what they reported."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from tntprune.methods import to_dict
from tntprune.paper.compare import Measured, agreements, kendall, total
from tntprune.paper.figures import figures
from tntprune.paper.page import About, sections, slots, text
from tntprune.paper.plan import make_plan
from tntprune.paper.reproduce import join
from tntprune.paper.tables import main_single, orders, reversals, side_by_side
from tntprune.report.tables import NOTHING
from tntprune.sweep.results import ResultRow, Setting

SMALL = "deit_small_distilled_patch16_224"
IMAGES = 50_000


def made_up(entry, top1, images=IMAGES):
    config = None if entry.config is None else to_dict(entry.config)
    base = entry.authors.base if entry.authors else (80.0, 4.6, 1000)
    return ResultRow(
        setting=Setting(entry.model, "w", config, None, "d", images), name=entry.name, scheme=entry.scheme,
        images=images, skipped=0, right=round(top1 * images / 100), right5=images, agreeing=images // 2,
        macs=round((entry.authors.gmacs if entry.authors else base[1]) * 1e9), base_macs=round(base[1] * 1e9),
        tokens=[], about={"seconds": 1.0, "hardware": "none", "versions": "none", "date": "2026-11-28"},
    )  # fmt: skip


def measured(top1, plan=None, images=IMAGES):
    plan = plan or make_plan([SMALL], ["single", "multi", "ablation", "random", "topk", "tome", "zerotprune", "tnt"])
    return plan, join(plan, {entry.run: made_up(entry, top1(entry), images) for entry in plan.all})


def as_printed(entry):
    return entry.authors.top1


@pytest.fixture(scope="module")
def same():
    return measured(as_printed)


def test_tau_is_that_of_every_pair_looked_at():
    def naive(a, b):
        signs = [((x > y) - (x < y), (v > w) - (v < w)) for (x, v), (y, w) in combinations(list(zip(a, b)), 2)]
        agree = sum(s * t for s, t in signs)
        return agree / (sum(s != 0 for s, _ in signs) * sum(t != 0 for _, t in signs)) ** 0.5

    assert kendall([3, 2, 1], [9, 5, 4]) == 1 and kendall([3, 2, 1], [1, 2, 3]) == -1
    for a, b in (([1, 2, 2, 4, 0], [5, 1, 2, 2, 2]), ([1, 5, 3, 3], [1, 1, 2, 0])):
        assert kendall(a, b) == pytest.approx(naive(a, b))
    assert kendall([1, 1], [1, 2]) != kendall([1, 1], [1, 2])  # no order at all: NaN


def test_what_is_as_printed_agrees(same):
    _, rows = same
    assert all(abs(one.difference) < 0.01 for one in rows if one.entry.authors)
    found = agreements(rows)
    assert {(a.scheme, a.rank) for a in found} == {(s, r) for s in ("single", "multi") for r in range(1, 11)}
    assert all(a.against == "deit_small_distilled" and not a.pairs and list(a.theirs) == list(a.ours) for a in found)
    assert total(found).tau == pytest.approx(1) and total(found).clear == 0


def test_the_opposite_order_is_told_pair_by_pair():
    _, rows = measured(lambda entry: 100 - entry.authors.top1 if entry.config else entry.authors.top1)
    found = agreements(rows)
    assert total(found).tau == pytest.approx(-1) and total(found).same == 0
    first = next(a for a in found if (a.scheme, a.rank) == ("single", 1))
    assert list(first.ours) == list(first.theirs)[::-1] and len(first.pairs) == 10
    best = first.pairs[0]
    assert (best.better, best.theirs > 0, best.ours < 0) == ("topk", True, True)
    assert best.ours == pytest.approx(-best.theirs, abs=0.01)


def test_with_few_photos_nothing_is_sure():
    def swapped(entry):  # random drop a point ahead of what it has
        return entry.authors.top1 + (4 if entry.method == "random" else 0)

    few, many = (total(agreements(measured(swapped, images=n)[1])) for n in (100, IMAGES))
    assert few.unclear and not few.clear
    assert many.clear > many.unclear


def test_drops_are_below_ones_own_unpruned_model():
    """Three points less everywhere, the unpruned model included, is no difference at all."""
    _, rows = measured(lambda entry: entry.authors.top1 - 3)
    assert all(abs(one.difference) < 0.01 for one in rows if one.entry.authors)
    _, rows = measured(lambda entry: entry.authors.top1 - 3 * (entry.config is not None))
    assert all(one.difference == pytest.approx(3, abs=0.01) for one in rows if one.entry.authors and one.entry.config)


def test_a_substitute_is_compared_with_three_backbones():
    plan = make_plan(["vit_tiny_patch16_224"])
    _, rows = measured(lambda entry: 70 - entry.rank, plan)
    found = agreements(rows)
    assert {a.against for a in found} == {"deit_tiny_distilled", "deit_small_distilled", "deit_base_distilled"}
    tiny = [a for a in found if a.against == "deit_tiny_distilled"]
    assert all("tnt-mlp" in a.theirs and not {"tnt", "tnt-relative"} & set(a.theirs) for a in tiny)
    assert all(a.tau != a.tau for a in found)  # all alike: no order
    assert len(found) == 60
    assert " = " in orders(found).rows[0][2] and " > " not in orders(found).rows[0][2]


def test_tables(same):
    _, rows = same
    table = main_single(rows, SMALL)
    assert table.header[1:3] == ["ours, K = 0.8", "paper, K = 0.8"]
    tnt = next(line for line in table.rows if line[0] == "TNT")
    assert tnt[3] == tnt[4] == "1.20"  # K = 0.6: 80.49 - 79.29
    tome = next(line for line in table.rows if line[0] == "ToMe")
    assert tome[-1] == NOTHING
    best = {line[0]: marks for line, marks in zip(table.rows, table.best)}
    assert best["Top-K"] == [1, 2] and best["TNT"] == [3, 4, 5, 6, 7, 8]
    own = side_by_side(one for one in rows if one.entry.table == "multi" and one.entry.rank == 10)
    assert [line[0] for line in own.rows] == ["Top-K", "Zero-TPrune", "ToMe", "TNT"]
    assert own.best[-1] == [3, 8] and own.rows[-1][-1] == "0.00" and own.rows[-1][6] == "DeiT-S"
    assert not reversals(agreements(rows)).rows
    assert sections(rows)[-1][1].endswith("<p>Pairs in opposite orders for sure: None.</p>")


def test_what_is_not_there_or_has_no_rival_is_not_the_best():
    _, rows = measured(as_printed, make_plan([SMALL], ["single", "tome", "tnt"]))
    table = main_single(rows, SMALL)
    best = {line[0]: marks for line, marks in zip(table.rows, table.best)}
    assert best == {"ToMe": [], "TNT": [1, 2, 3, 4, 5, 6]}  # and not 7 and 8, where ToMe has nothing
    _, rows = measured(as_printed, make_plan([SMALL], ["single", "tome"]))
    assert main_single(rows, SMALL).best == [[]]


def test_figures_without_a_row_of_the_paper():
    plan = make_plan(["vit_tiny_patch16_224"], ["single", "tnt-relative"])
    _, rows = measured(lambda entry: 70 - entry.rank, plan)
    assert [name for name, _ in figures(rows)] == ["figure-single.png"]


def test_the_page_has_a_slot_for_everything(same):
    plan, rows = same
    about = About("tntprune paper", "short", {"x tnt": 7.0})
    page = text(plan, rows, about)
    assert "Trainings, short recipe: x tnt 7 s" in page and "Not asked for." in page and "{" not in page
    assert f"{IMAGES:,} photos" in page and "tntprune paper" in page
    given = "{{ tau['single deit_small_distilled high'] }} {{ drop['single 0.5 TNT'] }} "
    given += "{{ their_drop['single 0.5 TNT'] }} {{ settings }}"
    assert text(plan, rows, about, given) == f"1.00 1.8 1.8 {len(plan.runs)}"
    assert set(slots(plan, rows, about)) >= {"main", "figures", "rankings", "ablation", "maps", "rows", "made", "notes"}


def test_rows_of_another_model_do_not_share_its_unpruned_row():
    plan = make_plan([SMALL], ["single", "evit", "tnt"])
    _, rows = measured(lambda entry: 81.0 if entry.model == "deit_small_patch16_224" else 70.0, plan)
    evit = next(one for one in rows if one.entry.method == "evit")
    assert evit.base.setting.model == "deit_small_patch16_224" and evit.drop == 0
    assert replace(evit, base=evit.row).drop == 0


def test_measured_share():
    _, rows = measured(as_printed)
    one = next(one for one in rows if one.entry.method == "tnt")
    assert isinstance(one, Measured) and one.share == pytest.approx(one.entry.authors.share, abs=1e-6)

from __future__ import annotations

import re

import pytest

from made_rows import made, sweep
from tntprune.methods import TNT, Random, TopK
from tntprune.report.groups import grouped
from tntprune.report.page import Table
from tntprune.report.tables import commands, equal_costs, every_row, overview, shared


def backbone(rows):
    return grouped(rows)[0].backbones[0]


def test_lines_are_compared_at_equal_cost():
    rows = [
        made(),
        made(TNT(at=3, keep=0.8), "TNT", 780, 0.76),
        made(TNT(at=3, keep=0.5), "TNT", 760, 0.56),
        made(TNT(at=3, keep=0.1), "TNT", 600, 0.30),  # 26 points from the next one: too far to interpolate
        made(TopK(at=3, keep=0.8), "Top-K", 775, 0.74),
        made(TopK(at=3, keep=0.5), "Top-K", 740, 0.54),
    ]
    table = overview(backbone(rows), "single")
    assert table.header == ["method", "74 %", "54 %", "30 %"]
    assert table.groups == [("", 1), ("high: at least 45 % of the MACs", 2), ("low: less than 45 %", 1)]
    assert table.rows == [
        ["TNT", "≈ 77.8", "76.0 (56)", "60.0 (30)"],  # 78.0 and 76.0 lie at 76 and 56 %, so 77.8 at 74 %
        ["Top-K", "77.5 (74)", "74.0 (54)", "–"],  # noqa: RUF001
    ]
    assert table.best == [[1], []]  # at 54 % TNT has no row, and what costs 56 % is not compared with it
    assert re.findall(r"<td class=best>([^<]*)", table.html()) == ["≈ 77.8"]
    assert "**≈ 77.8**" in table.markdown() and table.markdown().count("**") == 2


def test_a_setting_that_another_one_of_its_line_beats_is_not_used():
    rows = [
        made(),
        made(TNT(at=3, keep=0.9), "TNT", 770, 0.97),
        made(TNT(at=3, keep=0.8), "TNT", 780, 0.8),  # better and cheaper
        made(TopK(at=3, keep=0.8), "Top-K", 775, 0.8),
        made(TopK(at=3, keep=0.9), "Top-K", 790, 0.9),
    ]
    assert overview(backbone(rows), "single").rows == [["TNT", "–", "78.0 (80)"], ["Top-K", "79.0 (90)", "77.5 (80)"]]  # noqa: RUF001


def test_two_equal_ones_are_both_marked():
    rows = [made(), made(TNT(at=3), "TNT", 780, 0.9), made(TopK(at=3), "Top-K", 780, 0.9)]
    assert overview(backbone(rows), "single").best == [[1], [1]]


@pytest.mark.parametrize(("high", "low", "columns"), [(0.47, 0.45, 1), (0.76, 0.74, 1), (0.76, 0.7, 2)])
def test_costs_near_each_other_share_a_column(high, low, columns):
    rows = [made(), made(TNT(at=3), "TNT", macs=high), made(TopK(at=3), "Top-K", macs=low)]
    assert len(equal_costs(backbone(rows), "single")) == columns


def test_every_row_is_listed_once_with_what_it_is():
    own = backbone(sweep())
    table = every_row(own, "single")
    assert len(table.rows) == 13 and all(len(row) == len(table.header) for row in table.rows)
    assert table.rows[0][:3] == ["unpruned", "", "80.00"]
    tnt = next(row for row in table.rows if row[:2] == ["TNT", "keep=0.6"])
    assert tnt[2:] == ["77.60", "2.40", "82.60", "77.6", "7.20", "72.0", "1.40", "40"]
    names = [row[0] for row in table.rows[1:]]
    assert len(set(names)) == 3 and names == sorted(names, key=names.index)
    macs = [float(row[6]) for row in table.rows if row[0] == "TNT"]
    assert macs == sorted(macs, reverse=True)
    assert shared(own, "single") == "TNT: at=3; random <drop>: at=3; Top-K: at=3"


def test_gains_have_a_minus_and_busy_machines_a_mark():
    rows = [made(), made(TNT(at=3), "TNT", 810, 0.5, busy=0.9), made(Random(at=3), "random", 700, 0.5, speed=None)]
    tnt, random = every_row(backbone(rows), "single").rows[1:]
    assert tnt[3] == "\u22121.00" and tnt[8] == "†1.00"
    assert random[8:] == ["–"] * 2  # noqa: RUF001


def test_what_a_small_model_costs_is_told_in_millions():
    from dataclasses import replace

    rows = [replace(row, macs=row.macs // 1000, base_macs=row.base_macs // 1000) for row in sweep()]
    table = every_row(backbone(rows), "single")
    assert "MMACs" in table.header and table.rows[0][6] == "10.00"


def test_commands_are_there_with_the_keys():
    rows = sweep()
    table = commands(rows)
    assert [row[2:] for row in table.rows] == [[row.setting.key, row.command] for row in rows]
    assert "&lt;here&gt;" in table.html() and "<here>" not in table.html()


def test_markdown_keeps_its_columns():
    text = Table(["a|b", "c"], [["x|y", "1"], ["two\nlines", "2"]], best=[[1], []], words=[0]).markdown()
    assert text == "| a\\|b | c |\n| --- | ---: |\n| x\\|y | **1** |\n| two lines | 2 |\n"

"""The paper's figures: our copy of them, and every GFLOPs cell computed from the schedule alone."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tntprune.cli.main import main
from tntprune.methods import METHODS
from tntprune.paper import published
from tntprune.paper.dry_run import count
from tntprune.paper.settings import setting

TABLES = Path(os.environ.get("TNTPRUNE_TABLES", Path(__file__).parents[3] / "shared" / "paper" / "tables.csv"))
NAMES = {row.name: row for row in published()}


def computed(row) -> int:
    return count(row.model, row.config)


# The copy


def test_every_cell_of_the_appendix_is_there():
    assert len(published()) == len(NAMES) == 443
    assert Counter(row.row["backbone"] for row in published()) == {
        "deit_base_distilled": 123, "deit_small_distilled": 123, "deit_tiny_distilled": 103, "vit16_mlp768": 94,
    }  # fmt: skip
    assert Counter(row.row["method"] for row in published()) == {
        "none": 4, "random": 42, "topk": 60, "tnt": 62, "tnt-mlp": 20, "tome": 51, "zerotprune": 82, "dynamicvit": 82,
        "evit": 40,
    }  # fmt: skip


@pytest.mark.realdata
@pytest.mark.skipif(not TABLES.is_file(), reason="needs the paper's tables; set TNTPRUNE_TABLES")
def test_the_copy_is_the_tables():
    with TABLES.open(newline="") as file:
        tables = list(csv.DictReader(file))
    assert [{name: row.row[name] for name in tables[0]} for row in published()] == tables


def test_figures_are_as_printed():
    row = NAMES["deit_small_distilled single tnt 0.5"]
    assert (row.authors.top1, row.authors.gmacs, row.authors.images_per_s) == (78.65, 2.87, 1768)
    assert NAMES["vit16_mlp768 single random 160"].authors.images_per_s is None
    assert all(0 < row.authors.top1 < 100 and 0 < row.authors.gmacs <= 17.68 for row in published())


# The settings


def test_the_schedule_gives_the_printed_gflops_or_the_row_says_why_not():
    wrong = [
        f"{row.name}: {computed(row) / 1e9:.3f} computed, {row.authors.gmacs} printed; {row.authors.not_met or 'why?'}"
        for row in published()
        if row.authors.agrees(computed(row)) == bool(row.authors.not_met)
    ]
    assert wrong == []


def test_how_many_are_met():
    """Counted, so that no row becomes an exception unseen."""
    missed = Counter(row.row["method"] + " " + row.row["backbone"] for row in published() if row.authors.not_met)
    assert missed == {
        "dynamicvit vit16_mlp768": 20, "zerotprune vit16_mlp768": 1, "tnt-mlp deit_tiny_distilled": 1,
        "tome deit_base_distilled": 1, "tome deit_small_distilled": 1,
    }  # fmt: skip
    agree = sum(row.authors.agrees(computed(row)) for row in published())
    assert agree == 419 == len(published()) - missed.total()


def test_another_schedule_is_noticed():
    """The tolerance is narrower than what one block, five tokens or one prefix token of DeiT-B make."""
    row = NAMES["deit_base_distilled single tnt 0.5"]
    for change in ({"at": 2}, {"at": 4}, {"tokens": 93}, {"tokens": 103}):
        assert not row.authors.agrees(count(row.model, row.config.changed(**change)))
    row = NAMES["deit_base_distilled multi dynamicvit 0.7 at 11.5"]
    assert row.authors.agrees(count("deit_base_patch16_224", row.config))
    assert not row.authors.agrees(count("deit_base_distilled_patch16_224", row.config))


def test_a_parameter_that_was_not_run_as_printed_is_explained():
    changed = [row for row in published() if row.as_run != row.printed]
    assert len(changed) == 22 and all(row.authors.note for row in changed)
    for row in changed:  # what is printed would not do, else there was nothing to change
        assert not row.authors.agrees(count(row.model, setting(row.row, row.printed))), row.name
    assert all(row.how for row in published() if row.config)


def test_who_ran_on_what():
    for row in published():
        on_plain = row.row["method"] in ("dynamicvit", "evit") and row.row["backbone"].startswith("deit")
        assert ("distilled" in row.model) == (row.row["backbone"].startswith("deit") and not on_plain)
        assert row.config is None or row.config.method == row.row["method"].removesuffix("-mlp")
    assert {row.config.method for row in published() if row.config} <= set(METHODS)


# The command line

COMMANDS = {
    "deit_base_distilled none": "deit_base_distilled_patch16_224",
    "deit_small_distilled single random 0.5": "deit_small_distilled_patch16_224 --method random --at 3 --keep 0.5",
    "deit_base_distilled multi topk 0.9 0.9 0.8 at 13.0": "deit_base_distilled_patch16_224 --method topk --at 3 4 5 "
    "--keep 0.9 0.9 0.8",
    "deit_small_distilled single tnt 0.6": "deit_small_distilled_patch16_224 --method tnt --recipe paper --at 3 "
    "--keep 0.6 --similar 25",
    "vit16_mlp768 multi tnt 0.9 0.9 0.9 at 6.00": "vit16 --method tnt --recipe paper --at 3 4 5 "
    "--keep 0.9 --similar 40",
    "deit_tiny_distilled single tnt-mlp 0.5": "deit_tiny_distilled_patch16_224 --method tnt --recipe paper "
    "--scorer mlp --at 3 --keep 0.5 --similar 25",
    "deit_small_distilled multi tome 11 at 3.0": "deit_small_distilled_patch16_224 --method tome --r 11",
    "vit16_mlp768 single tome 160": "vit16 --method tome --at 2 --r 36 --metric concat",
    "deit_small_distilled multi dynamicvit 0.7 at 3.0": "deit_small_patch16_224 --method dynamicvit --keep 0.7",
    "deit_base_distilled multi evit 0.7 at 11.5": "deit_base_patch16_224 --method evit --keep 0.7",
    "deit_small_distilled single zerotprune 0.5": "deit_small_distilled_patch16_224 --method zerotprune --at 3 "
    "--keep 0.5 --similar 25 --beyond False --stages is --iterations 50",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_prints_the_same(capsys, name):
    row = NAMES[name]
    assert not row.authors.not_met
    assert main(["macs", *COMMANDS[name].split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["macs"] == computed(row)
    assert main(["macs", *COMMANDS[name].split()]) == 0
    printed = re.match(r"([\d.]+) GMACs", capsys.readouterr().out)
    assert printed and abs(float(printed[1]) - row.authors.gmacs) < 0.0101


def test_every_method_of_the_paper_has_a_command():
    assert {NAMES[name].row["method"] for name in COMMANDS} == {row.row["method"] for row in published()}

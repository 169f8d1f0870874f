from __future__ import annotations

from dataclasses import replace

import pytest

from made_rows import made, sweep
from tntprune.errors import UserError
from tntprune.methods import TNT, Combination, EViT, Random, ToMe, to_dict
from tntprune.report.groups import grouped, in_words, line_names, options_of


def test_every_row_is_in_one_place_and_the_unpruned_one_apart():
    rows = sweep("a") + sweep("b")
    (group,) = grouped(rows)
    assert [backbone.label for backbone in group.backbones] == ["a", "b"] and group.schemes == ("single", "multi")
    found = [row for backbone in group.backbones for row in (backbone.base, *backbone.rows)]
    assert sorted(row.setting.key for row in found) == sorted(row.setting.key for row in rows)
    for backbone in group.backbones:
        assert backbone.base.setting.config is None
        listed = [row for scheme in group.schemes for line in backbone.lines(scheme).values() for row in line]
        assert len(listed) == len(backbone.rows) == 27


@pytest.mark.parametrize(
    "other", [{"data": "e" * 64}, {"images": 500}, {"precision": "bf16"}, {"batch_size": 1}], ids=str
)
def test_what_cannot_be_compared_is_apart(other):
    groups = grouped(sweep() + sweep(**other))
    assert len(groups) == 2 and groups[0].label != groups[1].label


def test_the_same_model_with_other_weights_is_another_backbone():
    (group,) = grouped(sweep() + sweep(weights="b" * 64) + sweep(img_size=(64, 32)))
    labels = [backbone.label for backbone in group.backbones]
    assert len(set(labels)) == 3 and "weights bbbbbbbb" in labels[1] and "64 x 32" in labels[2]


def test_without_an_unpruned_row_the_error_says_what_to_do():
    with pytest.raises(UserError, match=r"no row of the unpruned vit_tiny on 1,000 images.*27 rows.*tntprune sweep"):
        grouped(sweep()[1:])
    with pytest.raises(UserError, match="no rows to report"):
        grouped([])


def test_rows_of_one_name_at_other_blocks_are_other_lines():
    rows = [made(), *(made(TNT(at=at, keep=keep), "TNT", macs=keep) for at in (2, 3) for keep in (0.3, 0.9))]
    (group,) = grouped(rows)
    lines = group.backbones[0].lines("single")
    assert list(lines) == ["TNT at 2", "TNT at 3"] and line_names([group]) == ["TNT at 2", "TNT at 3"]
    assert [[row.macs for row in line] for line in lines.values()] == [[9_000_000_000, 3_000_000_000]] * 2


def test_a_method_in_other_blocks_than_its_papers_says_so():
    def lines(*configs):
        rows = [made(), *(made(config, "X", macs=0.5, scheme="single") for config in configs)]
        return list(grouped(rows)[0].backbones[0].lines("single"))

    assert lines(ToMe(at=3, keep=0.5)) == ["X, one block"] and lines(ToMe(at=(3, 4), r=8)) == ["X, 2 blocks"]
    assert lines(ToMe(r=8)) == lines(EViT()) == lines(EViT(at=(4, 7, 10), keep=0.9)) == ["X"]
    assert lines(EViT(at=3)) == ["X, one block"] and lines(Random(at=5)) == lines(TNT(at=(1, 2))) == ["X"]
    assert lines(ToMe(r=8), ToMe(at=3, keep=0.5)) == ["X at its own blocks", "X at 3"]


def test_lines_have_one_order_whatever_the_rows_have():
    rows = sweep()
    assert line_names(grouped(rows)) == line_names(grouped(rows[::-1]))


def test_options_are_told_where_they_say_something():
    assert in_words(options_of(to_dict(TNT(at=3, keep=0.5, similar=25)))) == "at=3 keep=0.5 how=drop similar=25"
    assert in_words(options_of(to_dict(Random(at=(3, 4), tokens=(9, 5))))) == "at=3,4 tokens=9,5"
    both = Combination(parts=(Random(at=2), ToMe(at=(4, 5), r=3)))
    assert in_words(options_of(to_dict(both))) == "random at=2 + tome at=4,5 r=3"
    assert options_of(None) == {} and options_of({"method": "of tomorrow", "x": 1}) == {"x": "1"}


def test_a_row_of_a_method_that_we_do_not_know_is_shown_all_the_same():
    odd = made(TNT(at=3), "odd")
    odd = replace(odd, setting=replace(odd.setting, config={"version": 9, "method": "odd", "at": [1]}))
    assert line_names(grouped([made(), odd])) == ["odd"]

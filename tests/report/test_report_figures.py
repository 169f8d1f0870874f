from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from made_rows import made, sweep
from tntprune.errors import UserError
from tntprune.methods import TNT, TopK
from tntprune.report import figures
from tntprune.report.figures import curve, described_curves, draw_curves
from tntprune.report.groups import grouped, line_names
from tntprune.report.plot_style import looks


@pytest.fixture
def drawn(monkeypatch):
    """The figures themselves, in the order in which they are drawn."""
    found = []
    monkeypatch.setattr(figures, "finished", lambda figure, form: found.append(figure) or b"")
    return found


def curves(rows, scheme, styles=None, narrow=False):
    """Draw rows that can all be compared."""
    (group,) = grouped(rows)
    return draw_curves(group.backbones, scheme, "png", styles or looks(line_names([group])), narrow)


def test_a_curve_is_a_picture_in_either_form():
    lines = {"a": [(2.0, 50.0), (1.0, 40.0)], "b": [(1.0, 30.0)]}
    assert Image.open(io.BytesIO(curve(lines, (3.0, 60.0), "cost", "right", "png"))).format == "PNG"
    assert b"<svg" in curve(lines, (3.0, 60.0), "cost", "right", "svg")


@pytest.mark.parametrize("narrow", [False, True])
def test_every_point_is_drawn_at_its_place(drawn, narrow):
    rows = sweep("a") + sweep("b")
    curves(rows, "multi", narrow=narrow)
    axes = drawn[0].axes
    places = [0, 2, 1, 3] if narrow else [0, 1, 2, 3]  # wide: two rows of two backbones
    upper, lower = [axes[n] for n in places[:2]], [axes[n] for n in places[2:]]
    (group,) = grouped(rows)
    for above, below, backbone in zip(upper, lower, group.backbones, strict=True):
        assert above.get_title() == backbone.label
        assert (above.get_xlabel(), below.get_xlabel()) == ("GMACs", "times as fast as the unpruned model")
        for axis, cost in ((above, lambda row: row.macs / 1e9), (below, lambda row: row.speedup)):
            found = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
            assert found["unpruned"] == [[cost(backbone.base), 80.0]]
            for name, line in backbone.lines("multi").items():
                assert found[name] == [[cost(row), row.top1] for row in line]
            assert any(line.get_ydata() == [80.0, 80.0] for line in axis.lines)
    assert {text.get_text() for text in drawn[0].legends[0].get_texts()} == {
        "unpruned", "TNT", "Top-K", "random <drop>", "ToMe",
    }  # fmt: skip


def test_a_method_timed_in_another_run_does_not_look_faster(drawn):
    """Two methods with the same paired speed-up: one was timed while the whole machine was slower."""
    quiet = made(TNT(at=3, keep=0.5), "TNT", 700, 0.6)
    slow = made(TopK(at=3, keep=0.5), "Top-K", 700, 0.6)
    rows = [made(), replace(quiet, images_per_s=27.8, speedup=1.9), replace(slow, images_per_s=18.5, speedup=1.9)]
    curves(rows, "single")
    found = {line.get_label(): line.get_xydata().tolist() for line in drawn[0].axes[1].lines}
    assert found["TNT"] == found["Top-K"] == [[1.9, 70.0]] and found["unpruned"] == [[1.0, 80.0]]


def test_a_name_looks_the_same_in_every_figure(drawn):
    rows = sweep()
    styles = looks(["ToMe", "TNT", "Top-K", "random <drop>"])
    for scheme in ("single", "multi"):
        curves(rows, scheme, styles=styles)
    for figure in drawn:
        for line in figure.axes[0].lines:
            if line.get_label() in styles:
                look = styles[line.get_label()]
                assert (line.get_color(), line.get_marker()) == (look.colour, look.shape)


def test_where_speed_was_not_measured_the_figure_says_so(drawn):
    curves(sweep(speed=None), "single")
    assert [text.get_text() for text in drawn[0].axes[1].texts] == ["speed was not measured"]
    assert not drawn[0].axes[0].texts
    some = [*sweep()[:-4], made(TNT(at=3, keep=0.1), "TNT", 500, 0.3, speed=None)]
    curves(some, "single")
    assert drawn[1].axes[1].get_title() == "1 of 13 settings have no speed"


def test_what_cannot_be_compared_is_not_in_one_figure():
    assert len(grouped(sweep() + sweep(precision="bf16"))) == 2
    with pytest.raises(UserError, match="unpruned"):
        curves(sweep()[1:], "single")


def test_many_backbones_are_wider_and_a_phone_gets_one_column(drawn):
    for count in (1, 3):
        rows = [row for name in "abc"[:count] for row in sweep(name)]
        for narrow in (False, True):
            curves(rows, "single", narrow=narrow)
    wide, tall, wider, taller = (figure.get_size_inches() for figure in drawn)
    assert wider[0] > wide[0] > tall[0] == taller[0] and taller[1] > 2.5 * tall[1]


def test_the_words_for_those_who_cannot_see_it_name_every_line():
    words = described_curves(grouped(sweep())[0].backbones, "multi")
    assert "unpruned 80.0 %" in words and "ToMe from 79.0 % at 9.20 to 72.0 % at 3.60 GMACs" in words

from __future__ import annotations

import sys
from itertools import combinations

import pytest

from tntprune.errors import UserError
from tntprune.report.plot_style import COLOURS, blank, finished, looks


def luminance(colour):
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = ((part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4) for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_no_two_of_many_methods_look_alike():
    found = looks([f"method {n}" for n in range(28)])
    assert len({(look.colour, str(look.dash)) for look in found.values()}) == 28
    few = list(found.values())[:14]
    assert len({(look.shape, look.filled) for look in few}) == 14  # told apart without colour too
    for one, other in combinations(few, 2):
        assert one.colour != other.colour or (one.shape != other.shape and one.dash != other.dash)
    for one, other in zip(few, few[1:], strict=False):
        assert one.dash != other.dash and one.colour != other.colour


def test_every_colour_shows_on_white():
    assert len(set(COLOURS)) == len(COLOURS) == 7
    for colour in COLOURS:
        assert 1.05 / (luminance(colour) + 0.05) > 2, colour


def test_a_look_depends_on_the_place_only():
    assert looks("abc")["c"] == looks(["x", "y", "z"])["z"] and list(looks("aab")) == ["a", "b"]


@pytest.mark.parametrize(("form", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_figure_is_drawn_in_each_form(form, begins):
    figure = blank(2, 1)
    figure.subplots().plot([0, 1], [0, 1])
    assert finished(figure, form).startswith(begins)


def test_the_same_figure_gives_the_same_bytes():
    def drawn(form):
        figure = blank(2, 1)
        figure.subplots().plot([0, 1], [0, 1], "o-", label="a")
        return finished(figure, form)

    assert drawn("svg") == drawn("svg") and drawn("png") == drawn("png")


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'tntprune\[plot\]'"):
        blank(1, 1)

from __future__ import annotations

import re
from datetime import date

import torch

from tntprune.report import Table, page, picture
from tntprune.system.environment import processor, stamp


def test_what_is_given_is_shown_and_never_run():
    made = page("<b>title</b>", "a & b", [("<i>", Table(["<x>"], [["<script>"]]).html())], "foot <a>")
    for raw in ("<b>title", "<i>", "<script>", "<a>"):
        assert raw not in made
    assert "&lt;script&gt;" in made and "a &amp; b" in made and made.startswith("<!doctype html>")


def test_the_best_cell_of_a_row_is_bold_and_none_where_none_is():
    made = Table(["a", "b"], [["1", "2"], ["3", "4"]], best=[[1], []]).html()
    assert re.findall(r"<td class=best>(\d)", made) == ["2"]
    assert "class=best" not in Table(["a"], [["1"]]).html()


def test_pictures_lie_in_the_page_itself():
    assert 'src="data:image/png;base64,' in picture(b"1", "one")
    assert 'src="data:image/svg+xml;base64,' in picture(b"<svg/>", 'say "two"', "svg")
    assert "&#34;two&#34;" in picture(b"<svg/>", 'say "two"', "svg")


def test_a_stamp_names_hardware_versions_and_date():
    made = stamp()
    assert processor() in made and torch.__version__.split("+")[0] in made and date.today().isoformat() in made
    assert f"{torch.get_num_threads()} thread" in made

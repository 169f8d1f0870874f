from __future__ import annotations

import io
import json
import re

import pytest
from PIL import Image

from made_rows import made, sweep
from tntprune.cli.main import main
from tntprune.errors import UserError
from tntprune.methods import TNT
from tntprune.report.build import LARGEST, build, figures


def png(width=40, height=30, noise=False):
    out = io.BytesIO()
    image = Image.effect_noise((width, height), 90).convert("RGB") if noise else Image.new("RGB", (width, height))
    image.save(out, "PNG")
    return out.getvalue()


def write_rows(path, rows):
    path.write_text("".join(row.to_json() + "\n" for row in rows))
    return path


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are not drawn: what a page says does not depend on them."""
    monkeypatch.setattr("tntprune.report.build.draw_curves", lambda *_: b"<svg/>")


@pytest.fixture(scope="module")
def page():
    return build(sweep(), "A <title>", "a & b", maps=[("blocks <1>", png())], extra_sections=[("Extra", "<p>more</p>")])


def test_a_page_needs_nothing_from_elsewhere(page):
    assert set(re.findall(r"(?:src|srcset|href)=.(data:image/\w+|#)", page)) == {
        "data:image/svg",
        "data:image/png",
        "#",
    }
    assert not re.search(r"(?:src|srcset|href)=(?![\"'](?:data:|#))", page)
    assert not re.search(r"https?://|@import|url\(|<script|<link", page)


def test_what_is_given_is_shown_and_never_run(page):
    for raw in ("<title>A <title>", "<drop>", "<here>", "<processor>", "blocks <1>"):
        assert raw not in page
    assert "random &lt;drop&gt;" in page and "a &amp; b" in page and "<p>more</p>" in page


def test_a_page_says_what_was_measured_and_how(page):
    headings = re.findall(r"<h2[^>]*>([^<]*)", page)
    assert headings == [
        "Summary", "Extra", "Accuracy over cost", "Methods at equal cost", "Every setting", "Token maps",
        "How this was measured",
    ]  # fmt: skip
    for words in ("2026-01-02", "torch 2", "none; every image could be read", "14.0 minutes for 28 rows", "median"):
        assert words in page
    assert page.count("<figure>") == page.count("<figcaption>") == page.count("<img alt=") == 3
    for row in sweep():
        assert row.setting.key in page


@pytest.mark.wide
def test_five_hundred_rows_make_a_page_that_can_be_mailed():
    rows = [row for model in "abc" for row in sweep(model, keeps=tuple(n / 30 for n in range(1, 30)))]
    assert len(rows) > 500
    made_ = build(rows, "many")
    assert len(made_.encode()) < LARGEST and made_.count("<picture>") == 2


def test_a_map_that_is_large_is_made_smaller_and_one_that_is_none_is_refused():
    large = png(2400, 1200, noise=True)
    assert len(large) > 2_000_000
    made_ = build([made()], "maps", maps=[("one", large)])
    assert len(made_) < len(large) and "data:image/webp" in made_
    with pytest.raises(UserError, match=r"one: no picture that can be read.*PNG"):
        build([made()], "maps", maps=[("one", b"nothing")])
    with pytest.raises(UserError, match=r"the page would have .* MB; expected at most 5.*maps \(30\)"):
        build([made()], "maps", maps=[("one", png(400, 300, noise=True))] * 30)


def test_rows_that_cannot_be_compared_are_apart_and_the_page_says_so(undrawn):
    page = build(sweep() + sweep(precision="bf16"), "mixed")
    assert "These rows are of 2 kinds, shown apart because they cannot be compared" in page
    assert page.count("<figure>") == 4 and len(re.findall("<h2[^>]*>Every setting on 1,000 images", page)) == 2
    assert [name for name, _ in figures(sweep() + sweep(precision="bf16"))] == [
        "curves-single-data1", "curves-multi-data1", "curves-single-data2", "curves-multi-data2",
    ]  # fmt: skip


def test_speeds_of_two_machines_are_not_compared_without_a_word(undrawn):
    from dataclasses import replace

    rows = sweep()[:5]
    assert "Speed-ups come from" not in build(rows, "one")
    rows[-1] = replace(rows[-1], about={"hardware": "another"})
    assert "Speed-ups come from 2 machines (a &lt;processor&gt;; another)" in build(rows, "two")


def test_an_unpruned_model_alone_is_a_page_too():
    page = build([made()], "alone")
    assert "The unpruned models" in page and "<figure>" not in page


def test_the_command_writes_page_and_figures(tmp_path, capsys, undrawn):
    first, second = write_rows(tmp_path / "a.jsonl", sweep("a")), write_rows(tmp_path / "b.jsonl", sweep("b"))
    with first.open("a") as file:
        file.write(made(TNT(at=3, keep=0.8), "TNT", 1, 0.86, model="a").to_json() + "\n")  # the last of a key counts
        file.write('{"key": "torn')
    (tmp_path / "my_maps.png").write_bytes(png())
    arguments = [first, second, "--out", tmp_path / "new" / "r.html", "--figures", tmp_path / "figures"]
    assert main(["report", *map(str, arguments), "--maps", str(tmp_path / "my_maps.png"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == 56 and told["report"] == str(tmp_path / "new" / "r.html")
    written = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert written == ["curves-multi.png", "curves-multi.svg", "curves-single.png", "curves-single.svg"]
    assert sorted(told["figures"]) == [str(tmp_path / "figures" / name) for name in written]
    page = (tmp_path / "new" / "r.html").read_text()
    assert "<figcaption>my maps</figcaption>" in page and ">0.10<" in page


def test_a_speed_is_not_lost_to_the_same_row_without_one(tmp_path, undrawn):
    files = [write_rows(tmp_path / f"{speed}.jsonl", sweep(speed=speed)) for speed in (50.0, None)]
    for order in (files, files[::-1]):
        assert main(["report", *map(str, order), "--out", str(tmp_path / "r.html")]) == 0
        assert "Speed is that of the forward pass" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("lines", "options", "code", "words"),
    [
        (None, [], 1, "no such file"),
        ("", [], 1, "no row in it"),
        ("not rows\n", [], 1, "line 1 is not a row of results"),
        ("".join(row.to_json() + "\n" for row in sweep()[1:]), [], 1, "no row of the unpruned vit_tiny"),
        ("x", ["--photos", "a.jpg"], 2, "need --photos, --model and --reducer"),
        ("".join(row.to_json() + "\n" for row in sweep()[:2]), ["--maps", "no.png"], 1, "no.png: cannot be read"),
        ("".join(row.to_json() + "\n" for row in sweep()[:2]), ["--maps", "/dev/zero"], 1, "/dev/zero: not a file"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, lines, options, code, words):
    path = tmp_path / "results.jsonl"
    if lines is not None:
        path.write_text(lines)
    assert main(["report", str(path), "--out", str(tmp_path / "r.html"), *options]) == code
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("options", [{}, {"noise_blocks": (1, 2, 3)}], ids=["one", "several"])
def test_token_maps_are_made_of_the_blocks_that_were_trained_for(tmp_path, monkeypatch, undrawn, options):
    import timm

    from tntprune import reduce_, save

    model = timm.create_model("test_vit", num_classes=7).eval()
    loaded = timm.create_model("test_vit", num_classes=7).eval()
    monkeypatch.setattr("tntprune.cli.flags.HostFlags.load", lambda *_: loaded)
    monkeypatch.setattr("tntprune.cli.report.BLOCKS", (1, 2, 3))
    save(reduce_(model, TNT(at=3, keep=0.5, **options)), tmp_path / "run")
    for name in ("one.png", "two.png"):
        (tmp_path / name).write_bytes(png(80, 60, noise=True))
    path = write_rows(tmp_path / "r.jsonl", sweep())
    assert main(
        ["report", str(path), "--out", str(tmp_path / "r.html"), "--model", "test_vit", "--reducer",
         str(tmp_path / "run"), "--photos", str(tmp_path / "one.png"), str(tmp_path / "two.png")]
    ) == 0  # fmt: skip
    page = (tmp_path / "r.html").read_text()
    assert "half of the tokens go after one block" in page and page.count("<figure>") == 3

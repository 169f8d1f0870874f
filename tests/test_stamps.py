"""Measured pages whose code changed are named, with the command that measures them again."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def stamps():
    spec = importlib.util.spec_from_file_location("stamps", ROOT / "benchmarks" / "stamps.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["stamps"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def test_every_page_was_measured_with_the_code_as_it_is_or_says_why_not(stamps):
    if told := stamps.stale():
        pytest.fail("\n".join(told.values()), pytrace=False)


def test_every_page_that_a_benchmark_writes_has_a_stamp(stamps):
    for script in (ROOT / "benchmarks").glob("*.py"):
        for word in script.read_text().replace('"', " ").replace("`", " ").split():
            if word.startswith("docs/") and word.rstrip(".,:)").endswith(".md") and script.name != "stamps.py":
                assert word.rstrip(".,:)").removeprefix("docs/") in stamps.PAGES, f"{script.name} writes {word}"
    for name, page in stamps.PAGES.items():
        assert (ROOT / "docs" / name).is_file() and all((ROOT / "benchmarks" / s).is_file() for s in page.scripts)
    kept = json.loads(stamps.STAMPS.read_text())
    assert set(kept) == set(stamps.PAGES) and all(one["why"] and one["date"] for one in kept.values())


BEFORE = '''"""A module."""
import math
from a import b
LIMIT = 0.5  # of something
class C:
    """What it is."""
    size: int = option(3, "help that the command line prints", learned=True)
def f(x: int) -> int:
    """Double it."""
    check(x > 0, f"x={x}: expected more")
    if x > 9:
        raise UserError(f"too many: {x}")
    return x * 2
'''


def test_what_no_figure_depends_on_leaves_the_digest(stamps):
    same = (
        BEFORE.replace("Double it.", "Return twice the value.").replace("A module.", "Another text."),
        BEFORE.replace("  # of something", "")
        .replace("import math\n", "")
        .replace("from a import b", "from c.d import b"),
        BEFORE.replace("x: int) -> int", "x: float) -> float").replace("    size: int =", "    size: int | None ="),
        BEFORE.replace("expected more", "expected a positive number").replace("too many: {x}", "{x} is too many"),
        BEFORE.replace("help that the command line prints", "other help"),
    )
    for text in same:
        assert stamps.definitions([text]) == stamps.definitions([BEFORE]), text
    first, second = BEFORE.split("def f")
    assert stamps.definitions([first, "def f" + second]) == stamps.definitions([BEFORE])  # in two files


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * 2", "x * 3"), ("LIMIT = 0.5", "LIMIT = 0.6"), ("x > 9", "x >= 9"), ("option(3", "option(4"),
        ("learned=True", "learned=False"), ("x > 0", "x >= 0"), ("UserError(", "ValueError("), ("def f", "def g"),
    ],
)  # fmt: skip
def test_what_the_code_does_is_in_the_digest(stamps, old, new):
    assert stamps.definitions([BEFORE.replace(old, new)]) != stamps.definitions([BEFORE])


def test_a_change_is_told_in_one_line_and_a_reason_is_kept(stamps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stamps, "STAMPS", tmp_path / "stamps.json")
    kept = {name: {"digest": stamps.digest(name), "date": "2026-01-01", "why": "measured"} for name in stamps.PAGES}
    kept["results/dense.md"]["digest"] = "0"
    stamps.STAMPS.write_text(json.dumps(kept))
    (told,) = stamps.stale().values()
    assert (
        "docs/results/dense.md: its code changed" in told
        and "python benchmarks/dense.py --weights" in told
        and "\n" not in told
    )
    with pytest.raises(SystemExit, match="--accept needs --why"):
        stamps.main(accept=("results/dense.md",))
    with pytest.raises(SystemExit, match=r"nothing\.md: no such page"):
        stamps.main(accept=("nothing.md",), why="x")
    stamps.main(accept=("all",), why="only renamed")
    assert json.loads(stamps.STAMPS.read_text())["results/dense.md"]["why"] == "only renamed" and not stamps.stale()
    assert "every page" in capsys.readouterr().out


def test_code_that_was_moved_away_is_named(stamps, monkeypatch):
    monkeypatch.setitem(stamps.CODE, "filling", ("nowhere.py",))
    with pytest.raises(FileNotFoundError, match=r"src/tntprune/nowhere\.py: gone; say in benchmarks/stamps\.py"):
        stamps.digest("results/dense.md")

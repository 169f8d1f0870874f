"""A line of a results file is a row with values that a measurement can have, or it is refused in one line."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest

from made_rows import made, sweep
from tntprune.cli.main import main
from tntprune.methods import TNT
from tntprune.sweep.results import ResultRow

WRONG = {  # values that are none of the field's
    "text": [None, 3, True, [], {}, ["a"]],
    "whole": [None, "3", -1, 1.5, True, [], {}, 10**400, float("nan"), float("inf")],
    "amount": ["3", -1.0, True, [], {}, float("nan"), float("inf"), 10**400],
    "tokens": [None, 3, "196", {}, ["196"], [None], [float("nan")], [[196]]],
    "dict": [3, "a", [], True, ["a"], {}],
    "size": [3, "224", [224], [224, 0], [224.0, 224.0], ["224", "224"], {}],
    "config": [3, "tnt", [], {"method": 3}, {"method": "tnt", "at": "3"}, {"at": [[3]]}, {"at": -1}, {"parts": 3}],
    "about": [
        3, "a", [], {"hardware": 3}, {"hardware": ["a"]}, {"versions": 3}, {"date": 3}, {"seconds": "3"}, {"speed": 3},
        {"speed": {"hardware": []}}, {"seconds": float("nan")},
    ],
}  # fmt: skip
FIELDS = {
    "name": "text", "scheme": "text", "command": "text", "images": "whole", "skipped": "whole", "right": "whole",
    "right5": "whole", "agreeing": "whole", "macs": "whole", "base_macs": "whole", "tokens": "tokens",
    "images_per_s": "amount", "speedup": "amount", "peak_mib": "amount", "busy": "amount", "about": "about",
    "setting": "dict", "setting.model": "text", "setting.weights": "text", "setting.data": "text",
    "setting.precision": "text", "setting.images": "whole", "setting.batch_size": "whole", "setting.img_size": "size",
    "setting.config": "config",
}  # fmt: skip
CASES = [(name, value) for name, kind in FIELDS.items() for value in WRONG[kind]]


def broken(name, value):
    data = {"key": "0", **asdict(made(TNT(at=3, keep=0.5), "TNT", 700, 0.6))}
    *above, last = name.split(".")
    inner = data[above[0]] if above else data
    inner[last] = value
    return json.dumps(data)


def test_a_row_of_wrong_type_is_refused_and_the_field_named():
    assert len(CASES) > 150
    for name, value in CASES:
        with pytest.raises(ValueError, match=r"row of results|expected") as told:
            ResultRow.from_json(broken(name, value))
        assert name.split(".")[-1] in str(told.value) or "setting" in name, (name, value)
        assert len(str(told.value)) < 200


@pytest.mark.parametrize(
    "line", ["[" * 100_000, "3", "[]", "null", "{", '{"setting": {}}', broken("right", 2000), broken("images", 0)]
)
def test_other_lines_are_refused(line):
    with pytest.raises(ValueError, match=r"."):
        ResultRow.from_json(line)


def test_a_report_of_a_broken_row_is_one_line(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    good = "".join(row.to_json() + "\n" for row in sweep()[:3])
    for name, value in CASES[:: len(CASES) // 20]:
        path.write_text(good + broken(name, value) + "\n")
        assert main(["report", str(path), "--out", str(tmp_path / "r.html")]) == 1
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "line 4 is not a row of results" in told, told


def test_what_is_written_is_read_again():
    for row in [*sweep(), made(img_size=(64, 32))]:
        assert ResultRow.from_json(row.to_json()).to_json() == row.to_json()


ODD = ("a$b$c", "$\\frac$", "x_{", "line\nbreak", os.fsdecode(b"\xff\xfe"), "\\$", "%s")


def test_names_are_drawn_as_they_are(tmp_path):
    rows = [made(), *(made(TNT(at=3, keep=0.1 + n / 10), f"TNT {name}", 700, 0.6) for n, name in enumerate(ODD))]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(row.to_json() + "\n" for row in rows))
    out = tmp_path / "r.html"
    assert main(["report", str(path), "--out", str(out), "--figures", str(tmp_path / "f")]) == 0
    assert out.read_bytes().decode() and (tmp_path / "f" / "curves-single.png").is_file()

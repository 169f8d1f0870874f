"""Names of files may hold anything; what is printed of them is text on one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from tntprune.cli.main import main
from tntprune.system.messages import one_line, printable

NAMES = {
    b"two\nlines.png": r"two\nlines.png",
    b"red \x1b[31m\x07.png": r"red \x1b[31m\x07.png",
    b"latin \xe9.png": r"latin \udce9.png",
    "right \u202eto left.png".encode(): r"right \u202eto left.png",
    "grüße 漢字.png".encode(): "grüße 漢字.png",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_text(tmp_path, capsys, name):
    for digit in range(10):
        (tmp_path / str(digit)).mkdir()
        Image.new("L", (32, 32)).save(tmp_path / str(digit) / "a.png")
    bad = tmp_path / "3" / os.fsdecode(name)
    bad.write_bytes(b"no image")
    command = f"eval digits_vit --data {tmp_path} --workers 0"
    assert main(command.split()) == 1
    error = capsys.readouterr().err
    last = error.split("\n")[-2]
    assert last.startswith("tntprune: ") and ".png: not an image" in last and last.isprintable()
    assert main([*command.split(), "--on-bad-image", "skip"]) == 3
    out, error = capsys.readouterr()
    line = next(line for line in error.splitlines() if line.startswith("skipped"))
    assert NAMES[name] in line and line.isprintable() and "1 skipped" in out


def test_the_results_too_and_their_lines_stay(tmp_path, capsys):
    Image.new("L", (32, 32)).save(tmp_path / "a.png")
    out = tmp_path / "red \x1b[31m \x07.png"
    assert (
        main(["show", "digits_vit", str(tmp_path / "a.png"), "--method", "topk", "--at", "2", "--out", str(out)]) == 0
    )
    told = capsys.readouterr().out
    assert told == f"1 photo: {tmp_path}/red \\x1b[31m \\x07.png\n" and out.is_file()


def test_long_messages_lose_their_middle():
    assert one_line("a" * 400 + "\n") == "a" * 400 + r"\n" and printable("x" * 5000) == "x" * 5000
    assert len(one_line("a" * 5000 + "end")) < 1020 and one_line("a" * 5000 + "end").endswith("end")


def test_other_folders_hold_such_names(tmp_path):
    (tmp_path / os.fsdecode(b"a\xff")).mkdir()
    path = tmp_path / os.fsdecode(b"a\xff") / "b.png"
    Image.new("L", (3, 3)).save(path)
    from tntprune.backbones.digits_vit import digits_vit
    from tntprune.data.folders import all_photos
    from tntprune.data.loading import Photos, in_order
    from tntprune.data.transforms import transform_for

    photos = Photos(all_photos(Path(tmp_path)), transform_for(digits_vit()), "L")
    assert [len(batch.images) for batch in in_order(photos, 4, 1)] == [1]

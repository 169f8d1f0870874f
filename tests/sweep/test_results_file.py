from __future__ import annotations

import errno
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from tntprune.errors import UserError
from tntprune.sweep.results import ResultRow, Setting
from tntprune.sweep.results_file import ResultsFile

processes = multiprocessing.get_context("fork")  # nothing here has run anything that a fork would break


def row(number, right=7, **more):
    setting = Setting("test_vit", "hub", {"method": "random", "keep": number / 100}, None, "data", 10)
    return ResultRow(setting, "random drop", "single", 10, 0, right, 9, 8, 100, 200, [5.0, 2.5], **more)


@pytest.fixture
def results(tmp_path):
    return ResultsFile(tmp_path / "results.jsonl")


def fill(results, *rows):
    for one in rows:
        results.add(one)
    return results


def test_what_is_added_is_there_in_its_order(results):
    assert results.rows() == {}
    rows = [row(3), row(1), row(2)]
    fill(results, *rows)
    assert list(results.rows().values()) == rows
    assert [json.loads(line)["key"] for line in results.path.read_text().splitlines()] == list(results.rows())


def test_of_a_setting_the_last_line_counts_in_the_place_of_the_first(results):
    fill(results, row(1), row(2), row(1, images_per_s=50.0))
    assert list(results.rows().values()) == [row(1, images_per_s=50.0), row(2)]
    assert len(results.path.read_text().splitlines()) == 3  # nothing is rewritten


WHOLE = b"".join(row(number).to_json().encode() + b"\n" for number in range(3))
ENDS = [place + 1 for place, byte in enumerate(WHOLE) if byte == 10]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, len(WHOLE)), zeros=st.sampled_from([0, 1, 100]))
def test_cut_anywhere_nothing_finished_is_lost_and_nothing_is_there_twice(tmp_path_factory, cut, zeros):
    results = ResultsFile(tmp_path_factory.mktemp("cut") / "results.jsonl")
    results.path.write_bytes(WHOLE[:cut] + b"\0" * zeros)
    finished = sum(end <= cut for end in ENDS)
    assert list(results.rows().values()) == [row(number) for number in range(finished)]
    for number in range(3):
        if row(number).setting.key not in results.rows():
            results.add(row(number))
    results.prepare()
    assert results.path.read_bytes() == WHOLE


def test_cut_at_every_single_byte(tmp_path):
    results = ResultsFile(tmp_path / "results.jsonl")
    for cut in range(ENDS[1], len(WHOLE) + 1):
        results.path.write_bytes(WHOLE[:cut])
        results.prepare()
        assert results.path.read_bytes() == WHOLE[: max([0, *(end for end in ENDS if end <= cut)])]


def test_a_long_line_that_was_cut_is_cut_off_whole(results):
    fill(results, row(1))
    before = results.path.read_bytes()
    long = row(2, about={"note": "x" * 300_000}).to_json().encode()
    results.path.write_bytes(before + long[:-5])
    fill(results, row(3))
    assert list(results.rows().values()) == [row(1), row(3)]


def test_zeros_and_the_end_of_a_line_are_what_a_power_cut_leaves(results):
    fill(results, row(1))
    with open(results.path, "ab") as file:
        file.write(b"\0" * 500 + b"3}\n")
    assert list(results.rows().values()) == [row(1)]
    fill(results, row(2))
    assert list(results.rows().values()) == [row(1), row(2)]


@pytest.mark.parametrize("broken", [b"{}\n", b"[1]\n", b"\xff\n", b'{"key": "0"\n', b"\n", b"nonsense\n"])
def test_a_broken_line_in_the_middle_is_named(results, broken):
    fill(results, row(1))
    first = results.path.read_bytes()
    results.path.write_bytes(first + broken + first)
    with pytest.raises(UserError) as caught:
        results.rows()
    assert f"{results.path}: line 2 is not a row of results" in str(caught.value) and "\n" not in str(caught.value)
    assert results.path.read_bytes() == first + broken + first


@pytest.mark.parametrize("text", [b"a diary", b"a diary\n", b"name,top1\nTNT,72", b"{}"])
def test_another_kind_of_file_is_left_as_it_is(results, text):
    results.path.write_bytes(text)
    with pytest.raises(UserError, match=r"results\.jsonl: (line 1 is not a row|line 2 is not a row)"):
        results.rows()
    if not text.endswith(b"\n"):
        with pytest.raises(UserError, match="ends in"):
            results.add(row(1))
        assert results.path.read_bytes() == text


@pytest.mark.parametrize(
    "data", [b"\x88\x02\0\0\0\0\0\0{weights}\0\0", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"a diary\n\0\0"]
)
def test_a_file_that_is_no_text_is_left_as_it_is(results, data):
    """Weights or a picture given as --out by mistake."""
    results.path.write_bytes(data)
    with pytest.raises(UserError, match=r"line 1 is not a row"):
        results.prepare()
    assert results.path.read_bytes() == data


def test_several_processes_write_at_once(results):
    everyone = [processes.Process(target=write_many, args=(results.path, number)) for number in range(3)]
    for process in everyone:
        process.start()
    for process in everyone:
        process.join()
    assert all(process.exitcode == 0 for process in everyone)
    lines = results.path.read_text().splitlines()
    assert len(lines) == 90 and {len(json.loads(line)["about"]["note"]) for line in lines} == {5000}
    assert {one.setting.key for one in results.rows().values()} == {row(number).setting.key for number in range(90)}


def write_many(path, number):
    for turn in range(30):
        ResultsFile(path).add(row(30 * number + turn, about={"note": "x" * 5000}))


def test_a_writer_waits_for_another(results):
    fill(results, row(1))
    with FileLock(results.path.with_name(".results.jsonl.lock")):
        process = processes.Process(target=fill, args=(results, row(2)))
        process.start()
        process.join(0.3)
        assert process.is_alive() and results.path.read_text().count("\n") == 1
    process.join(10)
    assert list(results.rows().values()) == [row(1), row(2)]


def test_a_reader_leaves_no_lock(results):
    results.path.write_bytes(WHOLE)
    assert len(results.rows()) == 3
    assert list(results.path.parent.iterdir()) == [results.path]


@pytest.mark.parametrize("moment", ["write", "half", "fsync"])
def test_a_full_disk_loses_nothing(results, monkeypatch, moment):
    fill(results, row(1), row(2))
    before = results.path.read_bytes()
    write, full = os.write, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing(file, *data):
        if moment == "half":
            return write(file, data[0][: len(data[0]) // 2])
        raise full

    monkeypatch.setattr(os, "fsync" if moment == "fsync" else "write", failing)
    with pytest.raises(UserError, match=r"No space left on device\); nothing that was there is lost"):
        results.add(row(3))
    monkeypatch.undo()
    assert results.path.read_bytes() == before
    assert list(fill(results, row(3)).rows().values()) == [row(1), row(2), row(3)]


def test_where_it_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="cannot be opened"):
        ResultsFile(tmp_path / "nowhere" / "results.jsonl").prepare()
    with pytest.raises(UserError, match="a folder"):
        ResultsFile(tmp_path).prepare()
    with pytest.raises(UserError, match="a folder"):
        ResultsFile(tmp_path).rows()


def test_a_disk_without_locks_is_told(results, monkeypatch):
    import fcntl

    def refuse(file, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="cannot be locked"):
        results.add(row(1))


def test_numbers_come_back_as_they_were(results):
    odd = replace(row(1), images_per_s=1 / 3, tokens=[196.0, 0.1 + 0.2], about={"seconds": 1e-9, "note": "naïve\r\n "})
    assert list(fill(results, odd).rows().values()) == [odd]
    assert Path(results.path).read_bytes().count(b"\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="there are no named pipes")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for use in (ResultsFile(path).rows, ResultsFile(path).prepare, lambda: ResultsFile(path).add(row(1))):
        with pytest.raises(UserError, match=r"\(a device, pipe or socket\); expected the name of a file"):
            use()
    with pytest.raises(UserError, match="a device, pipe or socket"):
        ResultsFile(Path("/dev/null")).add(row(1))

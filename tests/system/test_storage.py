from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tntprune.errors import UserError
from tntprune.system.storage import make_folder, packed, read_metadata, read_weights, write

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2]), "h": torch.ones(2, dtype=torch.half)}


def refused(call, path: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    assert all(word in message for word in words), message


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor] = TENSORS) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in expected.items()
    )


@settings(max_examples=20, deadline=None)
@given(old=st.binary(max_size=50), new=st.binary(max_size=50))
def test_what_is_written_is_there_and_nothing_else(tmp_path_factory, old, new):
    folder = tmp_path_factory.mktemp("write")
    for data in (old, new):
        write(folder / "x.bin", data)
        assert (folder / "x.bin").read_bytes() == data
        assert [path.name for path in folder.iterdir()] == ["x.bin"]


def test_the_data_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    events = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: events.append("sync") or sync(number))
    monkeypatch.setattr(os, "replace", lambda a, b: events.append("replace") or replace(a, b))
    write(tmp_path / "x.bin", b"data")
    assert events == ["sync", "replace", "sync"]  # the file, its name, the folder with the name


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("old", [b"what was there", None])
def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, call, old):
    path = tmp_path / "x.bin"
    if old is not None:
        path.write_bytes(old)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    refused(lambda: write(path, b"new"), path, "No space left on device")
    monkeypatch.undo()
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if old is None else [old])


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    write(tmp_path / "x.bin", b"old")

    def interrupt(number):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x.bin", b"new")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


def test_where_nothing_can_be_written_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    for path, reason in (
        (tmp_path / "file" / "x.bin", "Not a directory"),
        (tmp_path / "missing" / "x.bin", "No such file or directory"),
        (tmp_path / "folder", "a folder"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        refused(lambda path=path: write(path, b"new"), path, reason)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_folders_are_made_with_those_above_them(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        refused(lambda path=path: make_folder(path), path, "cannot be made")


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: {"model": t},
        lambda t: {"state_dict": t, "epoch": 3},
        lambda t: {"model": {"state_dict": t}},
    ],
    ids=["bare", "model", "state_dict", "both"],
)
@pytest.mark.parametrize("suffix", ["pth", "pt", "bin"])
def test_pickled_weights_are_unwrapped(tmp_path, suffix, wrap, old_format):
    path = tmp_path / f"w.{suffix}"
    torch.save(wrap(TENSORS), path, _use_new_zipfile_serialization=not old_format)
    assert same(read_weights(path))


def test_parameters_are_weights(tmp_path):
    model = torch.nn.Linear(2, 3)
    torch.save(dict(model.named_parameters()), tmp_path / "w.pth")
    assert same(read_weights(tmp_path / "w.pth"), dict(model.named_parameters()))


def test_safetensors_come_with_their_metadata(tmp_path):
    save_file(TENSORS, tmp_path / "w.safetensors", metadata={"made by": "me"})
    assert same(read_weights(tmp_path / "w.safetensors"))
    assert read_metadata(tmp_path / "w.safetensors") == {"made by": "me"}
    save_file(TENSORS, tmp_path / "plain.safetensors")
    assert read_metadata(tmp_path / "plain.safetensors") == {}


class Trap:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self):
        return Path.touch, (self.touched,)


@pytest.mark.parametrize(
    "hide", [lambda trap: trap, lambda trap: {**TENSORS, "c": trap}, lambda trap: {"model": [trap]}]
)
@pytest.mark.parametrize("dump", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing, 2))])
@pytest.mark.parametrize("suffix", ["pth", "pt", "safetensors"])
def test_code_in_a_file_does_not_run(tmp_path, suffix, dump, hide):
    path, touched = tmp_path / f"w.{suffix}", tmp_path / "touched"
    dump(hide(Trap(touched)), path)
    refused(lambda: read_weights(path), path)
    assert not touched.exists()


def test_the_trap_is_armed(tmp_path):
    pickle.loads(pickle.dumps(Trap(tmp_path / "touched")))
    assert (tmp_path / "touched").exists()


def test_a_whole_module_is_not_loaded_and_why(tmp_path):
    torch.save(torch.nn.Linear(1, 1), tmp_path / "w.pth")
    refused(lambda: read_weights(tmp_path / "w.pth"), tmp_path / "w.pth", "could run code", "expected a .safetensors")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99])
def test_truncated_safetensors_are_refused(tmp_path, share):
    path, whole = tmp_path / "w.safetensors", save(TENSORS)
    path.write_bytes(whole[: int(share * len(whole))])
    refused(lambda: read_weights(path), path, "cannot be read")
    refused(lambda: read_metadata(path), path, "cannot be read")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(max_examples=100, deadline=None)
@given(
    form=st.sampled_from(["safetensors", "new.pth", "old.pth"]),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    end=st.integers(0, 4000),
)
def test_damaged_weights_are_read_or_refused_by_name(tmp_path_factory, form, changes, end):
    path = tmp_path_factory.getbasetemp() / f"damaged.{form}"
    if form == "safetensors":
        save_file(TENSORS, path)
    else:
        torch.save({"model": TENSORS}, path, _use_new_zipfile_serialization=form == "new.pth")
    damaged = bytearray(path.read_bytes())
    for place, value in changes:
        damaged[place % len(damaged)] = value
    path.write_bytes(damaged[:end])
    try:
        assert all(isinstance(value, torch.Tensor) for value in read_weights(path).values())
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)


@pytest.mark.parametrize("content", [b"", b"hello world", b"<html>404</html>", b"{}", b"PK\x03\x04", bytes(100)])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_other_files_are_refused(tmp_path, suffix, content):
    path = tmp_path / f"w.{suffix}"
    path.write_bytes(content)
    refused(lambda: read_weights(path), path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_is_not_finite_is_refused_by_name(tmp_path, dtype, value):
    bad = {**TENSORS, "c.bias": torch.tensor([1, value, 2], dtype=dtype)}
    save_file(bad, tmp_path / "w.safetensors")
    torch.save(bad, tmp_path / "w.pth")
    for name in ("w.safetensors", "w.pth"):
        refused(lambda name=name: read_weights(tmp_path / name), tmp_path / name, "c.bias holds NaN or infinity")


@pytest.mark.parametrize(
    "thing",
    [[torch.zeros(1)], torch.zeros(1), None, 3, "x", {}, {"a": torch.zeros(1), "b": 3}, {"model": {}}, {"model": []}],
)
def test_what_is_no_dict_of_tensors_is_refused(tmp_path, thing):
    torch.save(thing, tmp_path / "w.pth")
    refused(lambda: read_weights(tmp_path / "w.pth"), tmp_path / "w.pth", "no weights in it")


@pytest.mark.parametrize(
    "odd", [torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta"), torch.zeros(2).to(torch.float8_e4m3fn)]
)
@pytest.mark.filterwarnings("ignore:Validating sparse")
def test_odd_tensors_are_refused(tmp_path, odd):
    torch.save({"a": odd}, tmp_path / "w.pth")
    refused(lambda: read_weights(tmp_path / "w.pth"), tmp_path / "w.pth", "cannot be read")


def test_missing_files_and_folders_are_refused(tmp_path):
    refused(lambda: read_weights(tmp_path / "w.pth"), tmp_path / "w.pth", "no such file")
    refused(lambda: read_weights(tmp_path), tmp_path, "not a file")
    refused(lambda: read_metadata(tmp_path / "w.safetensors"), tmp_path / "w.safetensors", "cannot be read")
    refused(lambda: read_metadata(tmp_path), tmp_path, "cannot be read")


def test_a_file_of_the_same_content_is_the_same_byte_for_byte(tmp_path):
    """The library writes the metadata in another order each time, and results are kept under a file's hash."""
    about = {name: f"é {name}" for name in "abcdefgh"}
    assert len({packed(TENSORS, about) for _ in range(20)}) == 1
    write(tmp_path / "x.safetensors", packed(TENSORS, about))
    assert same(read_weights(tmp_path / "x.safetensors")) and read_metadata(tmp_path / "x.safetensors") == about
    write(tmp_path / "x.safetensors", packed(TENSORS))
    assert same(read_weights(tmp_path / "x.safetensors")) and read_metadata(tmp_path / "x.safetensors") == {}

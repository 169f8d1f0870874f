"""What is written: never an input, never a device or a pipe, and through links."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from PIL import Image

from tntprune import TNT, reduce_, save
from tntprune.backbones.digits_vit import digits_vit
from tntprune.cli.main import main
from tntprune.errors import UserError
from tntprune.exporters.export import export
from tntprune.sweep.results import ResultRow, Setting
from tntprune.sweep.results_file import ResultsFile
from tntprune.system.storage import alone, check_output, put, write

ODD = ["folder", "fifo", "socket", "device", "loop", "link to fifo", "link to folder"]


def odd(kind: str, path: Path) -> None:
    """Put something that is no regular file at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind.startswith("link to "):
        odd(kind.removeprefix("link to "), path.with_name(f"other-{path.name}"))
        path.symlink_to(path.with_name(f"other-{path.name}"))
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # the address of a socket has a hundred characters at most
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
        os.chdir(here)
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except OSError:
            pytest.skip("skipped: making a device is not allowed here")


def kept(path: Path):
    """What a path is, and what is in it."""
    about = path.lstat()
    content = path.read_bytes() if stat.S_ISREG(about.st_mode) else None
    return stat.S_IFMT(about.st_mode), about.st_ino, content


# The rule


@pytest.mark.parametrize("kind", ODD)
def test_only_regular_files_are_written(tmp_path, kind):
    path = tmp_path / "x.bin"
    odd(kind, path)
    before = {file.name: kept(file) for file in tmp_path.iterdir()}
    (tmp_path / "made").write_bytes(b"new")
    for call in (lambda: write(path, b"new"), lambda: check_output(path), lambda: put(tmp_path / "made", path)):
        with pytest.raises(UserError, match=f"^{path}: ") as caught:
            call()
        assert "\n" not in str(caught.value)
    (tmp_path / "made").unlink()
    assert {file.name: kept(file) for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("call", [lambda path, made: write(path, b"new"), lambda path, made: put(made, path)])
def test_links_are_followed(tmp_path, there, call):
    (tmp_path / "far").mkdir()
    target, link, made = tmp_path / "far" / "target.bin", tmp_path / "link.bin", tmp_path / "made"
    made.write_bytes(b"new")
    if there:
        target.write_bytes(b"old")
        target.chmod(0o640)
    link.symlink_to("far/target.bin")
    (tmp_path / "twice.bin").symlink_to("link.bin")
    call(tmp_path / "twice.bin", made)
    assert target.read_bytes() == b"new" and not target.is_symlink() and link.is_symlink()
    assert not there or call.__code__.co_names[0] == "put" or stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [file.name for file in (tmp_path / "far").iterdir()] == ["target.bin"]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path):
    """In a folder that everybody may write to, somebody could guess its name."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / f".x.bin.{os.getpid()}.tmp").symlink_to(victim)
    write(tmp_path / "x.bin", b"new")
    assert victim.read_bytes() == b"mine" and (tmp_path / "x.bin").read_bytes() == b"new"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["victim", "x.bin"]


def test_inputs_are_told_by_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "a").mkdir(parents=True)
    photo = tmp_path / "photos" / "a" / "1.png"
    photo.write_bytes(b"photo")
    (tmp_path / "link.png").symlink_to(photo)
    os.link(photo, tmp_path / "hard.png")
    for out in ("photos/a/1.png", "photos/../photos/a/1.png", "link.png", "hard.png", str(photo)):
        for given in (photo, "photos/a/1.png", "link.png"):
            with pytest.raises(UserError, match="is read too"):
                check_output(Path(out), [None, given])
    for out in ("photos/a/1.png", "link.png"):
        with pytest.raises(UserError, match="is read too"):
            check_output(Path(out), ["photos"])
    for out in ("photos/a/2.png", "photos/model.onnx", "photos2.png"):
        check_output(Path(out), ["photos", None, "not there"])


@pytest.mark.parametrize("name", ["a\0b", ""])
def test_names_that_are_none_are_told(name):
    with pytest.raises(UserError, match="expected"):
        check_output(Path(name))


@pytest.mark.skipif(os.geteuid() == 0, reason="skipped: root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told_before(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written into"):
        check_output(tmp_path / "new" / "x.png")


def test_a_file_above_is_told_before(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written into"):
        check_output(tmp_path / "file" / "x.png")


# The commands


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A photo, photos in class folders, weights, a run and results."""
    root = tmp_path_factory.mktemp("inputs")
    for digit in range(10):
        (root / "photos" / str(digit)).mkdir(parents=True)
        Image.new("L", (32, 32), 20 * digit).save(root / "photos" / str(digit) / "a.png")
    Image.new("L", (32, 32)).save(root / "photo.png")
    model = digits_vit()
    from tntprune.serialization.checkpoint import save_weights

    save_weights(model, root / "weights")
    save(reduce_(model, TNT(at=2, keep=0.5)), root / "run")
    for name, config in (("unpruned", None), ("Top-K", {"version": 1, "method": "topk", "at": [2], "keep": [0.5]})):
        setting = Setting("digits_vit", "hub", config, None, "d", 10)
        scheme = "unpruned" if config is None else "single"
        ResultsFile(root / "rows.jsonl").add(ResultRow(setting, name, scheme, 10, 0, 9, 10, 10, 50, 100, [16.0]))
    return root


WEIGHTS = "--weights {root}/weights/model.safetensors"
TOPK = "--method topk --at 2"
OVERWRITING = [
    "report {root}/rows.jsonl --out {root}/rows.jsonl",
    "report {root}/rows.jsonl --maps {root}/photo.png --out {root}/photo.png",
    "report {root}/rows.jsonl --maps {root}/figures/curves-single.png --figures {root}/figures",
    "show digits_vit {root}/photo.png " + TOPK + " --out {root}/photo.png",
    "show digits_vit {root}/photo.png " + TOPK + " --out {root}/link.png",
    "show digits_vit {root}/photos/0/a.png {root}/photo.png " + TOPK + " --out {root}/photos/../photo.png",
    "show digits_vit {root}/photo.png " + TOPK + " " + WEIGHTS + " --out {root}/weights-link.png",
    "show digits_vit {root}/photo.png --reducer {root}/run --out {root}/run-link.png",
    "bench digits_vit " + TOPK + " --data {root}/photos --plot {root}/photos/0/a.png",
    "export digits_vit " + TOPK + " " + WEIGHTS + " --out {root}/weights-link.onnx",
    "export digits_vit --reducer {root}/run --out {root}/run-link.onnx",
    "export digits_vit " + TOPK + " " + WEIGHTS + " --to openvino --out {root}/bin.xml",
    "sweep digits_vit --data {root}/photos " + WEIGHTS + " --out {root}/weights/model.safetensors",
    "train digits_vit --unfreeze all " + TOPK + " --data {root}/photos " + WEIGHTS + " --out {root}/weights",
    "train digits_vit --unfreeze all --reducer {root}/run --data {root}/photos --out {root}/run",
]


def told(capsys, command: str, code: int, *words: str) -> None:
    assert main(command.split()) == code
    error = capsys.readouterr().err
    assert error.startswith("tntprune: ") and error.count("\n") == 1 and all(word in error for word in words), error


def no_work(*given, **more):
    pytest.fail("the work had begun")


@pytest.fixture
def idle(monkeypatch):
    """Nothing is loaded."""
    for name in ("load_model", "random_model"):
        monkeypatch.setattr(f"tntprune.backbones.models.{name}", no_work)


@pytest.mark.parametrize("command", OVERWRITING)
def test_no_command_overwrites_its_input(inputs, tmp_path, capsys, idle, command):
    root = tmp_path / "copy"
    os.system(f"cp -r {inputs} {root}")
    (root / "figures").mkdir()
    (root / "figures" / "curves-single.png").write_bytes((root / "photo.png").read_bytes())
    (root / "link.png").symlink_to("photo.png")
    for suffix in ("png", "onnx"):
        (root / f"weights-link.{suffix}").symlink_to("weights/model.safetensors")
        (root / f"run-link.{suffix}").symlink_to("run/reducer.safetensors")
    (root / "bin.bin").symlink_to("weights/model.safetensors")
    before = {file: kept(file) for file in root.rglob("*")}
    told(capsys, command.format(root=root), 1, "read too")
    assert {file: kept(file) for file in root.rglob("*")} == before


WRITING = {
    "report {root}/rows.jsonl --out {out}": "out.html",
    "report {root}/rows.jsonl --figures {out.parent}": "curves-single.png",
    "show digits_vit {root}/photo.png " + TOPK + " --out {out}": "out.png",
    "bench digits_vit " + TOPK + " --plot {out}": "out.png",
    "export digits_vit --out {out}": "out.onnx",
    "export digits_vit --out {out.parent}/out.onnx": "out.onnx.json",
    "export digits_vit --to openvino --out {out.parent}/out.xml": "out.bin",
    "sweep digits_vit --data {root}/photos --out {out}": "out.jsonl",
    "search digits_vit --data {root}/photos --macs 0.5 --out {out.parent}/new.json --curve {out}": "curve.json",
    "push digits_vit --reducer {out.parent} --card-only": "README.md",
    "demo --out {out.parent}": "report.html",
    "train digits_vit --data {root}/photos --out {out.parent}": "reducer.safetensors",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[] if one in ("folder", "link to fifo") else pytest.mark.wide) for one in ODD]
)
@pytest.mark.parametrize("command", WRITING)
def test_no_command_replaces_what_is_no_file(inputs, tmp_path, capsys, idle, kind, command):
    out = tmp_path / "made" / WRITING[command]
    if WRITING[command] == "reducer.safetensors" and kind in ("folder", "link to folder"):
        pytest.skip("skipped: such a run is told in other words")
    odd(kind, out)
    before = {file: kept(file) for file in tmp_path.rglob("*")}
    assert main(command.format(root=inputs, out=out).split()) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("tntprune: ") and error.count("\n") == 1, error
    assert {file: kept(file) for file in tmp_path.rglob("*")} == before


def test_a_picture_beside_a_plan_is_not_overwritten(inputs, tmp_path, capsys, idle):
    (tmp_path / "plan.png").write_bytes(b"mine")
    told(capsys, f"search digits_vit --data {inputs}/photos --macs 0.5 --out {tmp_path}/plan.json", 2, "plan.png")
    assert (tmp_path / "plan.png").read_bytes() == b"mine"


def test_a_report_goes_through_a_link(inputs, tmp_path, capsys):
    (tmp_path / "far").mkdir()
    (tmp_path / "report.html").symlink_to("far/page.html")
    assert main(f"report {inputs}/rows.jsonl --out {tmp_path}/report.html".split()) == 0
    assert (tmp_path / "far" / "page.html").read_text().startswith("<!") and (tmp_path / "report.html").is_symlink()


def test_an_export_goes_through_links(tmp_path):
    (tmp_path / "far").mkdir()
    for name in ("m.pt2", "m.pt2.json"):
        (tmp_path / name).symlink_to(f"far/{name}")
    (tmp_path / "far" / "m.pt2").write_bytes(b"old")
    export(digits_vit(), tmp_path / "m.pt2", "pt2")
    assert (tmp_path / "m.pt2").is_symlink() and (tmp_path / "far" / "m.pt2").stat().st_size > 1000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["far", "m.pt2", "m.pt2.json"]


def test_a_run_does_not_empty_what_its_lock_leads_to(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(victim)
    with pytest.raises(UserError, match="cannot be written"), alone(tmp_path / "run"):
        pass
    assert victim.read_bytes() == b"mine"


def test_weights_are_saved_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "reducer.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    save(reduce_(digits_vit(), TNT(at=2)), tmp_path / "run")
    assert (tmp_path / "run" / "reducer.safetensors").is_symlink() and (tmp_path / "elsewhere.safetensors").is_file()

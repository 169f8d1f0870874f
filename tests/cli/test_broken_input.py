"""500 kinds of broken input: each ends in one clear line, soon, and with every file as it was."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path

import pytest
from PIL import Image

import broken
from tntprune import TNT, reduce_
from tntprune.backbones.digits_vit import WEIGHTS
from tntprune.cli.main import main
from tntprune.serialization.plan import Plan, write_plan
from tntprune.sweep.results import ResultRow, Setting
from tntprune.sweep.results_file import ResultsFile

SECONDS = 60  # after which it hangs
TOPK = "--method topk --at 2 --workers 0 --batch-size 10"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Photos, a trained reduction, a plan, results, shards and a training that was interrupted, in order."""
    root = tmp_path_factory.mktemp("good")
    draw = random.Random(0)
    for digit in range(10):
        (root / "photos" / str(digit)).mkdir(parents=True)
        Image.frombytes("L", (32, 32), draw.randbytes(1024)).save(root / "photos" / str(digit) / "a.png")
    train = f"train digits_vit --data {root}/photos --at 2 --batch-size 5 --workers 0 --lr 0.01"
    assert main(f"{train} --epochs 1 --out {root}/run".split()) == 0
    from tntprune.backbones.digits_vit import digits_vit
    from tntprune.serialization.checkpoint import read
    from tntprune.serialization.fingerprint import identity

    saved = read(root / "run")
    model = reduce_(digits_vit(), TNT(at=2))
    write_plan(root / "plan.json", Plan(saved.config, saved.learned, {"embed_dim": 96, "depth": 6}, identity(model)))
    for name, config_ in (("unpruned", None), ("Top-K", {"version": 1, "method": "topk", "at": [2], "keep": [0.5]})):
        setting = Setting("digits_vit", "hub", config_, None, "d", 10, img_size=(32, 32))
        about = {"hardware": "a machine", "versions": "torch 2", "date": "2026-01-01", "seconds": 1.5}
        scheme = "unpruned" if config_ is None else "single"
        row = ResultRow(
            setting, name, scheme, 10, 0, 9, 10, 10, 50, 100, [16.0, 8.0], 10.0, 1.5, 2.0, 0.0, "tntprune", about
        )
        ResultsFile(root / "rows.jsonl").add(row)
    (root / "shards").mkdir()
    broken.tarred(root / "shards" / "train-0.tar", draw, 10, good=True)
    split = {"name": "train", "num_samples": 10, "shard_lengths": [10], "filenames": ["train-0.tar"], "alt_label": ""}
    (root / "shards" / "_info.json").write_text(json.dumps({"splits": {"train": split}}))

    def stop(*given, **more):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tntprune.training.runs.save", stop
        )  # what is left is as after a kill between the last step and the end
        assert main(f"{train} --epochs 2 --save-every 1 --out {root}/begun".split()) in (1, 130)
    assert (root / "begun" / "checkpoint.safetensors").is_file()
    return root


def images(good: Path, here: Path, draw: random.Random) -> str:
    photos = broken.copied(good / "photos", here)
    name, data = broken.image(draw)
    (photos / str(draw.randrange(10)) / name).write_bytes(data)
    return f"eval digits_vit --data {photos} {TOPK} --on-bad-image {draw.choice(('error', 'skip'))}"


def weights(good: Path, here: Path, draw: random.Random) -> str:
    path = broken.weights(Path(WEIGHTS), here, draw)
    return f"eval digits_vit --data {good}/photos {TOPK} --weights {path}"


def reducers(good: Path, here: Path, draw: random.Random) -> str:
    run = broken.copied(good / "run", here)
    broken.reducer(run, draw)
    command = draw.choice(("eval digits_vit --data {good}/photos --workers 0", "macs digits_vit"))
    return f"{command.format(good=good)} --reducer {run}"


def plans(good: Path, here: Path, draw: random.Random) -> str:
    path = broken.copied(good / "plan.json", here)
    broken.plan(path, draw)
    command = draw.choice(("eval digits_vit --data {good}/photos --workers 0", "macs digits_vit"))
    return f"{command.format(good=good)} --reducer {path}"


def rows(good: Path, here: Path, draw: random.Random) -> str:
    path = broken.copied(good / "rows.jsonl", here)
    broken.rows(path, draw)
    return f"report {path} --out {here}/out/report.html --figures {here}/out"


def indexes(good: Path, here: Path, draw: random.Random) -> str:
    root = broken.copied(good / "shards", here)
    broken.shards(root, draw)
    skip = draw.choice(("error", "skip"))
    return f"eval digits_vit --data wds/{root} --split train {TOPK} --on-bad-image {skip}"


def runs(good: Path, here: Path, draw: random.Random) -> str:
    run = broken.copied(good / "begun", here)
    broken.run(run, draw)
    train = f"train digits_vit --data {good}/photos --at 2 --batch-size 5 --workers 0 --lr 0.01"
    return f"{train} --epochs 2 --save-every 1 --out {run} --resume"


KINDS = {images: 90, weights: 90, reducers: 90, plans: 70, rows: 60, indexes: 50, runs: 50}
assert sum(KINDS.values()) == 500
CASES = [(kind, number) for kind, count in KINDS.items() for number in range(count)]
SHORT = 12  # of so many, `make test` runs one


def contents(*folders: Path) -> dict[Path, bytes | None]:
    """Every file with what is in it; that of links, and not what they lead to."""
    return {
        path: path.read_bytes() if path.is_file() else None
        for folder in folders
        for path in folder.rglob("*")
        if "out" not in path.relative_to(folder).parts
    }


@pytest.fixture
def in_time():
    """A failure instead of a hang."""

    def stop(number, frame):
        pytest.fail(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param(
            kind, number, id=f"{kind.__name__}-{number}", marks=[] if number % SHORT == 0 else [pytest.mark.wide]
        )
        for kind, number in CASES
    ],
)
def test_broken_input_ends_in_one_line(good, tmp_path, capsys, monkeypatch, in_time, kind, number):
    monkeypatch.chdir(tmp_path)
    command = kind(good, tmp_path, random.Random(f"{kind.__name__} {number}"))
    before = contents(good, tmp_path)
    code = main(command.split())
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("tntprune: ") and "note:" not in line]
    print(command, code, *lines, sep="\n")  # for who looks why it failed
    assert code in (0, 1, 2, 3) and "Traceback" not in err and not out.count("Traceback")
    assert len(lines) == (code in (1, 2))
    assert not lines or (len(lines[0]) < 2000 and lines[0].isprintable())
    after = contents(good, tmp_path)
    if kind is not runs or code != 0:  # a training that goes on changes its own folder
        assert after == before
    assert not list(tmp_path.rglob("PWNED")) and not re.findall(r"\.tmp$", "\n".join(map(str, after)))


@pytest.mark.wide
def test_most_of_it_is_refused(good, tmp_path, capsys):
    """Some of what is broken is not looked at, such as a note; but little, or the corpus would be no attack."""
    refused = 0
    for kind, number in CASES[::5]:
        here = tmp_path / f"{kind.__name__}{number}"
        here.mkdir()
        refused += main(kind(good, here, random.Random(f"{kind.__name__} {number}")).split()) != 0
    capsys.readouterr()
    assert refused > 0.7 * len(CASES[::5]), refused

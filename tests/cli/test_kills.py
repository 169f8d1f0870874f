"""What is killed at any moment ends, when it is run again, with what one that was left alone ends with.

`make test-all` kills a hundred times at random: sixty trainings, thirty sweeps, and ten times in the midst of a save.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from several import processes, start
from tntprune import DynamicViT, TopK, reduce_, save
from tntprune.analysis.evaluate import Tally
from tntprune.cli.main import main
from tntprune.data.batches import TensorSource
from tntprune.data.folders import labelled_photos
from tntprune.sweep.results_file import ResultsFile
from tntprune.system import storage
from tntprune.system.distributed import ALONE
from tntprune.system.storage import read_metadata, read_weights
from tntprune.training.config import Training
from tntprune.training.run_folder import LOG, STATE
from tntprune.training.runs import BEST, EMA, train_run
from tntprune.training.trainer import Trainer
from tntprune.training.validation import Validation

IMAGES, LABELS = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 7
TRAINING = Training(
    epochs=3,
    batch_size=4,
    micro_batches=2,
    lr=0.02,
    backbone_lr=1e-3,
    freeze_epochs=1,
    ema=0.9,
    drop_path=0.1,
    amp="none",
)
STEPS = 9
WEIGHTS, REDUCER = "model.safetensors", "reducer.safetensors"
wide = pytest.mark.wide


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Seven images to validate on, of seven classes."""
    root, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(7):
        path = root / f"class{number}" / "0.png"
        path.parent.mkdir()
        Image.fromarray(generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    return root


def train(group, photos, out, resume=False):
    """Both the scorers and the model, with validation, averages and frequent checkpoints."""
    torch.set_num_threads(1)  # as in the process that is left alone: more add up in another order
    torch.manual_seed(0)
    model = VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=7)
    reduce_(model, DynamicViT(at=(1, 2)))
    validate = Validation(model, labelled_photos(photos, model), batch_size=3, workers=0, group=group)
    source = TensorSource(IMAGES, LABELS, 4, 0)
    resume = resume and any(out.glob("*.*"))  # it may have been killed before there was anything
    train_run(model, source, TRAINING, out, resume=resume, save_every=2, validate=validate, group=group, progress=False)


def outcome(out):
    """All that a training leaves, but for how long it took."""
    lines = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    notes = {name: read_metadata(out / name) for name in files if name != LOG}
    return files, [{k: v for k, v in line.items() if k != "seconds"} for line in lines], notes


def assert_same(out, other):
    files, lines, notes = outcome(other)
    assert outcome(out) == (files, lines, notes)
    for name in notes:
        first, second = read_weights(out / name), read_weights(other / name)
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory, photos):
    """A training that was left alone."""
    out = tmp_path_factory.mktemp("straight") / "run"
    train(ALONE, photos, out)
    return out


def test_what_is_compared(straight):
    files, lines, notes = outcome(straight)
    assert files == sorted([LOG, *(str(Path(place, name)) for place in ("", BEST, EMA) for name in (WEIGHTS, REDUCER))])
    assert sum("loss" in line for line in lines) == STEPS and sum("ema_top1" in line for line in lines) == 3
    assert json.loads(notes[f"{BEST}/{REDUCER}"]["made_by"])["notes"]["best"]["epoch"] in (1, 2, 3)


# At random


def ready(photos, out, told):
    told.set()
    train(ALONE, photos, out, resume=True)


def run_for(seconds, work, *arguments):
    """Work in a process of its own, and kill it after so many seconds; whether it was killed, and how long it took."""
    told = processes.Event()
    process = processes.Process(target=work, args=(*arguments, told))
    process.start()
    assert told.wait(60)
    begin = time.perf_counter()
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0, time.perf_counter() - begin


@pytest.mark.parametrize(("kills", "seed"), [(3, 0), pytest.param(60, 1, marks=wide)])
def test_trainings_killed_at_random(tmp_path, photos, straight, kills, seed):
    """A training that ends in between makes room for another one."""
    killed, whole = run_for(60, ready, photos, tmp_path / "0")
    assert not killed
    assert_same(tmp_path / "0", straight)
    chance, number, done = random.Random(seed), 1, 0
    while done < kills:
        killed, _ = run_for(chance.uniform(0, whole), ready, photos, tmp_path / str(number))
        done += killed
        number += not killed
    run_for(60, ready, photos, tmp_path / str(number))
    for finished in range(1, number + 1):
        assert_same(tmp_path / str(finished), straight)


def sweeping(root, told):
    told.set()
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        methods = ["topk at=2", "tome at=2 r=20", "random at=3", "evit at=2"]
        given = ["digits_vit", "--data", str(root / "photos"), "--out", str(root / "rows.jsonl"), "--no-speed"]
        assert main(["sweep", *given, "--methods", *methods, "--together", "1", "--workers", "0"]) == 0


def measured(path):
    """All that a sweep found, but for how long it took."""
    return {key: replace(row, about={}) for key, row in ResultsFile(path).rows().items()}


@pytest.mark.parametrize(("kills", "seed"), [(2, 2), pytest.param(30, 3, marks=wide)])
def test_sweeps_killed_at_random(tmp_path, kills, seed):
    generator = np.random.default_rng(0)
    for number in range(20):
        path = tmp_path / "photos" / str(number % 10) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (32, 32), dtype=np.uint8)).save(path)
    killed, whole = run_for(120, sweeping, tmp_path)
    rows, expected = tmp_path / "rows.jsonl", measured(tmp_path / "rows.jsonl")
    assert not killed and len(expected) == 5
    rows.unlink()
    chance, done = random.Random(seed), 0
    while done < kills:
        killed, _ = run_for(chance.uniform(0, whole), sweeping, tmp_path)
        found = measured(rows)
        assert found.items() <= expected.items()
        done += killed
        if not killed:
            assert found == expected
            rows.unlink()
    assert not run_for(120, sweeping, tmp_path)[0]
    assert measured(rows) == expected


def saving(out, told):
    torch.manual_seed(0)
    first = reduce_(VisionTransformer(img_size=16, patch_size=4, embed_dim=64, depth=4, num_heads=2), TopK(at=2))
    second = reduce_(VisionTransformer(img_size=16, patch_size=4, embed_dim=64, depth=4, num_heads=2), TopK(at=2))
    for number, model in enumerate((first, second)):
        save(model, out / str(number), weights=True)
    told.set()
    while True:
        for model in (first, second):
            save(model, out / "both", weights=True)


@pytest.mark.parametrize(("kills", "seed"), [(2, 4), pytest.param(10, 5, marks=wide)])
def test_saves_killed_at_random(tmp_path, kills, seed):
    chance = random.Random(seed)
    for kill in range(kills):
        out = tmp_path / str(kill)
        assert run_for(chance.uniform(0.01, 0.3), saving, out)[0]
        for name in (WEIGHTS, REDUCER):
            if (out / "both" / name).exists():
                found = (out / "both" / name).read_bytes()
                assert found in [(out / str(number) / name).read_bytes() for number in (0, 1)]


# In every phase


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def dying(owner, name, call, chosen=lambda *given: True, after=False):
    """The process dies at a call of a function, the first being number 1, before or after it does its work."""
    real, seen = getattr(owner, name), []

    def instead(*given, **options):
        mine = chosen(*given)
        if mine:
            seen.append(given)
        if mine and len(seen) == call and not after:
            die()
        found = real(*given, **options)
        if mine and len(seen) == call:
            die()
        return found

    setattr(owner, name, instead)


def renames(place):
    """Whether a file of that name, with the last folder, is put in its place."""
    return lambda old, new: str(new).endswith(f"run/{place}")


def half_written(call):
    """The process dies with half of a file written, the first being number 1."""
    real, seen = os.fsync, []

    def instead(file):
        seen.append(file)
        if len(seen) == 2 * call - 1:  # the even ones are the folder's
            os.ftruncate(file, os.fstat(file).st_size // 2)
            die()
        real(file)

    storage.os.fsync = instead


PHASES = {
    "in the first step": lambda: dying(Trainer, "step", 1),
    "in the middle of a step": lambda: dying(Trainer, "backward", 8, after=True),
    "after a step that is not saved": lambda: dying(Trainer, "step", 5, after=True),
    "in the first checkpoint": lambda: half_written(1),
    "before a checkpoint gets its name": lambda: dying(os, "replace", 3, renames(STATE)),
    "after a checkpoint got its name": lambda: dying(os, "replace", 3, renames(STATE), after=True),
    "in validation": lambda: dying(Tally, "count", 4),
    "in validation of the average": lambda: dying(Tally, "count", 11),
    "after the best model and before its reduction": lambda: dying(os, "replace", 1, renames(f"{BEST}/{REDUCER}")),
    "after the best": lambda: dying(os, "replace", 1, renames(f"{BEST}/{REDUCER}"), after=True),
    "before the last average": lambda: dying(os, "replace", 1, renames(f"{EMA}/{REDUCER}")),
    "between model and reduction": lambda: dying(os, "replace", 1, renames(WEIGHTS), after=True),
    "after the last save": lambda: dying(os, "replace", 1, renames(REDUCER), after=True),
}  # fmt: skip


def train_and_die(photos, out, phase):
    PHASES[phase]()
    train(ALONE, photos, out)


QUICK = (  # one of each kind
    "in the middle of a step", "before a checkpoint gets its name", "in validation of the average",
    "after the best model and before its reduction", "between model and reduction",
)  # fmt: skip


@pytest.mark.parametrize("phase", [pytest.param(one, marks=[] if one in QUICK else wide) for one in PHASES])
def test_killed_in_a_phase(tmp_path, photos, straight, phase):
    out = tmp_path / "run"
    process = processes.Process(target=train_and_die, args=(photos, out, phase))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    train(ALONE, photos, out, resume=True)
    assert_same(out, straight)


def resume_and_die(photos, out):
    dying(os, "replace", 1, renames(LOG))
    train(ALONE, photos, out, resume=True)


def test_killed_while_the_log_is_cut_back(tmp_path, photos, straight):
    out = tmp_path / "run"
    for work in ((train_and_die, (photos, out, "after a step that is not saved")), (resume_and_die, (photos, out))):
        process = processes.Process(target=work[0], args=work[1])
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    train(ALONE, photos, out, resume=True)
    assert_same(out, straight)


def resume_and_die_at_once(photos, out):
    dying(Trainer, "step", 1)
    train(ALONE, photos, out, resume=True)


def test_what_is_half_written_does_not_pile_up(tmp_path, photos):
    out = tmp_path / "run"
    for work, *more in ((train_and_die, "in the first checkpoint"), (resume_and_die_at_once,)):
        process = processes.Process(target=work, args=(photos, out, *more))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert len(list(out.rglob("*.tmp"))) == (work is train_and_die)


# One of two processes


def train_until_one_dies(group, photos, out, rank, phase):
    if group.rank == rank:
        PHASES[phase]()
    train(group, photos, out)


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        (0, "after the best"),
        pytest.param(1, "in the middle of a step", marks=wide),
        pytest.param(1, "in validation", marks=wide),
    ],
)
def test_one_of_two_is_killed(tmp_path, photos, straight, rank, phase):
    """The other one is then stopped, as torchrun does it; and one alone goes on, or two."""
    out = Path(tmp_path, "run")
    started = start(2, train_until_one_dies, photos, out, rank, phase)
    started[rank].join(60)
    assert started[rank].exitcode == -signal.SIGKILL
    other = started[1 - rank]
    other.terminate()
    other.join(30)
    other.kill()
    other.join()
    assert other.exitcode != 0
    if rank == 0:
        again = start(2, train, photos, out, True)
        for process in again:
            process.join(60)
        assert [process.exitcode for process in again] == [0, 0]
    else:
        train(ALONE, photos, out, resume=True)
    assert_same(out, straight)

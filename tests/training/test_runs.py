from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from conftest import photos_for
from tntprune import DTEM, DiffRate, DynamicViT, EViT
from tntprune.backbones.attach import reduction_of
from tntprune.data.batches import WHOLE, TensorSource
from tntprune.errors import UsageError, UserError
from tntprune.methods import TNT
from tntprune.reduce import reduce_
from tntprune.serialization.checkpoint import load_
from tntprune.system.storage import read_metadata, read_weights
from tntprune.training import run_folder
from tntprune.training.calibrate import calibrate_, photo_source
from tntprune.training.config import Training
from tntprune.training.recipes import Recipe
from tntprune.training.runs import Stopped, train_run

CONFIG = TNT(at=2, noise_blocks=(2, 4))
TRAINING = Training(epochs=4, batch_size=4, lr=0.02)
STEPS, SAVE = 12, 3
REDUCER, STATE, LOG = "reducer.safetensors", "checkpoint.safetensors", "log.jsonl"


def make(depth: int = 5) -> VisionTransformer:
    """A model whose steps take milliseconds, the same at every call, with nothing at its initial zeros."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=depth, num_heads=2, num_classes=7)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


IMAGES, LABELS = photos_for(make(), 12), torch.arange(12) % 7

# Processes that get killed are forked from one that has imported everything and has run nothing.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tntprune.training.runs", "timm"])


def tensors(training=TRAINING):
    return TensorSource(IMAGES, LABELS, training.batch_size, training.seed)


def run(out, source=None, training=TRAINING, config=CONFIG, resume=False, save_every=SAVE, **options):
    model = reduce_(make(), config)
    source = source or tensors(training)
    train_run(model, source, training, out, resume=resume, save_every=save_every, progress=False, **options)
    return model


class Acting:
    """A source that does something before it gives the batch of a step."""

    def __init__(self, source, step, act):
        self.source, self.step, self.act, self.per_epoch = source, step, act, source.per_epoch

    def check(self, share):
        self.source.check(share)

    def batches(self, first, last, share=WHOLE):
        for step, batch in enumerate(self.source.batches(first, last, share), first + 1):
            if step == self.step:
                self.act()
            yield batch


def signalled(step, number=signal.SIGINT, source=None):
    return Acting(source or tensors(), step, lambda: signal.raise_signal(number))


def never():
    raise AssertionError("nothing was to be trained")


def learned(out):
    return read_weights(out / REDUCER)


def log(out):
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def content(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


def assert_same(out, other):
    """The same scorers and losses, bit for bit; every step once in the log; nothing else is left."""
    a, b = learned(out), learned(other)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    steps = len(log(other))
    assert [line["step"] for line in log(out)] == [*range(1, steps + 1)]
    assert [(line["loss"], line["lr"]) for line in log(out)] == [(line["loss"], line["lr"]) for line in log(other)]
    assert sorted(content(out)) == [LOG, REDUCER]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A training that nothing interrupted."""
    out = tmp_path_factory.mktemp("straight")
    run(out)
    return out


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(Stopped):
        run(out, signalled(5))
    return out


@pytest.fixture
def stopped(tmp_path, interrupted):
    """A training that was interrupted in its fifth step."""
    return shutil.copytree(interrupted, tmp_path / "run")


# What a run leaves


def test_the_log_tells_the_rates_of_the_reduction_and_of_the_model(tmp_path):
    joint = Training(epochs=4, batch_size=4, lr=0.02, backbone_lr=1e-3)
    run(tmp_path / "both", training=joint, config=DynamicViT(at=2))
    for line in log(tmp_path / "both"):
        assert line["backbone_lr"] / 1e-3 == pytest.approx(line["lr"] / 0.02)  # one schedule
    run(tmp_path / "model", training=joint, config=EViT(at=2))  # nothing but the model learns
    assert max(line["lr"] for line in log(tmp_path / "model")) <= 1e-3
    assert all("backbone_lr" not in line for line in log(tmp_path / "model"))


def test_a_run_leaves_the_reducer_and_the_log(tmp_path):
    out = tmp_path / "new" / "folder"
    model = run(out)
    assert sorted(content(out)) == [LOG, REDUCER]
    lines = log(out)
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert [line["epoch"] for line in lines] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert all(line.keys() == {"step", "epoch", "loss", "lr", "seconds"} for line in lines)
    assert all(line["loss"] > 0 and 0 < line["lr"] <= TRAINING.lr for line in lines)
    assert lines == sorted(lines, key=lambda line: line["seconds"])
    loaded = load_(make(), out)
    assert torch.equal(loaded(IMAGES), model(IMAGES))


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"seed": 7, "warmup": 0.0}])
def test_a_run_trains_what_calibrate_trains(tmp_path, options):
    training = replace(TRAINING, **options)
    model = run(tmp_path, training=training)
    other = calibrate_(reduce_(make(), CONFIG), IMAGES, progress=False, **vars(training))
    assert all(
        torch.equal(a, b) for a, b in zip(model.reduction.parameters(), other.reduction.parameters(), strict=True)
    )


@pytest.mark.parametrize("save_every", [1, 1000])
def test_how_often_it_is_saved_does_not_matter(tmp_path, straight, save_every):
    run(tmp_path, save_every=save_every)
    assert_same(tmp_path, straight)


# Interrupted and continued


def test_a_training_goes_on_with_the_last_block_that_it_was_started_with(tmp_path):
    narrow = reduce_(make(), CONFIG, last_block="prefix")
    train_run(narrow, tensors(), TRAINING, tmp_path, progress=False)
    with pytest.raises(UsageError, match="was started with last_block=prefix, not None; expected the same options"):
        run(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("step", "number"), [(1, signal.SIGINT), (3, signal.SIGTERM), (5, signal.SIGINT), (11, signal.SIGTERM)]
)
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, straight, step, number):
    with pytest.raises(Stopped) as caught:
        run(tmp_path, signalled(step, number))
    assert str(caught.value) == f"stopped after step {step} of 12; nothing is lost, continue with --resume"
    assert sorted(content(tmp_path)) == [STATE, LOG] and len(log(tmp_path)) == step
    run(tmp_path, resume=True)
    assert_same(tmp_path, straight)


@pytest.mark.parametrize(
    ("config", "training"),
    [
        ({"recipe": "paper"}, {}),
        ({"capacity": "drawn"}, {"seed": 3}),
        ({"scorer": "mlp", "hidden": 5}, {"weight_decay": 0.1}),
        ({"objective": "ce"}, {"amp": "bf16"}),
        ({"noise_blocks": (0, 1, 2, 3, 4)}, {"batch_size": 5}),
        (DTEM(at=(2, 3), r=4), {}),
        (DiffRate(budget=0.7), {"lr": 0.3}),  # its numbers are learned
    ],
)
def test_whatever_is_trained_resumes(tmp_path, config, training):
    config = replace(CONFIG, **config) if isinstance(config, dict) else config
    options = {"config": config, "training": replace(TRAINING, **training)}
    run(tmp_path / "straight", **options)
    source = tensors(options["training"])
    for step in (2, 7):
        with pytest.raises(Stopped):
            run(tmp_path / "run", signalled(step, source=source), resume=step > 2, **options)
    run(tmp_path / "run", resume=True, **options)
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_epochs_that_were_not_given_are_those_it_began_with(tmp_path, straight, monkeypatch):
    open_ = replace(TRAINING, epochs=None)
    monkeypatch.setattr("tntprune.training.config.STEPS", STEPS)
    with pytest.raises(Stopped):
        run(tmp_path, signalled(7), training=open_)
    monkeypatch.setattr("tntprune.training.config.STEPS", 3 * STEPS)  # as in a later version
    run(tmp_path, resume=True, training=open_)
    assert_same(tmp_path, straight)


def test_a_signal_in_the_last_step_comes_too_late(tmp_path, straight):
    run(tmp_path, signalled(STEPS))
    assert_same(tmp_path, straight)


def test_a_second_interrupt_stops_at_once(tmp_path, straight):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Acting(tensors(), 8, twice))
    assert int(read_metadata(tmp_path / STATE)["step"]) == 6
    run(tmp_path, resume=True)
    assert_same(tmp_path, straight)


def test_signal_handlers_are_as_before(tmp_path, stopped):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(stopped, resume=True)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_thread_can_train(tmp_path, straight):
    thread = threading.Thread(target=run, args=(tmp_path,))
    thread.start()
    thread.join()
    assert_same(tmp_path, straight)


def test_photos_that_are_augmented_by_a_worker_resume(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 40, 48, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(folder / f"{number}.png")

    def source(workers):
        model = make()
        model.pretrained_cfg = {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3}
        return photo_source(model, folder, Recipe(CONFIG, TRAINING), False, workers)

    run(tmp_path / "straight", source(1))
    with pytest.raises(Stopped):
        run(tmp_path / "run", signalled(5, source=source(1)))
    with pytest.raises(Stopped):
        run(tmp_path / "run", signalled(8, source=source(0)), resume=True)
    run(tmp_path / "run", source(1), resume=True)
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_sigterm_that_ends_the_processes_that_read_too_loses_nothing(tmp_path):
    """It comes to all of a job at once: what the step needs is there, and its state is saved."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(folder / f"{number}.png")
    source = photo_source(make(), folder, Recipe(CONFIG, TRAINING), False, 2)

    def end():
        readers = multiprocessing.active_children()
        assert len(readers) == 2
        subprocess.run(["kill", *(str(reader.pid) for reader in readers)], check=True)  # from elsewhere, as it comes
        for reader in readers:
            os.waitid(os.P_PID, reader.pid, os.WEXITED | os.WNOWAIT)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped, match="stopped after step 5 of 12; nothing is lost"):
        run(tmp_path / "run", Acting(source, 5, end))
    assert read_metadata(tmp_path / "run" / STATE)["step"] == "5"


# Killed


def train_until_killed(out):
    run(out, Acting(tensors(), 8, lambda: time.sleep(600)))


def test_killed_in_training(tmp_path, straight):
    process = processes.Process(target=train_until_killed, args=(tmp_path,))
    process.start()
    while process.is_alive() and not (
        (tmp_path / LOG).exists() and len((tmp_path / LOG).read_text().splitlines()) == 7
    ):
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert int(read_metadata(tmp_path / STATE)["step"]) == 6 and read_weights(tmp_path / STATE)
    run(tmp_path, resume=True)
    assert_same(tmp_path, straight)


def train_and_die(out, save, moment):
    """Train, and be killed in the writing of a file, the first being number 1."""
    fsync, rename, seen = os.fsync, os.replace, {"fsync": 0, "rename": 0}

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_fsync(file):
        seen["fsync"] += 1
        if moment == "half written" and seen["fsync"] == 2 * save - 1:  # the file's; the even ones are the folder's
            os.ftruncate(file, os.fstat(file).st_size // 2)
            die()
        fsync(file)

    def dying_rename(old, new):
        seen["rename"] += 1
        if moment == "written" and seen["rename"] == save:
            die()
        rename(old, new)
        if moment == "renamed" and seen["rename"] == save:
            die()

    os.fsync, os.replace = dying_fsync, dying_rename
    run(out)


SAVES, MOMENTS = (1, 2, 4), ("half written", "written", "renamed")  # the first, one that replaces it, the reducer's


@pytest.mark.parametrize(
    ("save", "moment"),
    [
        pytest.param(save, moment, marks=[pytest.mark.wide] * (SAVES.index(save) != MOMENTS.index(moment)))
        for save in SAVES
        for moment in MOMENTS
    ],
)
def test_killed_in_a_save(tmp_path, straight, save, moment):
    process = processes.Process(target=train_and_die, args=(tmp_path, save, moment))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    saved = save if moment == "renamed" else save - 1
    assert (tmp_path / STATE).exists() == (saved > 0)
    assert (tmp_path / REDUCER).exists() == (saved == 4)
    if saved:
        assert int(read_metadata(tmp_path / STATE)["step"]) == SAVE * min(saved, 3)
        assert read_weights(tmp_path / STATE)
    run(tmp_path, resume=True)
    assert_same(tmp_path, straight)


# Refused


@pytest.mark.parametrize("left", ["finished", "checkpoint", "log"])
def test_starting_over_is_refused(left, stopped):
    if left == "finished":
        run(stopped, resume=True)
    if left == "log":
        (stopped / STATE).unlink()
    before = content(stopped)
    with pytest.raises(UsageError, match=r"holds a training already; expected another --out, or --resume"):
        run(stopped, Acting(tensors(), 1, never))
    assert content(stopped) == before


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"training": replace(TRAINING, lr=0.05)}, "training.lr=0.02, not 0.05"),
        ({"training": replace(TRAINING, epochs=5)}, "training.epochs=4, not 5"),
        ({"training": replace(TRAINING, seed=1)}, "training.seed=0, not 1"),
        ({"training": replace(TRAINING, batch_size=3)}, "training.batch_size=4, not 3"),
        ({"config": replace(CONFIG, keep=0.3)}, "reduction.keep=None, not [0.3]"),
        ({"config": replace(CONFIG, recipe="paper")}, "reduction.recipe=merge, not paper"),
        ({"config": TNT(at=2)}, "reduction.noise_blocks=[2, 4], not None"),
        ({"about": {"data": "/elsewhere"}}, "data=None, not /elsewhere"),
    ],
)
def test_resuming_with_other_options_is_refused(stopped, options, word):
    before = content(stopped)
    with pytest.raises(UsageError) as caught:
        run(stopped, resume=True, **options)
    assert word in str(caught.value) and "\n" not in str(caught.value)
    assert content(stopped) == before


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "other files"])
def test_resuming_where_nothing_is_is_refused(tmp_path, there):
    out = tmp_path / "out"
    if there != "nothing":
        out.mkdir()
    if there == "other files":
        (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="no training to continue; start one without --resume"):
        run(out, resume=True)
    run(out)  # and one can start there
    assert (out / REDUCER).exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_in_place_of_the_folder_is_refused(tmp_path, resume):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="a file; expected a folder"):
        run(tmp_path / "out", resume=resume)
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("save_every", [0, -1, 1.5])
def test_save_every_has_to_be_a_number_of_steps(tmp_path, save_every):
    with pytest.raises(UsageError, match="save_every="):
        run(tmp_path / "out", save_every=save_every)
    assert not (tmp_path / "out").exists()


def test_resuming_what_has_ended_changes_nothing(tmp_path, straight):
    before = content(straight)
    run(straight, Acting(tensors(), 1, never), resume=True)
    assert content(straight) == before


def test_resuming_what_has_ended_with_another_reduction_is_refused(straight):
    with pytest.raises(UsageError, match=r"reduction\.at=\[2\], not \[4\]"):
        run(straight, config=replace(CONFIG, at=4), resume=True)


# Damaged


@pytest.mark.parametrize("damage", ["cut", "emptied", "garbage", "not finite"])
def test_a_broken_checkpoint_is_named(stopped, damage):
    path = stopped / STATE
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    nan = np.full((len(whole) - header) // 4, np.nan, np.float32).tobytes()
    path.write_bytes(
        {"cut": whole[:-9], "emptied": b"", "garbage": b"\x07" * 999, "not finite": whole[:header] + nan}[damage]
    )
    with pytest.raises(UserError) as caught:
        run(stopped, resume=True)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_checkpoint_of_another_model_does_not_fit(stopped):
    deeper = make(depth=6)
    with pytest.raises(UserError, match="was started with other weights of the model"):
        train_run(reduce_(deeper, CONFIG), tensors(), TRAINING, stopped, resume=True, progress=False)


@pytest.mark.parametrize("tail", [b'{"step": 6, "lo', b"\0" * 30, b'{"epoch": 1}\n[3]\n5\n\n', b"\xff\xfe\x00"])
def test_half_a_line_at_the_end_of_the_log_is_survived(stopped, straight, tail):
    with open(stopped / LOG, "ab") as file:
        file.write(tail)
    run(stopped, resume=True)
    assert_same(stopped, straight)


def test_lines_after_the_checkpoint_are_written_anew(stopped, straight):
    with open(stopped / LOG, "a") as file:
        file.write(json.dumps({"step": 6, "epoch": 2, "loss": -1.0, "lr": 0.0, "seconds": 1.0}) + "\n")
    run(stopped, resume=True)
    assert_same(stopped, straight)


# A full disk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_log(stopped, straight, monkeypatch):
    before = (stopped / STATE).read_bytes()

    def full(path, *mode, **options):
        return open("/dev/full", *mode, **options)

    monkeypatch.setattr(run_folder, "open", full, raising=False)
    with pytest.raises(
        UserError, match=r"log\.jsonl: cannot be written \(No space left on device\); continue with --resume"
    ):
        run(stopped, resume=True)
    assert (stopped / STATE).read_bytes() == before
    monkeypatch.undo()
    run(stopped, resume=True)
    assert_same(stopped, straight)


@pytest.mark.parametrize("save", [1, 2, 4])
def test_a_full_disk_under_a_save(tmp_path, straight, monkeypatch, save):
    fsync, seen = os.fsync, []

    def full(file):
        seen.append(file)
        if len(seen) >= 2 * save - 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        UserError, match=r"cannot be written \(No space left on device\); nothing that was there is lost"
    ):
        run(tmp_path)
    monkeypatch.undo()
    if save > 1:
        assert int(read_metadata(tmp_path / STATE)["step"]) == SAVE * (save - 1) and read_weights(tmp_path / STATE)
    run(tmp_path, resume=True)
    assert_same(tmp_path, straight)


def test_the_model_is_trained_where_the_run_ends(stopped, straight):
    model = run(stopped, resume=True)
    state = reduction_of(model).state_dict()
    assert all(torch.equal(state[name], value) for name, value in learned(straight).items())


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    import fcntl

    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process writes here"):
            run(tmp_path / "run")

"""Several processes do what one does."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import make, photos_for
from several import together
from tntprune import ATS, TNT, DynamicViT, ToMe, TopK, reduce_
from tntprune.analysis.evaluate import evaluate
from tntprune.backbones.models import drop_classifier_
from tntprune.data.batches import TensorSource
from tntprune.data.folders import labelled_photos
from tntprune.errors import UsageError, UserError
from tntprune.system.distributed import ALONE, ProcessGroup
from tntprune.system.storage import read_metadata, read_weights
from tntprune.training import runs
from tntprune.training.config import Training
from tntprune.training.run_folder import STATE, save_state
from tntprune.training.runs import EMA, Stopped, train_run
from tntprune.training.trainer import Trainer

IMAGES, LABELS = photos_for(make("plain"), 24), torch.arange(24) % 7
CONFIGS = {
    "tnt": TNT(at=2, noise_blocks=(2, 4)),  # noise after another block in each part
    "paper": TNT(at=2, noise_blocks=(2, 4), recipe="paper"),
    "dynamicvit": DynamicViT(at=(2, 4)),
}
TRAINING = Training(epochs=2, batch_size=8, micro_batches=2, lr=0.02, amp="none")


def trained(group, out, name, training=TRAINING, source=None, resume=False, validate=None):
    """A training of six steps."""
    model = reduce_(make("plain"), CONFIGS[name])
    source = source or TensorSource(IMAGES, LABELS, 8, 0)
    train_run(model, source, training, out, group=group, resume=resume, save_every=2, validate=validate, progress=False)


def weights(out):
    found = read_weights(out / "reducer.safetensors")
    beside = out / "model.safetensors"
    return {**found, **(read_weights(beside) if beside.exists() else {})}


def lines(out):
    return [
        {name: value for name, value in json.loads(line).items() if name != "seconds"}
        for line in (out / "log.jsonl").read_text().splitlines()
    ]


def same(a, b):
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_alone_is_a_world_of_one():
    assert ALONE.main and ALONE.share([1, 2, 3]) == [1, 2, 3] and ALONE.gather("a") == ["a"]
    assert ALONE.device("cuda") == "cuda" and ProcessGroup(1, 4, 1).device("cuda") == "cuda:1"
    assert ProcessGroup(1, 4, 1).device("cpu") == "cpu" and ProcessGroup(1, 4, 1).device("cuda:0") == "cuda:0"
    assert ProcessGroup(1, 4).share(list(range(10))) == [1, 5, 9]
    with pytest.raises(UserError, match="no"):
        ALONE.agree(lambda: (_ for _ in ()).throw(UserError("no")))


def talk(group, out):
    assert group.size == 2 and group.main == (group.rank == 0)
    big = torch.tensor([2**53 + 1 + group.rank, 3])
    assert group.sum(big).tolist() == [2**54 + 3, 6] and big.tolist() == [2**53 + 1 + group.rank, 3]
    assert group.gather(group.rank * 10) == [0, 10]
    assert group.any(group.rank == 1) and not group.any(False)
    assert group.agree(lambda: f"found by {group.rank}") == "found by 0"
    with pytest.raises(UserError, match="the main one's mistake"):
        group.agree(lambda: (_ for _ in ()).throw(UserError("the main one's mistake")))
    with pytest.raises(UserError, match=r"nothing in main") as caught, group.main_first():
        raise UserError(f"nothing in {'main' if group.main else 'other'}")
    assert caught.value.told == (not group.main)  # the user reads it once
    with group.main_first():  # and they still go on together
        (out / f"{group.rank}").write_text(str((out / "0").exists()))
    group.wait()
    (out / "run").mkdir(exist_ok=True)
    (out / "run" / "log.jsonl").write_text("{}")
    with pytest.raises(UsageError, match="holds a training already"):  # what the main one refuses ends all
        trained(group, out / "run", "tnt")
    if group.main:  # the other one ends
        for call in (lambda: group.sum(torch.ones(1)), lambda: group.gather(1), group.wait):
            with pytest.raises(ConnectionError, match="ended with another process, which says why"):
                call()
        (out / "told").touch()


def test_two_processes_talk_until_one_ends(tmp_path):
    together(2, talk, tmp_path)
    assert (tmp_path / "1").read_text() == "True" and (tmp_path / "told").exists()


# Training

JOINT = replace(TRAINING, backbone_lr=1e-3, clip=0.5, ema=0.9, drop_path=0.2, weight_decay=0.1)


def train_each(group, out):
    for name in CONFIGS:
        trained(group, out / name, name)
    trained(group, out / "joint", "dynamicvit", JOINT)


def test_two_processes_train_what_one_trains_bit_for_bit(tmp_path):
    train_each(ALONE, tmp_path / "one")
    together(2, train_each, tmp_path / "two")
    for name in (*CONFIGS, "joint", f"joint/{EMA}"):
        assert same(tmp_path / "one" / name, tmp_path / "two" / name), name
    for name in (*CONFIGS, "joint"):
        assert lines(tmp_path / "one" / name) == lines(tmp_path / "two" / name), name
    assert not same(tmp_path / "one" / "joint", tmp_path / "one" / "joint" / EMA)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_make_no_difference_but_rounding(tmp_path, parts):
    """Without anything that is drawn: then a batch in parts is the batch."""
    training = replace(TRAINING, micro_batches=parts, epochs=1, backbone_lr=1e-2)
    out = tmp_path / "out"
    model, whole = (reduce_(make("plain"), TopK(at=2)) for _ in range(2))
    train_run(model, TensorSource(IMAGES, LABELS, 8, 0), training, out, progress=False)
    train_run(
        whole,
        TensorSource(IMAGES, LABELS, 8, 0),
        replace(training, micro_batches=1),
        tmp_path / "whole",
        progress=False,
    )
    assert lines(out)[0]["loss"] == pytest.approx(lines(tmp_path / "whole")[0]["loss"], rel=1e-5)
    assert lines(out)[-1]["loss"] == pytest.approx(lines(tmp_path / "whole")[-1]["loss"], rel=1e-2)


class Stopping(TensorSource):
    """Somebody asks one of the processes to stop, in the fourth step."""

    def batches(self, first, last, share):
        for number, batch in enumerate(super().batches(first, last, share)):
            if first == 0 and number == 3 * len(share.mine) and 0 in share.mine:
                signal.raise_signal(signal.SIGTERM)
            yield batch


def interrupted(group, out, training=TRAINING):
    with pytest.raises(Stopped):
        trained(group, out, "tnt", training, Stopping(IMAGES, LABELS, 8, 0))


OPEN = replace(TRAINING, micro_batches=None)


def stop_and_go_on(group, root):
    """Trainings that are interrupted, and one that another number of processes began."""

    def slow(*given):
        time.sleep(0.5)  # the main process takes its time to save, and the other one must not end meanwhile
        save_state(*given)

    runs.save_state = slow
    interrupted(group, root / "from two")
    assert read_metadata(root / "from two" / STATE)["step"] == "4"
    runs.save_state = save_state
    interrupted(group, root / "open", OPEN)
    trained(group, root / "from one", "tnt", resume=True)


def test_another_number_of_processes_goes_on(tmp_path):
    """Also where the parts were left open: they stay as they were begun."""
    trained(ALONE, tmp_path / "one", "tnt")
    interrupted(ALONE, tmp_path / "from one")
    together(2, stop_and_go_on, tmp_path)
    trained(ALONE, tmp_path / "from two", "tnt", resume=True)
    trained(ALONE, tmp_path / "open", "tnt", OPEN, resume=True)
    for out in ("from two", "from one", "open"):
        assert same(tmp_path / "one", tmp_path / out) and lines(tmp_path / "one") == lines(tmp_path / out), out
    assert (
        json.loads(read_metadata(tmp_path / "open" / "reducer.safetensors")["made_by"])["training"]["micro_batches"]
        == 2
    )


def test_parts_are_shared_evenly_or_refused():
    model = reduce_(make("plain"), CONFIGS["tnt"])
    with pytest.raises(UsageError, match="micro_batches=3: expected a multiple of the 2 processes"):
        Trainer(model, Training(batch_size=9, micro_batches=3), 1, ProcessGroup(0, 2))
    with pytest.raises(UsageError, match="micro_batches=3: batch_size=8 is no multiple of it"):
        Training(batch_size=8, micro_batches=3)
    share = Trainer(model, Training(batch_size=12, micro_batches=6), 1, ProcessGroup(1, 3)).share
    assert share == (6, (1, 4))


# Evaluating


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten images in seven classes, one of them broken."""
    root, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(13):
        path = root / f"class{number % 7}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
    (root / "class3" / "broken.png").write_bytes(b"no image")
    return root


def evaluated(group, folder, out):
    for number, (config, classes) in enumerate(((TNT(at=2), True), (ATS(at=(3, 4)), True), (ToMe(at=2), False))):
        model = make("plain")
        photos = labelled_photos(folder, model)
        found = evaluate(
            reduce_(model if classes else drop_classifier_(model), config),
            photos,
            batch_size=3,
            workers=0,
            on_bad_image="skip",
            group=group,
            progress=False,
        )
        figures = {name: value for name, value in found.to_dict().items() if name != "images_per_s"}
        (out / f"{group.size}-{group.rank}-{number}.json").write_text(json.dumps([figures, found.bad]))


@pytest.mark.parametrize("size", [2, pytest.param(7, marks=pytest.mark.wide)])  # two more than there are batches
def test_several_processes_evaluate_to_the_figures_of_one(tmp_path, folder, size):
    evaluated(ALONE, folder, tmp_path)
    together(size, evaluated, folder, tmp_path)
    for number in (0, 1, 2):
        expected = json.loads((tmp_path / f"1-0-{number}.json").read_text())
        assert expected[0]["images"] == 13 and expected[0]["skipped"] == 1
        assert ("recall5" in expected[0] and "knn" in expected[0]) == (number == 2)
        for rank in range(size):
            assert json.loads((tmp_path / f"{size}-{rank}-{number}.json").read_text()) == expected

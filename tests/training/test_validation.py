"""Validation after each epoch, the best epoch, the average, and TensorBoard's log."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import make
from tntprune import TNT, AViT, load_, reduce_
from tntprune.analysis.evaluate import evaluate
from tntprune.backbones.attach import reduction_of
from tntprune.data.augment import Augmentation
from tntprune.data.folders import labelled_photos
from tntprune.data.loading import Photos
from tntprune.data.transforms import input_mode, transform_for
from tntprune.errors import UsageError, UserError
from tntprune.training.config import Training
from tntprune.training.recipes import Recipe
from tntprune.training.runs import BEST, EMA, Stopped, train_folder
from tntprune.training.trainer import learning
from tntprune.training.validation import Validation

RECIPE = Recipe(
    TNT(at=2, noise_blocks=(2, 4), recipe="paper"), Training(epochs=3, batch_size=4, lr=0.5, ema=0.5, amp="none")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve images in seven classes, of one colour a class and some noise."""
    root, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(12):
        path = root / f"class{number % 7}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = generator.integers(0, 80, (36, 36, 3)) + np.array([20, 12, 5]) * (number % 7)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return root


def run(folder, out, recipe=RECIPE, val=True, **options):
    model = reduce_(make("plain"), recipe.config)
    found = train_folder(model, folder, out, recipe, val=folder if val else None, workers=0, progress=False, **options)
    return model, found


def lines(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_each_epoch_is_validated_and_the_best_is_kept(folder, tmp_path):
    model, found = run(folder, tmp_path / "run")
    assert (found.path, found.photos, found.steps) == (tmp_path / "run" / "reducer.safetensors", 12, 9)
    validated = [line for line in lines(tmp_path / "run") if "top1" in line]
    assert [line["step"] for line in validated] == [3, 6, 9] and [line["epoch"] for line in validated] == [1, 2, 3]
    photos = labelled_photos(folder, model)
    for where, name in (("", "top1"), (EMA, "ema_top1")):
        loaded = load_(make("plain"), tmp_path / "run" / where)
        figures = evaluate(loaded, photos, workers=0, progress=False)
        assert figures.top1 == validated[-1][name]
    best = load_(make("plain"), tmp_path / "run" / BEST)
    assert evaluate(best, photos, workers=0, progress=False).top1 == max(line["top1"] for line in validated)


def test_validating_changes_nothing_of_the_training(folder, tmp_path):
    with_, _ = run(folder, tmp_path / "with")
    without, _ = run(folder, tmp_path / "without", val=False)
    for one, other in zip(with_.reduction.parameters(), without.reduction.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not (tmp_path / "without" / BEST).exists() and (tmp_path / "without" / EMA).exists()
    steps = [{**line, "seconds": 0} for line in lines(tmp_path / "with") if "loss" in line]
    assert steps == [{**line, "seconds": 0} for line in lines(tmp_path / "without")]


def test_the_model_is_validated_without_noise_and_goes_on_in_training_mode(folder):
    model = reduce_(make("plain"), RECIPE.config)
    validate = Validation(model, labelled_photos(folder, model), batch_size=5, workers=0)
    with learning(model):
        assert reduction_of(model).training
        found = validate()
        assert reduction_of(model).training and not model.blocks[0].training and found == validate()
    figures = evaluate(model, labelled_photos(folder, model), workers=0, progress=False)
    assert found == {"top1": figures.top1, "top5": figures.top5}


def test_each_photo_is_seen_once_by_methods_whose_cost_differs_too(folder):
    model = reduce_(make("plain"), AViT(gate_center=6.0))
    seen = []
    model.patch_embed.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    Validation(model, labelled_photos(folder, model), batch_size=5, workers=0)()
    assert seen == [5, 5, 2]


def test_a_photo_that_cannot_be_read_is_named(folder, tmp_path):
    bad = tmp_path / "photos" / "class0" / "bad.png"
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"no")
    for number in range(1, 7):
        (tmp_path / "photos" / f"class{number}").mkdir()
        Image.new("RGB", (36, 36)).save(tmp_path / "photos" / f"class{number}" / "a.png")
    model = reduce_(make("plain"), RECIPE.config)
    validate = Validation(model, labelled_photos(tmp_path / "photos", model), workers=0)
    with pytest.raises(UserError, match=r"bad\.png: not an image"):
        validate()


def test_the_log_for_tensorboard_holds_the_same_figures(folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    recipe = replace(RECIPE, training=replace(RECIPE.training, epochs=2))
    run(folder, out, recipe, tensorboard=True)
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == {"loss", "lr", "top1", "top5", "ema_top1", "ema_top5"}
    losses = {event.step: event.value for event in board.Scalars("loss")}
    assert losses == pytest.approx({line["step"]: line["loss"] for line in lines(out) if "loss" in line})
    assert [event.step for event in board.Scalars("top1")] == [3, 6]


def test_without_tensorboard_nothing_is_begun(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="--tensorboard needs tensorboard; install it with: pip install"):
        run(folder, tmp_path / "run", tensorboard=True)
    monkeypatch.undo()
    run(folder, tmp_path / "run", tensorboard=True)  # and nobody has to say --resume


def test_a_training_that_was_stopped_goes_on_to_the_same_best_epoch(folder, tmp_path, monkeypatch):
    run(folder, tmp_path / "whole")
    count, validate = [], Validation.__call__

    def interrupted(self):
        count.append(1)
        if len(count) == 3:  # the second epoch's, of the average
            signal.raise_signal(signal.SIGTERM)
        return validate(self)

    monkeypatch.setattr(Validation, "__call__", interrupted)
    with pytest.raises(Stopped, match="stopped after step 6 of 9"):
        run(folder, tmp_path / "stopped")
    monkeypatch.undo()
    run(folder, tmp_path / "stopped", resume=True)
    for where in ("", BEST, EMA):
        a, b = (load_(make("plain"), tmp_path / name / where) for name in ("whole", "stopped"))
        assert all(torch.equal(x, y) for x, y in zip(a.reduction.parameters(), b.reduction.parameters(), strict=True))
    a, b = ([{**line, "seconds": 0} for line in lines(tmp_path / name)] for name in ("whole", "stopped"))
    assert a == b


def test_a_training_goes_on_only_with_the_same_photos(folder, tmp_path):
    twin = tmp_path / "photos"
    shutil.copytree(folder, twin / "train")
    shutil.copytree(folder, twin / "other")
    run(twin, tmp_path / "run", val=False, split="train")
    with pytest.raises(UsageError, match="was started with split=train, not other; expected the same options"):
        run(twin, tmp_path / "run", val=False, split="other", resume=True)
    run(folder, tmp_path / "validated")
    with pytest.raises(UsageError, match=f"was started with val={folder}, not None"):
        run(folder, tmp_path / "validated", val=False, resume=True)


def test_photos_are_seen_as_by_eval(folder):
    model = make("plain")
    photos = labelled_photos(folder, model)
    loader = Validation(reduce_(model, RECIPE.config), photos, batch_size=5, workers=0).loader
    seen = torch.cat([batch.images for batch in loader])
    reader = Photos(photos, transform_for(model), input_mode(model))
    assert torch.equal(seen, torch.stack([reader[number][0] for number in range(12)]))


# What is told


def test_the_best_epoch_is_told(folder, tmp_path, capsys):
    model = reduce_(make("plain"), RECIPE.config)
    found = train_folder(model, folder, tmp_path / "run", RECIPE, val=folder, workers=0)
    validated = [line for line in lines(tmp_path / "run") if "top1" in line]
    best = max(line["top1"] for line in validated)
    assert found.best is not None and found.best["top1"] == best and found.batch_size == 4
    assert found.best["epoch"] == next(line["epoch"] for line in validated if line["top1"] == best)
    assert f"top-1 {best:.2f}" in str(found) and str(tmp_path / "run" / BEST) in str(found)
    told = capsys.readouterr().err
    for line in validated:
        assert f"epoch {line['epoch']}: top-1 {line['top1']:.2f}, top-5 {line['top5']:.2f}, top-1 of the" in told
    again = train_folder(model, folder, tmp_path / "run", RECIPE, val=folder, workers=0, resume=True, progress=False)
    assert again == found and found.seconds == lines(tmp_path / "run")[-1]["seconds"]


def test_a_batch_larger_than_the_photos_is_told_as_it_was(folder, tmp_path):
    recipe = replace(RECIPE, training=Training(epochs=1, batch_size=64, amp="none"))
    _, found = run(folder, tmp_path / "run", recipe, val=False)
    assert (found.batch_size, found.steps, found.best) == (12, 1, None)
    assert str(found).startswith("trained 1 epoch of 12 photos, 1 step of 12, in ")


def test_a_batch_that_cannot_be_used_leaves_no_folder(folder, tmp_path):
    recipe = replace(RECIPE, augmentation=Augmentation(mixup=0.8), training=Training(batch_size=5, amp="none"))
    with pytest.raises(UsageError, match="expected an even number"):
        run(folder, tmp_path / "run", recipe, val=False, tensorboard=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_training_that_did_no_step_can_be_begun_either_way(folder, tmp_path, resume):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").touch()
    assert run(folder, tmp_path / "run", val=False, resume=resume)[1].steps == 9

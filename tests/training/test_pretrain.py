"""A backbone that is trained from nothing."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from several import together
from tntprune.backbones.attach import base_of, is_reduced
from tntprune.backbones.models import load_model
from tntprune.cli.main import main
from tntprune.data.folders import class_folders
from tntprune.errors import UsageError, UserError
from tntprune.serialization.checkpoint import load_
from tntprune.system.storage import read_weights
from tntprune.training.pretraining import classes_in, untrained
from tntprune.training.recipes import changed, scratch
from tntprune.training.trainer import Trainer

CLASSES, PHOTOS = 5, 8  # a class
SMALL = ["--img-size", "32", "32", "--workers", "0", "--batch-size", "20"]
PLAIN = ["--auto-augment", "none", "--color-jitter", "0", "--mixup", "0", "--cutmix", "0", "--random-erasing", "0"]
COLOURS = np.array([[230, 30, 30], [30, 200, 30], [30, 30, 230], [230, 230, 30], [30, 220, 220]])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Noise around a colour of the class's own."""
    root, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(CLASSES * PHOTOS):
            path = root / split / f"colour{number % CLASSES}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = generator.integers(-25, 26, (32, 32, 3))
            Image.fromarray((COLOURS[number % CLASSES] + noise).clip(0, 255).astype(np.uint8)).save(path)
    return root


def command(photos, out, *more):
    return ["pretrain", "test_vit", "--data", str(photos / "train"), "--out", str(out), *SMALL, *map(str, more)]


@pytest.fixture
def call(capsys):
    def run(*arguments):
        capsys.readouterr()
        code = main([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out if code in (0, 3) else err)

    return run


def lines(out):
    found = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def same(first, second):
    a, b = read_weights(first), read_weights(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def learned(photos, tmp_path_factory):
    """A training that tells the colours apart."""
    out = tmp_path_factory.mktemp("learned") / "run"
    options = ["--epochs", 10, "--lr", 3e-3, "--ema", 0.5, "--drop-path", 0, "--repeats", 1, "--crop", 0.8]
    assert main(command(photos, out, *options, *PLAIN, "--val", photos / "val")) == 0
    return out


# What is left, and what it is good for


def test_a_run_leaves_weights_and_no_reduction(learned):
    files = sorted(str(path.relative_to(learned)) for path in learned.rglob("*") if path.is_file())
    assert files == ["best/model.safetensors", "ema/model.safetensors", "log.jsonl", "model.safetensors"]
    model = timm.create_model("test_vit", num_classes=CLASSES, img_size=32)
    for folder in (".", "best", "ema"):
        assert model.load_state_dict(read_weights(learned / folder / "model.safetensors"), strict=True)
    assert not same(learned / "model.safetensors", learned / "ema" / "model.safetensors")


def test_it_learns_and_is_evaluated_reduced_and_trained_further(photos, learned, call, tmp_path):
    weights = ["test_vit", *SMALL[:5], "--weights", learned / "model.safetensors"]
    code, found = call("eval", *weights, "--data", photos / "val")
    assert code == 0 and found["top1"] > 70 and found["images"] == CLASSES * PHOTOS
    assert [line for line in lines(learned) if "top1" in line][-1]["top1"] == found["top1"]

    train = ["--method", "tnt", "--at", 2, "--epochs", 1, "--batch-size", 20]
    assert call("train", *weights, "--data", photos / "train", "--out", tmp_path / "tnt", *train)[0] == 0
    code, reduced = call("eval", *weights, "--data", photos / "val", "--reducer", tmp_path / "tnt")
    assert code == 0 and reduced["top1"] > 50 and reduced["macs"] < found["macs"]


def test_weights_bring_their_number_of_classes(learned):
    assert load_model("test_vit", learned / "best" / "model.safetensors", img_size=(32, 32)).num_classes == CLASSES


def test_every_weight_learns_and_nothing_is_held_twice():
    recipe = changed(scratch(), {"batch_size": 4, "amp": "none", "ema": 0.0})
    model = untrained("test_vit", recipe, CLASSES, img_size=(32, 32))
    trainer = Trainer(model, recipe.training, 10)
    assert trainer.base is None and trainer.average is None
    assert trainer.learned.keys() == base_of(model).state_dict().keys()
    rates = {group["lr_scale"] for group in trainer.optimizer.param_groups}
    assert rates == {1.0}
    before = {name: value.clone() for name, value in base_of(model).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        trainer.step(number + 1, [(torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4))])
    still = [name for name, value in base_of(model).state_dict().items() if torch.equal(value, before[name])]
    assert still == []


def test_a_model_under_the_recipe_is_the_model(tmp_path):
    model = untrained("test_vit", scratch(), CLASSES, img_size=(32, 32)).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert is_reduced(model) and torch.equal(model(images), base_of(model)(images))


def test_weights_begin_as_timm_has_them_for_a_seed():
    state = torch.get_rng_state()
    built = [untrained("test_vit", changed(scratch(), {"seed": seed}), CLASSES) for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    expected = timm.create_model("test_vit", num_classes=CLASSES).state_dict()
    first, second, other = (base_of(model).state_dict() for model in built)
    assert all(torch.equal(first[name], value) and torch.equal(second[name], value) for name, value in expected.items())
    assert not torch.equal(first["head.weight"], other["head.weight"])


# The recipe


def test_the_recipe_is_deits_and_its_rates_go_with_the_batch():
    training = scratch().training
    assert (training.lr, training.backbone_lr) == (5e-4 * 1024 / 512,) * 2
    assert training.warmup * training.epochs == pytest.approx(5) and scratch().augmentation.repeats == 3
    half = changed(scratch(), {"batch_size": 512}).training
    assert (half.lr, half.backbone_lr) == (5e-4,) * 2


def test_a_rate_that_is_given_is_the_models(photos, tmp_path):
    out = tmp_path / "run"
    assert main(command(photos, out, "--epochs", 1, "--lr", 0.5e-3, "--warmup", 0, *PLAIN)) == 0
    assert lines(out)[0]["lr"] == 0.5e-3


# Classes


def test_classes_are_the_folders_unless_it_is_said_otherwise(photos, tmp_path, call):
    assert class_folders(photos / "train") == [f"colour{number}" for number in range(CLASSES)]
    code, found = call(*command(photos, tmp_path / "no", "--num-classes", 7, "--epochs", 1))
    assert code == 1 and "but the model has 7 classes; expected one for each class" in found["error"]
    assert not (tmp_path / "no").exists()


def test_of_a_data_set_the_classes_have_to_be_told(photos):
    names = sorted(path.name for path in (photos / "val").iterdir())
    assert classes_in(str(photos), "train") == classes_in(str(photos / "val")) == (CLASSES, names)
    assert classes_in(str(photos / "val"), given=CLASSES) == (CLASSES, names)
    assert classes_in(str(photos / "val"), given=9) == (9, []) and classes_in("hfds/beans", given=3) == (3, [])
    with pytest.raises(UsageError, match=r"hfds/beans: .* expected their number, --num-classes"):
        classes_in("hfds/beans")
    with pytest.raises(UsageError, match="num_classes=0"):
        classes_in(str(photos), given=0)
    with pytest.raises(UserError, match="no such folder"):
        classes_in(str(photos / "missing"))


def test_imagenet_folders_are_its_classes_where_they_are_to_be(tmp_path, call):
    for number, name in enumerate(("n01443537", "n01440764")):  # goldfish, tench
        (tmp_path / "photos" / "train" / name).mkdir(parents=True)
        for photo in range(2):
            Image.new("RGB", (32, 32), (number * 200, 0, 0)).save(tmp_path / "photos" / "train" / name / f"{photo}.png")
    few = ["--epochs", 1, "--batch-size", 4]
    code, found = call(*command(tmp_path / "photos", tmp_path / "two", *few))
    assert code == 0 and found["classes"] == 2
    code, found = call(*command(tmp_path / "photos", tmp_path / "all", *few, "--num-classes", 1000))
    assert code == 0 and len(read_weights(tmp_path / "all" / "model.safetensors")["head.weight"]) == 1000


# Interrupted, in parts, in several processes


def full(photos, out, *more, epochs=3):
    return command(
        photos, out, "--epochs", epochs, "--micro-batches", 2, "--save-every", 2, *more
    )  # every augmentation


def rank(group, arguments):
    import tntprune.cli.main  # in a process of its own

    assert tntprune.cli.main.main(arguments) == 0


def test_two_processes_with_the_whole_recipe_train_what_one_does(photos, tmp_path):
    val = ["--val", str(photos / "val")]
    assert main(full(photos, tmp_path / "one", *val, epochs=1)) == 0
    together(2, rank, full(photos, tmp_path / "two", *val, epochs=1))
    assert lines(tmp_path / "one") == lines(tmp_path / "two")
    for folder in (".", "best", "ema"):
        assert same(*(tmp_path / name / folder / "model.safetensors" for name in ("one", "two")))


class Ended(Exception):
    pass


def test_it_goes_on_where_it_was_stopped(photos, tmp_path, monkeypatch, call):
    assert main(full(photos, tmp_path / "one")) == 0
    step, seen = Trainer.step, []

    def failing(self, *given):
        seen.append(given)
        if len(seen) == 4:
            raise Ended
        return step(self, *given)

    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises(Ended):
        main(full(photos, tmp_path / "two"))
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["checkpoint.safetensors", "log.jsonl"]
    code, _ = call(*full(photos, tmp_path / "two", "--resume"))
    assert code == 0 and lines(tmp_path / "one") == lines(tmp_path / "two")
    assert same(tmp_path / "one" / "model.safetensors", tmp_path / "two" / "model.safetensors")
    before = (tmp_path / "two" / "model.safetensors").stat().st_mtime_ns
    assert main(full(photos, tmp_path / "two", "--resume")) == 0  # it has ended
    assert (tmp_path / "two" / "model.safetensors").stat().st_mtime_ns == before
    code, found = call(*full(photos, tmp_path / "two", "--resume", "--seed", 1))
    assert code == 2 and "training.seed=0, not 1" in found["error"]


# Refused


def test_a_folder_is_not_trained_in_twice_nor_for_something_else(photos, learned, call):
    code, found = call(*command(photos, learned))
    assert code == 2 and "holds a training already" in found["error"]
    own = ["--weights", learned / "model.safetensors"]
    code, found = call("train", "test_vit", *SMALL, *own, "--data", photos / "train", "--out", learned, "--resume")
    assert code == 1 and "no input is overwritten" in found["error"]
    weights = ["--weights", shutil.copyfile(learned / "model.safetensors", learned.parent / "weights.safetensors")]
    arguments = ["train", "test_vit", *SMALL, *weights, "--data", photos / "train", "--out", learned, "--resume"]
    code, found = call(*arguments)
    assert code == 2 and "was started with" in found["error"]
    with pytest.raises(UserError, match=r"no reduction in it; expected reducer\.safetensors"):
        load_(load_model("test_vit", learned / "model.safetensors", img_size=(32, 32)), learned)


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("deit_tiny_distilled_patch16_224", "such as deit_tiny_patch16_224"),
        ("test_resnet", "is not supported"),
        ("test_vitt", "did you mean"),
    ],
)
def test_a_model_that_cannot_be_trained_from_nothing_is_refused(photos, tmp_path, call, model, word):
    code, found = call("pretrain", model, "--data", photos / "train", "--out", tmp_path / "run")
    assert code in (1, 2) and word in found["error"] and not (tmp_path / "run").exists()


def test_no_options_that_make_no_sense(call):
    code, found = call("pretrain", "test_vit", "--data", ".", "--out", "x", "--backbone-lr", "1")
    assert code == 2 and "backbone-lr" in found["error"]

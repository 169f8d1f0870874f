from __future__ import annotations

import json
import time
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import tntprune.analysis.evaluate as evaluation
from conftest import SMALL, make, photos_for
from tntprune.analysis.evaluate import evaluate, measure
from tntprune.analysis.macs import macs
from tntprune.backbones.digits_vit import digits_vit
from tntprune.data.folders import labelled_photos
from tntprune.data.photo import Photo
from tntprune.demo.digits import scans, scatter
from tntprune.errors import UserError
from tntprune.methods import Random
from tntprune.reduce import reduce_

KEYS = ["images", "skipped", "top1", "top5", "agreement", "macs", "images_per_s", "tokens"]
COUNT = 60


@pytest.fixture(scope="module")
def digits():
    """Pictures as bytes (n, 64, 64), the same normalised (n, 1, 64, 64), and labels with every class among them."""
    images, labels = scans("test")
    chosen = torch.cat([(labels == digit).nonzero()[:6, 0] for digit in range(10)])
    canvas, labels = scatter(images[chosen], labels[chosen], torch.Generator().manual_seed(0))
    pixels = canvas[:, 0].mul(255).round().byte()
    return pixels, (pixels[:, None] / 255 - 0.5) / 0.5, labels


@pytest.fixture(scope="module")
def folder(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    for number, (pixels, label) in enumerate(zip(digits[0], digits[2])):
        (folder / str(label.item())).mkdir(exist_ok=True)
        Image.fromarray(pixels.numpy()).save(folder / str(label.item()) / f"{number:03}.png")
    return folder


def model(config=None):
    built = digits_vit()
    built.pretrained_cfg = {"input_size": (1, 64, 64), "mean": (0.5,), "std": (0.5,), "crop_pct": 1.0}
    return built if config is None else reduce_(built, config)


HALF_BLIND = Random(at=1, tokens=20)  # so that it errs now and then


def in_batches(images, labels, size=16):
    return zip(images.split(size), labels.split(size))


@torch.no_grad()
def by_hand(model, images, labels):
    """Right at first, right among five, and first guesses, one image after the other."""
    first, five, guesses = 0, 0, []
    for image, label in zip(images, labels.tolist()):
        logits = model(image[None])[0].tolist()
        ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
        first += ranked[0] == label
        five += label in ranked[:5]
        guesses.append(ranked[0])
    return first, five, guesses


# Tensors


def test_a_reduced_model_is_counted_exactly(digits):
    _, images, labels = digits
    first, five, guesses = by_hand(model(HALF_BLIND), images, labels)
    same = sum(a == b for a, b in zip(guesses, by_hand(model(), images, labels)[2]))
    found = measure(model(HALF_BLIND), in_batches(images, labels))
    assert 0 < first < five < COUNT and same < COUNT  # or the test would say little
    assert (found.images, found.skipped) == (COUNT, 0)
    assert found.top1 == 100 * first / COUNT
    assert found.top5 == 100 * five / COUNT
    assert found.agreement == 100 * same / COUNT
    assert found.images_per_s > 0


@pytest.mark.parametrize("config", [None, Random(at=1, keep=1.0)])
def test_a_model_that_drops_nothing_agrees_with_itself(digits, config):
    _, images, labels = digits
    first, five, _ = by_hand(model(), images, labels)
    found = measure(model(config), in_batches(images, labels), compare=True)
    assert (found.top1, found.top5, found.agreement) == (100 * first / COUNT, 100 * five / COUNT, 100)
    assert found.base is not None and found.base.top1 == found.top1


@pytest.mark.parametrize("config", [None, HALF_BLIND, Random(at=(2, 4), keep=(0.5, 0.25))])
def test_tokens_and_macs_are_those_that_are_counted(digits, config):
    _, images, labels = digits
    counted = macs(model(config))
    found = measure(model(config), in_batches(images, labels), compare=True)
    assert (found.macs, found.tokens) == (counted.macs, counted.tokens)
    assert found.base is not None and found.base.macs == counted.base_macs


def test_compare_gives_the_unpruned_model_and_the_speedup(digits):
    _, images, labels = digits
    first, five, _ = by_hand(model(), images, labels)
    found = measure(model(HALF_BLIND), in_batches(images, labels), compare=True)
    assert found.base is not None and found.speedup is not None
    assert (found.base.top1, found.base.top5) == (100 * first / COUNT, 100 * five / COUNT)
    alone = measure(model(HALF_BLIND), in_batches(images, labels))
    assert (alone.base, alone.speedup) == (None, None)
    assert (alone.top1, alone.agreement) == (found.top1, found.agreement)


def test_the_two_models_take_turns_in_going_first(digits):
    _, images, labels = digits
    pruned, entered = model(HALF_BLIND), []
    pruned.norm.register_forward_hook(lambda module, args, out: entered.append(out.shape[1]))
    measure(pruned, in_batches(images, labels, 20), compare=True)
    whole, few = 65, 21
    assert entered == [whole, whole, few, few, few, whole, whole, few]  # each has one pass to warm up


def test_speed_is_that_of_the_median_batch(digits, monkeypatch):
    _, images, labels = digits
    took = [3, 1, 2, 4, 100, 1]  # base and own, own and base, base and own
    clock = accumulate(seconds for each in took for seconds in (0, each))
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = measure(model(HALF_BLIND), in_batches(images, labels, 20), compare=True)
    assert found.base is not None
    assert (found.images_per_s, found.base.images_per_s, found.speedup) == pytest.approx((20 / 1, 20 / 4, 3 / 1))


def test_the_batches_do_not_matter(digits):
    _, images, labels = digits
    several, one = (measure(model(HALF_BLIND), in_batches(images, labels, size)) for size in (7, COUNT))
    for name in ("images", "top1", "top5", "agreement", "tokens"):
        assert getattr(several, name) == getattr(one, name)


def test_waiting_for_images_does_not_count(digits):
    _, images, labels = digits

    def slow():
        for batch in in_batches(images, labels, 30):
            time.sleep(0.6)
            yield batch

    assert measure(model(HALF_BLIND), slow()).images_per_s > COUNT / 1.2


def test_the_model_is_not_touched(digits):
    _, images, labels = digits
    pruned = model(HALF_BLIND)
    before = {name: value.clone() for name, value in pruned.state_dict().items()}
    measure(pruned, in_batches(images, labels), compare=True)
    assert all(torch.equal(before[name], value) for name, value in pruned.state_dict().items())
    assert not any(module.training for module in pruned.modules())
    assert measure(pruned, in_batches(images, labels)).tokens == [64, 20, 20, 20, 20, 20]


@pytest.mark.parametrize("classes", [1, 2, 4, 5])
def test_fewer_than_five_classes_or_just_five(classes):
    few = VisionTransformer(**{**SMALL, "num_classes": classes}).eval()
    images, labels = photos_for(few, 12), torch.arange(12) % classes
    found = measure(few, in_batches(images, labels, 5))
    assert found.top5 == 100
    assert found.top1 == 100 * by_hand(few, images, labels)[0] / 12


@pytest.mark.parametrize("kind", ["distilled", "no_cls", "registers"])
def test_other_backbones_are_counted_exactly(kind):
    images, labels = photos_for(make(kind), 14), torch.arange(14) % 7
    pruned = reduce_(make(kind), Random(at=2, tokens=9))
    first, five, guesses = by_hand(pruned, images, labels)
    found = measure(pruned, in_batches(images, labels, 5))
    same = sum(a == b for a, b in zip(guesses, by_hand(make(kind), images, labels)[2]))
    assert (found.top1, found.top5, found.agreement) == (100 * first / 14, 100 * five / 14, 100 * same / 14)


def test_no_image_is_an_error():
    with pytest.raises(UserError, match="no image could be read, 3 were skipped"):
        measure(model(), [], ["a", "b", "c"])


# Folders


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_gives_what_its_pixels_give(digits, folder, workers):
    _, images, labels = digits
    built = model(HALF_BLIND)
    found = evaluate(built, labelled_photos(folder, built), batch_size=16, workers=workers, progress=False)
    expected = measure(built, in_batches(images, labels))
    assert found.bad == ()
    for name in ("images", "skipped", "top1", "top5", "agreement", "macs", "tokens"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.fixture
def broken(tmp_path):
    """A file that is no image, and one cut short."""
    (tmp_path / "text.png").write_text("not an image")
    Image.new("L", (64, 64), 77).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:-20])
    return [Photo(tmp_path / "text.png", 3), Photo(tmp_path / "cut.png", 4)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("which", [0, 1])
def test_an_image_that_cannot_be_read_is_named(folder, broken, which, workers):
    built = model()
    photos = labelled_photos(folder, built)
    photos.insert(50, broken[which])
    with pytest.raises(UserError) as caught:
        evaluate(built, photos, batch_size=16, workers=workers, progress=False)
    assert str(broken[which].path) in str(caught.value) and "--on-bad-image skip" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_skipped_images_are_counted_and_named_and_change_nothing_else(digits, folder, broken, workers):
    _, images, labels = digits
    built = model(HALF_BLIND)
    photos = labelled_photos(folder, built)
    photos[5:5], photos[40:40] = [broken[0]], [broken[1]]
    options = {"batch_size": 16, "workers": workers, "on_bad_image": "skip", "progress": False}
    found = evaluate(built, photos, **options)
    expected = measure(built, in_batches(images, labels))
    assert (found.images, found.skipped) == (COUNT, 2)
    assert [str(photo.path) in line for photo, line in zip(broken, found.bad, strict=True)] == [True, True]
    assert (found.top1, found.top5, found.agreement) == (expected.top1, expected.top5, expected.agreement)


def test_a_whole_batch_of_broken_images_is_skipped(folder, broken):
    built = model()
    photos = [*broken, *labelled_photos(folder, built)[:3]]
    found = evaluate(built, photos, batch_size=2, workers=0, on_bad_image="skip", progress=False)
    assert (found.images, found.skipped) == (3, 2)


def test_nothing_but_broken_images_is_an_error(broken):
    with pytest.raises(UserError, match="no image could be read, 2 were skipped"):
        evaluate(model(), broken, workers=0, on_bad_image="skip", progress=False)


def test_the_bar_counts_every_image_on_standard_error(folder, broken, capsys):
    built = model()
    evaluate(built, [*broken, *labelled_photos(folder, built)], workers=0, on_bad_image="skip")
    out, err = capsys.readouterr()
    assert out == "" and "62/62" in err


# JSON


@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("config", [None, HALF_BLIND])
def test_json_has_these_keys(digits, config, compare):
    _, images, labels = digits
    found = measure(model(config), in_batches(images, labels), compare=compare)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert list(data) == KEYS + ["base", "speedup"] * compare
    if compare:
        assert list(data["base"]) == ["top1", "top5", "macs", "images_per_s"]
    assert data["images"] == COUNT and data["tokens"] == found.tokens

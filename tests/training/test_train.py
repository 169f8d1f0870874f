from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch.utils.data import DataLoader, TensorDataset

from conftest import SMALL, make, photos_for
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.backbones.digits_vit import digits_vit
from tntprune.data.batches import TensorSource, chosen
from tntprune.demo.digits import cluttered_digits
from tntprune.errors import UsageError, UserError
from tntprune.methods import TNT, Random
from tntprune.reduce import reduce_
from tntprune.training.calibrate import calibrate_, fit
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer, learning

KINDS = ["plain", "distilled", "no_cls", "map_pool"]
COUNT = 6  # images in these tests
QUICK = {"epochs": 2, "batch_size": 2, "progress": False}
LABELS = torch.tensor([0, 6, 3, 1, 5, 2])


def reduced(kind="plain", **options):
    """A model whose scorers all learn in every step, unless told otherwise."""
    return reduce_(make(kind), TNT(**{"recipe": "relative", "noise_at": "all", **options}))


def images_for(model):
    return photos_for(model, COUNT)


def scorers(model):
    return {name: value.detach().clone() for name, value in model.reduction.named_parameters()}


def base_state(model):
    return {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("reduction.")}


def base_parameters(model):
    return [value for name, value in model.named_parameters() if not name.startswith("reduction.")]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def changed(before, after):
    """Every weight is another one, and finite. (A linear scorer's bias has no gradient: softmax does not see it.)"""
    weights = [name for name in before if name.endswith("weight")]
    return weights and all(after[n].isfinite().all() and not torch.equal(before[n], after[n]) for n in weights)


def photos(folder: Path, model, classes: int = 0) -> Path:
    """Random photos in a flat folder or in class folders; the model gets timm's description of its input."""
    model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    pixels = np.random.default_rng(0).integers(0, 256, (max(COUNT, classes), 40, 48, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        place = folder / f"class{number % classes}" if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place / f"{number}.png")
    return folder


# What is trained, and what is not


RECIPES = ["relative", "paper", "merge"]


@pytest.mark.parametrize(
    ("kind", "recipe", "objective"),
    [
        pytest.param(kind, recipe, objective, marks=[pytest.mark.wide] * ((number + turn + half) % 4 > 0))
        for number, kind in enumerate(KINDS)
        for turn, recipe in enumerate(RECIPES)
        for half, objective in enumerate(("kl", "ce"))
    ],
)
def test_the_scorers_change_and_the_model_does_not(kind, recipe, objective):
    model = reduced(kind, recipe=recipe, objective=objective)
    before, base = scorers(model), base_state(model)
    assert calibrate_(model, images_for(model), LABELS, **QUICK) is model
    assert changed(before, scorers(model))
    assert same(base, base_state(model))


@pytest.mark.parametrize(
    "options",
    [
        {"scorer": "mlp"},
        {"noise_blocks": 3},
        {"capacity": "drawn"},
        {"at": (3, 4), "similar": 5},
        {"noise_at": "one", "noise_blocks": 2, "at": 2},
    ],
)
def test_every_kind_of_scorer_learns(options):
    model = reduced(**options)
    before, base = scorers(model), base_state(model)
    calibrate_(model, images_for(model), **QUICK)
    assert changed(before, scorers(model)) and same(base, base_state(model))


def test_in_training_only_scorers_get_gradients():
    model = reduced()
    base, steps = base_parameters(model), []

    def after(step, loss, trainer):
        assert all(not p.requires_grad and p.grad is None for p in base)
        assert all(p.requires_grad and p.grad is not None for p in model.reduction.parameters())
        trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in trained} == {id(p) for p in model.reduction.parameters()}
        assert model.reduction.training and not any(m.training for m in model.blocks.modules())
        steps.append(step)

    fit(
        model,
        TensorSource(images_for(model), None, 2, 0),
        Training(epochs=2, batch_size=2),
        after=after,
        progress=False,
    )
    assert steps == [1, 2, 3, 4, 5, 6]
    assert all(p.grad is None for p in model.parameters())


def test_without_epochs_few_photos_come_again_until_there_are_enough_steps(monkeypatch):
    monkeypatch.setattr("tntprune.training.config.STEPS", 7)
    model, steps = reduced(), []
    source = TensorSource(images_for(model), None, 2, 0)
    assert source.per_epoch == 3
    fit(model, source, Training(batch_size=2), after=lambda step, *_: steps.append(step), progress=False)
    assert steps == list(range(1, 10))


@pytest.mark.parametrize("others", [(), (Random(at=5, keep=0.4),)], ids=["alone", "combined"])
def test_where_many_blocks_learn_there_are_more_steps(monkeypatch, others):
    monkeypatch.setattr("tntprune.training.config.STEPS", 6)
    monkeypatch.setattr("tntprune.training.config.TOGETHER", 2)
    lengths = {}
    for blocks in ((2,), (1, 2), (1, 2, 3, 4)):
        model = reduce_(make("plain"), TNT(at=blocks, keep=0.5), *others)
        source = TensorSource(images_for(model), None, 2, 0)
        steps = []
        fit(model, source, Training(batch_size=2), after=lambda step, *_, s=steps: s.append(step), progress=False)
        lengths[blocks] = len(steps)
    assert lengths == {(2,): 6, (1, 2): 6, (1, 2, 3, 4): 12}


def test_where_one_block_is_noisy_its_scorer_alone_gets_gradients():
    model = reduced(noise_at="one", noise_blocks=(2, 4), at=2)
    learning = []

    def after(step, loss, trainer):
        weights = {block: scorer.layers[0].weight for block, scorer in model.reduction.scorers.items()}
        learning.append([block for block, weight in weights.items() if weight.grad is not None])

    fit(
        model,
        TensorSource(images_for(model), None, 1, 0),
        Training(epochs=5, batch_size=1),
        after=after,
        progress=False,
    )
    assert {len(blocks) for blocks in learning} == {1} and {blocks[0] for blocks in learning} == {"2", "4"}


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_flags_are_as_before(fails):
    model = reduced().train()
    model.blocks[2].eval()
    model.head.requires_grad_(False)
    model.reduction.scorers["2"].requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    images = images_for(model)
    if fails:
        with pytest.raises(UserError, match=r"step 1: .* images hold NaN"):
            calibrate_(model, images * math.nan, **QUICK)
    else:
        calibrate_(model, images, **QUICK)
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())


def test_random_generators_are_as_before(tmp_path):
    model = reduced()
    folder = photos(tmp_path, model)
    for data, extra in [(images_for(model), {}), (folder, {"workers": 0}), (folder, {"workers": 1})]:
        torch.manual_seed(5)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        calibrate_(model, data, **QUICK, **extra)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.parametrize(("noise_blocks", "first"), [(None, 1), (3, 3), ((2, 4), 2), (0, 0)])
def test_blocks_before_the_first_noise_run_without_a_graph(noise_blocks, first):
    model = reduced(at=first, noise_blocks=noise_blocks)
    graphs = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: graphs.append(out.requires_grad))
    with learning(model):
        model(images_for(model))
    assert graphs == [number > first for number in range(1, 7)]


def test_blocks_before_the_drawn_noise_run_without_a_graph():
    model = reduced(noise_at="one", noise_blocks=(2, 4), at=2)
    graphs = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: graphs.append(out.requires_grad))
    with learning(model):
        for _ in range(20):
            model(images_for(model)[:1])
    passes = {tuple(graphs[start : start + 6]) for start in range(0, 120, 6)}
    assert passes == {tuple(number > first for number in range(1, 7)) for first in (2, 4)}


def test_random_drop_has_nothing_to_train():
    model = reduce_(make("plain"), Random())
    with pytest.raises(UserError, match="random has nothing to train"):
        calibrate_(model, images_for(model), **QUICK)
    with pytest.raises(UserError, match="not reduced"):
        calibrate_(make("plain"), images_for(model), **QUICK)


# The losses


@pytest.mark.parametrize("kind", ["plain", "distilled"])
def test_kl_is_the_divergence_from_the_unpruned_model(kind):
    model, images = reduced(kind), photos_for(make(kind), 4)
    with torch.no_grad():
        p = make(kind)(images).softmax(1)
    with learning(model):
        trainer = Trainer(model, Training(), 1)
        torch.manual_seed(3)
        loss = trainer.loss(images, None)
        torch.manual_seed(3)
        q = model(images).softmax(1)
    by_hand = (p * (p / q).log()).sum() / 4
    torch.testing.assert_close(loss, by_hand, rtol=1e-4, atol=1e-7)
    assert loss > 0


def test_without_noise_nothing_diverges():
    model = reduced(beta=1e-9)
    with learning(model):
        assert Trainer(model, Training(), 1).loss(images_for(model), None).abs() < 1e-6


def test_cross_entropy_of_a_distilled_model_is_that_of_the_cls_head():
    model, images = reduced("distilled", objective="ce"), images_for(make("distilled"))
    seen = []
    model.norm.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    with learning(model):
        trainer = Trainer(model, Training(), 1)
        torch.manual_seed(3)
        loss = trainer.loss(images, LABELS)
        logits = seen[0][:, 0] @ model.head.weight.T + model.head.bias
        by_hand = (logits.exp().sum(1).log() - logits[torch.arange(COUNT), LABELS]).mean()
        torch.testing.assert_close(loss, by_hand)
        model.head_dist.weight.mul_(5)  # the distillation head has no say
        torch.manual_seed(3)
        assert torch.equal(loss, trainer.loss(images, LABELS))
        model.head.weight.mul_(5)
        torch.manual_seed(3)
        assert not torch.equal(loss, trainer.loss(images, LABELS))


def test_the_divergence_falls_on_digits():
    images, others = cluttered_digits("train")[0][:384].split((256, 128))
    model = reduce_(digits_vit(), TNT(at=2, tokens=16, recipe="relative"))

    def divergence():
        with learning(model), torch.no_grad():
            trainer, losses = Trainer(model, Training(), 1), []
            for number, batch in enumerate(others.split(64)):
                torch.manual_seed(number)  # the same noise each time
                losses.append(trainer.loss(batch, None).item())
        return sum(losses) / len(losses)

    before = divergence()
    calibrate_(model, images, epochs=2, batch_size=32, lr=0.02, progress=False)
    assert divergence() < 0.25 * before


@pytest.mark.parametrize("objective", ["kl", "ce"])
@pytest.mark.parametrize("recipe", ["relative", "paper"])
def test_bf16_trains_scorers_in_fp32(recipe, objective):
    model = reduced(recipe=recipe, objective=objective)
    before, base, seen = scorers(model), base_state(model), set()
    model.head.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    calibrate_(model, images_for(model), LABELS, amp="bf16", **QUICK)
    assert seen == {torch.bfloat16}
    assert changed(before, scorers(model)) and same(base, base_state(model))
    assert {value.dtype for value in scorers(model).values()} == {torch.float32}


def test_the_rate_rises_and_falls_to_a_hundredth():
    model, rates = reduced(), []
    training = Training(epochs=10, batch_size=2, lr=0.5, warmup=0.2)  # 30 steps, 6 of them to warm up
    fit(
        model, TensorSource(images_for(model), None, 2, 0), training, progress=False,
        after=lambda step, loss, trainer: rates.append(trainer.optimizer.param_groups[0]["lr"]),
    )  # fmt: skip
    assert rates[0] == pytest.approx(0.005)
    assert np.diff(rates[:6]) == pytest.approx(0.495 / 6)
    assert 0.4 < max(rates) <= 0.5 and rates.index(max(rates)) in (5, 6)
    assert (np.diff(rates[7:]) < 0).all() and rates[-1] == pytest.approx(0.005, abs=0.005)


# Where the images come from


def test_a_loader_that_gives_the_same_batches_trains_the_same_scorers():
    by_tensor = reduced(objective="ce")
    images = images_for(by_tensor)
    calibrate_(by_tensor, images, LABELS, **{**QUICK, "epochs": 1})
    order = [chosen(COUNT, 2, 0, step)[1] for step in range(3)]
    by_loader = reduced(objective="ce")
    calibrate_(by_loader, DataLoader(TensorDataset(images, LABELS), batch_sampler=order), epochs=1, progress=False)
    assert same(scorers(by_tensor), scorers(by_loader))


def test_kl_needs_no_labels_and_ignores_them():
    images = images_for(make("plain"))
    sets = [images, TensorDataset(images), TensorDataset(images, LABELS)]
    data = [images, *(DataLoader(s, batch_size=2) for s in sets)]
    trained = [scorers(calibrate_(reduced(), source, **QUICK)) for source in data]
    with_labels = scorers(calibrate_(reduced(), images, LABELS, **QUICK))
    assert same(trained[0], with_labels)
    assert same(trained[1], trained[2]) and same(trained[1], trained[3])
    assert changed(scorers(reduced()), trained[1])


def test_a_loader_is_gone_through_once_an_epoch():
    images = images_for(make("plain"))
    taken = []

    def noting(batch):
        taken.append(len(batch))
        return torch.stack(batch)

    calibrate_(reduced(), DataLoader(images, batch_size=4, collate_fn=noting), **{**QUICK, "epochs": 3})
    assert taken == [4, 2] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_of_photos_trains(tmp_path, workers):
    model = reduced()
    folder = photos(tmp_path, model)
    before, base = scorers(model), base_state(model)
    calibrate_(model, str(folder), workers=workers, **QUICK)
    assert changed(before, scorers(model)) and same(base, base_state(model))


def test_a_folder_of_classes_trains_against_labels(tmp_path):
    model = reduced(objective="ce")
    folder = photos(tmp_path, model, classes=7)
    calibrate_(model, folder, workers=0, **QUICK)
    assert changed(scorers(reduced()), scorers(model))


def test_the_number_of_workers_does_not_matter(tmp_path):
    trained = []
    for workers in (0, 1, 2):
        model = reduced()
        calibrate_(model, photos(tmp_path, model), workers=workers, **QUICK)
        trained.append(scorers(model))
    assert same(trained[0], trained[1]) and same(trained[0], trained[2])


def test_fewer_images_than_a_batch_are_enough():
    model = reduced()
    calibrate_(model, images_for(model)[:1], epochs=1, progress=False)
    assert changed(scorers(reduced()), scorers(model))


@pytest.mark.parametrize("source", ["tensor", "loader", "folder"])
def test_cross_entropy_needs_labels(source, tmp_path):
    model = reduced(objective="ce")
    images = images_for(model)
    data = {"tensor": images, "loader": DataLoader(images), "folder": photos(tmp_path, model)}[source]
    with pytest.raises(
        UserError, match="not in a class folder" if source == "folder" else "cross-entropy needs labels"
    ):
        calibrate_(model, data, **QUICK)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (torch.zeros(0, 3, 32, 32), "n > 0"),
        (torch.zeros(3, 32, 32), "images of shape"),
        ("/no/such/folder", "no such folder"),
        ([], "the loader is empty"),
        (iter([torch.zeros(1, 3, 32, 32)]), "has no length"),
        (5, "has no length"),
    ],
)
def test_data_that_cannot_be_used_is_refused(data, word):
    with pytest.raises(UserError, match=word):
        calibrate_(reduced(), data, **QUICK)


def test_labels_of_another_number_are_refused():
    with pytest.raises(UserError, match="labels of shape"):
        calibrate_(reduced(objective="ce"), images_for(make("plain")), LABELS[:3], **QUICK)


# Options and seeds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0), ("epochs", 1.5), ("epochs", True), ("epochs", "3"),
        ("batch_size", 0), ("batch_size", 2.5),
        ("lr", 0), ("lr", -1.0), ("lr", math.nan), ("lr", math.inf), ("lr", "fast"),
        ("weight_decay", -0.1), ("weight_decay", math.nan), ("weight_decay", math.inf),
        ("warmup", 1), ("warmup", -0.1), ("warmup", math.nan),
        ("seed", -1), ("seed", 0.5), ("seed", 2**64),
        ("amp", "fp8"), ("workers", -1), ("workers", 1.5), ("epoch", 3), ("learning_rate", 0.1),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_in_one_line(name, value, tmp_path):
    model = reduced()
    before = scorers(model)
    with pytest.raises(UsageError) as caught:
        calibrate_(model, photos(tmp_path, model), **{name: value})
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert same(before, scorers(model))


@pytest.mark.parametrize("recipe", ["relative", "paper"])
def test_one_seed_one_result(recipe):
    images = images_for(make("plain"))

    def train(seed, noise=0):
        torch.manual_seed(noise)
        return scorers(calibrate_(reduced(recipe=recipe, objective="kl"), images, seed=seed, **QUICK))

    assert same(train(0), train(0, noise=1))
    assert not same(train(0), train(1))
    assert changed(train(0), train(2**32 - 1))


def test_a_shuffling_loader_follows_the_seed():
    images = images_for(make("plain"))

    def train(seed, noise):
        torch.manual_seed(noise)
        return scorers(calibrate_(reduced(), DataLoader(images, batch_size=2, shuffle=True), seed=seed, **QUICK))

    assert same(train(0, noise=0), train(0, noise=1))
    assert not same(train(0, noise=0), train(1, noise=0))


def test_the_bar_goes_to_standard_error(capsys):
    model = reduced()
    calibrate_(model, images_for(model), epochs=1, batch_size=2)
    out, err = capsys.readouterr()
    assert out == "" and "training: 100%" in err
    calibrate_(model, images_for(model), **QUICK)
    assert capsys.readouterr() == ("", "")


def test_training_again_goes_on_from_where_the_scorers_are():
    model = reduced()
    images = images_for(model)
    once = scorers(calibrate_(model, images, **QUICK))
    twice = scorers(calibrate_(model, images, **QUICK))
    assert not same(once, twice)
    assert same(base_state(make("plain")), base_state(base_of(model)))


def test_a_model_that_pools_nothing_is_refused():
    model = VisionTransformer(**{**SMALL, "global_pool": ""})
    reduce_(model, TNT(at=2, keep=0.5))
    with pytest.raises(UserError, match="the model pools nothing"):
        calibrate_(model, torch.randn(4, 3, 32, 32), progress=False)


def test_labels_that_are_no_classes_are_refused():
    model = reduce_(make("plain"), TNT(at=2, keep=0.5, objective="ce"))
    with pytest.raises(UserError, match="labels from 0 to 7; the model has classes 0 to 6"):
        calibrate_(model, photos_for(model, 2), torch.tensor([0, 7]), progress=False)
    with pytest.raises(UsageError, match="labels go with a tensor of images"):
        calibrate_(model, [photos_for(model, 2)], torch.tensor([0, 6]), progress=False)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_trains_where_gradients_are_off_around_it(context):
    model = reduce_(make("plain"), TNT(at=2, keep=0.5))
    images = photos_for(model, 4)
    before = [p.clone() for p in reduction_of(model).parameters()]
    with context():
        calibrate_(model, images, epochs=1, batch_size=2, progress=False)
    assert any(not torch.equal(a, b) for a, b in zip(before, reduction_of(model).parameters()))


def test_gradients_that_were_there_are_still_there():
    model = reduce_(make("plain"), TNT(at=2, keep=0.5))
    images = photos_for(model, 4)
    model(images).sum().backward()
    before = model.head.weight.grad.clone()
    calibrate_(model, images, epochs=1, batch_size=2, progress=False)
    assert torch.equal(model.head.weight.grad, before)

"""The options of a training, and the recipes that fill them in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tntprune import ATS, DTEM, TNT, AViT, DiffRate, DynamicViT, EViT, Random, UsageError
from tntprune.data.augment import AUTHORS, LIGHT
from tntprune.training.config import MAX_MICRO_BATCHES, MAX_SEED, STEPS, TOGETHER, Training
from tntprune.training.recipes import Recipe, changed, published, scratch, short


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"epochs": 0}, "epochs=0: expected a whole number from 1 to 1000000"),
        ({"batch_size": None}, "batch_size=None: expected a whole number from 1 to 65536"),
        ({"batch_size": 8.0}, "batch_size=8: expected a whole number from 1 to 65536"),
        ({"seed": True}, "seed=True: expected a whole number from 0 to 4294967295"),
        ({"micro_batches": 0}, "micro_batches=0: expected a whole number from 1 to 512"),
        ({"micro_batches": 3}, "micro_batches=3: batch_size=16 is no multiple of it"),
        ({"clip": 0.0}, "clip=0: expected a number above 0 to 1e+06"),
        ({"clip": "1"}, "clip=1: expected a number above 0 to 1e+06"),
        ({"ema": 1.0}, "ema=1: expected a number from 0 to below 1"),
        ({"drop_path": -0.1}, "drop_path=-0.1: expected a number from 0 to below 1"),
        ({"warmup_lr": -1.0}, "warmup_lr=-1: expected a number from 0 to 1000"),
        ({"min_lr": float("nan")}, "min_lr=nan: expected a number from 0 to 1000"),
        ({"lr": 1e-13}, "lr=1e-13: expected a rate from 1e-12 to 1000"),
        ({"unfreeze": "tail"}, "unfreeze='tail': expected one of 'all', 'head', 'norms', 'lowrank'"),
        ({"unfreeze": "norms", "distill": 2}, "distill=2: expected a number from 0 to 1"),
        (
            {"freeze_epochs": 1},
            "freeze_epochs=1: without backbone_lr the model is frozen throughout; expected backbone_lr above 0",
        ),
        ({"amp": "fp8"}, "amp='fp8': expected one of 'auto', 'none', 'bf16', 'fp16'"),
    ],
)
def test_what_is_out_of_range_is_refused(options, told):
    with pytest.raises(UsageError) as caught:
        Training(**options)
    assert str(caught.value) == told


@given(
    seeds=st.tuples(st.integers(0, MAX_SEED), st.integers(0, MAX_SEED)),
    steps=st.tuples(st.integers(0, 999_999), st.integers(0, 999_999)),
    parts=st.tuples(st.integers(0, MAX_MICRO_BATCHES - 1), st.integers(0, MAX_MICRO_BATCHES - 1)),
)
def test_no_two_micro_batches_of_a_training_draw_the_same(seeds, steps, parts):
    drawn = [Training(seed=seed).seed_of(step, part) for seed, step, part in zip(seeds, steps, parts, strict=True)]
    assert (drawn[0] == drawn[1]) == (seeds[0] == seeds[1] and steps[0] == steps[1] and parts[0] == parts[1])
    torch.Generator().manual_seed(drawn[0])  # it takes no more than 64 bits


def test_what_was_left_open_is_decided():
    training = Training(amp="auto")
    assert training.on(torch.device("cpu")).amp in ("none", "bf16") and training.micro_batches is None
    assert training.among(4).micro_batches == 4
    assert replace(training, micro_batches=8).among(4).micro_batches == 8


@given(st.integers(1, 10_000))
def test_few_photos_come_as_often_as_many_steps_need(steps):
    passes = Training().passes(steps)
    assert passes * steps >= STEPS > (passes - 1) * steps
    assert Training(epochs=7).passes(steps) == 7


@given(st.integers(1, 10_000), st.integers(1, 50))
def test_each_of_many_blocks_gets_steps_of_its_own(steps, learners):
    wanted = max(STEPS, STEPS * learners // TOGETHER)
    passes = Training().passes(steps, learners)
    assert passes * steps >= wanted > (passes - 1) * steps
    assert Training(epochs=7).passes(steps, learners) == 7
    assert Training(unfreeze="norms").passes(steps, learners) == Training().passes(steps)  # they learn nothing then


# Recipes


def test_tnt_is_trained_as_its_authors_command_says():
    recipe = published(TNT())
    training = recipe.training
    assert recipe.config.resolved.objective == "ce" and recipe.config.resolved.beta == 0.02
    assert (training.epochs, training.batch_size, training.weight_decay) == (40, 8 * 256, 0.05)
    assert training.lr == pytest.approx(5e-4 * 2048 / 512) and (training.warmup_lr, training.min_lr) == (1e-6, 1e-5)
    assert training.warmup * training.epochs == 5 and training.clip is None and training.backbone_lr == 0
    assert (training.ema, training.drop_path, training.label_smoothing) == (0.99996, 0.1, 0.1)
    assert recipe.augmentation == AUTHORS and recipe.augmentation.repeats == 3


@pytest.mark.parametrize("config", [TNT(), DynamicViT(), EViT(), AViT()], ids=lambda config: config.method)
def test_every_learned_method_has_both_recipes(config):
    assert published(config).training.epochs >= 30
    assert (short(config).training.epochs or 0) <= 5 and short(config).augmentation == LIGHT


def test_the_rates_go_with_the_batch_where_the_code_has_it_so():
    recipe = changed(published(TNT()), {"batch_size": 512, "epochs": None})
    assert recipe.training.lr == pytest.approx(5e-4) and recipe.training.epochs == 40
    assert changed(published(TNT()), {"batch_size": 512, "lr": 0.1}).training.lr == 0.1
    assert changed(published(DynamicViT()), {"batch_size": 128}).training.lr == published(DynamicViT()).training.lr
    assert changed(published(EViT()), {"batch_size": 512}).training.backbone_lr == pytest.approx(2e-5)


def test_no_rate_ends_above_the_peak_of_a_small_batch():
    training = changed(scratch(), {"batch_size": 8}).training
    assert training.lr == pytest.approx(5e-4 * 8 / 512) and training.min_lr == training.lr
    assert changed(scratch(), {"batch_size": 8, "min_lr": 1e-3}).training.min_lr == 1e-3


def test_options_of_the_images_are_changed_too():
    recipe = changed(Recipe(TNT(), Training()), {"mixup": 0.5, "epochs": 2, "repeats": 3, "lr": None})
    assert (recipe.augmentation.mixup, recipe.augmentation.repeats, recipe.training.epochs) == (0.5, 3, 2)
    with pytest.raises(UsageError, match="repeats=0"):
        changed(recipe, {"repeats": 0})


def test_methods_that_learn_with_the_defaults_have_a_short_recipe():
    for config in (DTEM(), DiffRate(budget=0.6)):
        assert short(config) == Recipe(config, Training())
        with pytest.raises(UsageError, match=f"{config.method} has no published recipe: expected --preset short"):
            published(config)
    with pytest.raises(UsageError, match=r"diffrate has no short recipe: expected .*, and a budget"):
        short(DiffRate(keep=0.9))


@pytest.mark.parametrize("make", [published, short])
@pytest.mark.parametrize("config", [Random(), ATS()], ids=lambda config: config.method)
def test_what_learns_nothing_has_no_recipe(make, config):
    with pytest.raises(UsageError, match="nothing of it is trained on a pretrained model; expected tnt, dynamicvit"):
        make(config)

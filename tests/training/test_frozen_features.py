"""What a frozen model makes of images in memory is worked out once, and the training learns the same."""

from __future__ import annotations

import pytest
import torch

from conftest import make
from hf_models import make as make_hf
from tntprune import DTEM, TNT, DiffRate, DynamicViT, ToMe, calibrate_, reduce_
from tntprune.data.batches import TensorSource
from tntprune.training import trainer as trainers
from tntprune.training.calibrate import fit
from tntprune.training.config import Training
from tntprune.training.trainer import Trainer, learning

OPTIONS = Training(epochs=3, batch_size=4, lr=0.01, amp="none", seed=1)


def images_for(model, count=10):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def learned(kind, config, keep, labels=None, options=OPTIONS):
    model = reduce_(make(kind), config)
    source = TensorSource(images_for(model), labels, options.batch_size, options.seed)
    losses = []
    fit(model, source, options, after=lambda number, loss, _: losses.append(loss), progress=False, keep=keep)
    return losses, {name: value.clone() for name, value in model.reduction.state_dict().items()}


@pytest.mark.parametrize("kind", ["plain", "distilled", "registers", "avg_with_cls", "no_cls", "pre_norm"])
@pytest.mark.parametrize(
    "config",
    [
        TNT(at=2),
        TNT(at=(2, 4), keep=0.6),
        TNT(at=2, metric="mean"),
        TNT(at=3, inside=True),
        TNT(at=2, recipe="relative"),
        TNT(at=2, how="drop", recipe="paper", objective="ce"),
    ],
    ids=str,
)
def test_the_training_learns_the_same_up_to_rounding(kind, config):
    labels = torch.arange(10) % 7 if config.objective == "ce" else None
    losses, state = learned(kind, config, False, labels)
    again, kept = learned(kind, config, True, labels)
    assert again == pytest.approx(losses, rel=1e-3, abs=1e-6)
    for name, value in state.items():
        torch.testing.assert_close(kept[name], value, rtol=5e-3, atol=5e-4)  # steps are 0.01 long


def test_every_block_before_the_first_location_and_the_unpruned_model_run_once_per_image():
    model = reduce_(make("plain"), TNT(at=3))
    runs = [0] * len(model.blocks)

    def count(number):
        def hook(block, arguments, output):
            runs[number] += len(arguments[0])

        return hook

    for number, block in enumerate(model.blocks):
        block.register_forward_hook(count(number))
    calibrate_(model, images_for(model, 8), epochs=3, batch_size=4, amp="none", progress=False)
    assert runs == [8] * 3 + [8 + 3 * 8] * 3


def trainer_of(config, kind="plain", total=6, **options):
    model = reduce_(make(kind), config)
    with learning(model):
        return Trainer(model, Training(amp="none", **options), total), images_for(model)


def test_a_method_that_reads_the_unpruned_models_tokens_keeps_nothing():
    trainer, images = trainer_of(DynamicViT(at=2, keep=0.5))
    assert trainer.features(images, progress=False) is None


@pytest.mark.parametrize("kind", ["dinov3", "rope_mixed"])
def test_positions_of_a_batch_are_not_kept(kind):
    trainer, images = trainer_of(TNT(at=2), kind)
    assert trainer.features(images, progress=False) is None


def test_features_that_do_not_fit_are_not_kept(monkeypatch):
    trainer, images = trainer_of(TNT(at=2))
    found = trainer.features(images, progress=False)
    assert found is not None and len(found) == 10
    monkeypatch.setattr(trainers, "MOST", found.x.nbytes - 1)
    assert trainer.features(images, progress=False) is None


def test_one_epoch_keeps_nothing(monkeypatch):
    monkeypatch.setattr(Trainer, "features", None)  # would fail if it was called
    model = reduce_(make("plain"), TNT(at=2))
    calibrate_(model, images_for(model), epochs=1, batch_size=4, amp="none", progress=False)


def test_a_photo_that_is_not_finite_is_named():
    model = reduce_(make("plain"), TNT(at=2))
    images = images_for(model)
    images[3] = float("nan")
    with pytest.raises(trainers.Diverged, match="1 of 10 images hold NaN or infinity"):
        calibrate_(model, images, epochs=2, batch_size=10, amp="none", progress=False)


def same(make_model, images):
    """Train with and without kept features, and compare what is learned."""
    states = []
    for keep in (False, True):
        model = make_model()
        fit(model, TensorSource(images, None, 3, 1), OPTIONS, progress=False, keep=keep)
        states.append({name: value.clone() for name, value in model.reduction.state_dict().items()})
    first, second = states
    assert first and all(torch.allclose(second[name], value, rtol=5e-3, atol=5e-4) for name, value in first.items())


def test_a_combination_keeps_what_its_learner_leaves_alone():
    model = reduce_(make("plain"), TNT(at=3), ToMe(at=4, r=2))
    assert model.reduction.untouched == 3
    same(lambda: reduce_(make("plain"), TNT(at=3), ToMe(at=4, r=2)), images_for(model))


def test_models_without_classes_keep_their_embeddings():
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    same(lambda: reduce_(make_hf("dinov2"), TNT(at=2)), images)


@pytest.mark.parametrize("config", [DTEM(at=2, r=4), DiffRate(at=(2, 4), budget=0.7)], ids=["dtem", "diffrate"])
def test_methods_that_learn_a_merging_or_counts_learn_the_same(config):
    same(lambda: reduce_(make("plain"), config), images_for(None))

"""A real ViT-Tiny on real photos. Skipped, and saying so, where they are not at hand."""

from __future__ import annotations

import json

import pytest
import torch

from tntprune import TNT, Random, reduce_
from tntprune.analysis.evaluate import evaluate
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.models import load_model
from tntprune.cli.main import main
from tntprune.data.augment import LIGHT
from tntprune.data.batches import PhotoSource
from tntprune.data.folders import labelled_photos
from tntprune.data.loading import Photos
from tntprune.data.transforms import transform_for
from tntprune.training.calibrate import fit
from tntprune.training.config import Training

pytestmark = [pytest.mark.realdata, pytest.mark.slow, pytest.mark.wide]  # minutes each
MODEL = "vit_tiny_patch16_224"


def test_the_unpruned_model_reaches_what_it_is_known_to_reach(data, capsys):
    weights = str(data / f"{MODEL}.safetensors")
    assert main(["eval", MODEL, "--weights", weights, "--data", str(data / "imagenet-val-1300"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 1300 and found["skipped"] == 0
    assert abs(found["top1"] - 82.5) <= 0.3
    assert found["agreement"] == 100 and found["tokens"] == [196] * 12


def test_a_short_training_beats_random_drop_on_photos_it_has_not_seen(data):
    """On calibration photos only: some to train on, others held out."""
    model = load_model(MODEL, data / f"{MODEL}.safetensors")
    photos = labelled_photos(data / "calibration-1000" / "images", model)
    order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(0)).tolist()
    train, held_out = [photos[i] for i in order[:480]], [photos[i] for i in order[480:680]]
    training = Training(epochs=1, batch_size=16)
    reduce_(model, TNT(at=3, keep=0.25))
    fit(model, PhotoSource(Photos(train, transform_for(model, LIGHT)), 16, 0, 1, True), training, progress=False)
    learned = reduction_of(model).state_dict()

    def agreement(config):
        reduce_(model, config)
        if isinstance(config, TNT):
            reduction_of(model).load_state_dict(learned)
        return evaluate(model, held_out, progress=False).agreement

    random = max(agreement(Random(at=3, keep=0.25, order=seed)) for seed in range(2))
    assert agreement(TNT(at=3, keep=0.25)) > random + 5

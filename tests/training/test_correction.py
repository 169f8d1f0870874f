"""Correction in closed form of what a reduced model lacks."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import make, photos_for
from tntprune import (
    TNT,
    Random,
    ToMe,
    UsageError,
    UserError,
    calibrate_,
    load_,
    reduce_,
    restore_,
    save,
)  # fmt: skip
from tntprune.analysis.evaluate import evaluate
from tntprune.backbones.attach import base_of, reduction_of
from tntprune.backbones.base import find_backbone, tower_of
from tntprune.backbones.digits_vit import digits_vit
from tntprune.backbones.replacing import replaced_weights
from tntprune.cli.main import main
from tntprune.demo.digits import cluttered_digits
from tntprune.errors import UserNote
from tntprune.serialization.checkpoint import read
from tntprune.training.ridge import FOLDS, STRENGTHS, Ridge

TOME = ToMe(at=1, keep=0.6)
QUIET = {"correct": "only", "progress": False}


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("reduction.")}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def digits():
    images = cluttered_digits("train")[0]
    return images[:160], images[-200:]


def divergence(model, images):
    with torch.inference_mode():
        whole, own = base_of(model)(images).log_softmax(1), model(images).log_softmax(1)
    return float(F.kl_div(own, whole, reduction="batchmean", log_target=True))


# The regression


def rows(images=12, count=4, width=5, out=3):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(images, count, width, generator=generator)
    truth = torch.randn(width, out, generator=generator)
    residual = features @ truth + 0.7 + torch.randn(images, count, out, generator=generator)
    return features, residual, torch.rand(images, count, generator=generator)


def naive(features, residual, weight, strength):
    """Weighted ridge with a free bias, row by row, by numpy's least squares on stacked rows."""
    a, r, w = (part.double().numpy() for part in (features.flatten(0, 1), residual.flatten(0, 1), weight.flatten()))
    mean, target = w @ a / w.sum(), w @ r / w.sum()
    centred = (a - mean) * np.sqrt(w)[:, None]
    penalty = 0 if strength == 0 else strength * np.mean(np.linalg.eigvalsh(centred.T @ centred))
    stacked = np.vstack([centred, np.sqrt(penalty) * np.eye(a.shape[1])])
    wanted = np.vstack([(r - target) * np.sqrt(w)[:, None], np.zeros((a.shape[1], r.shape[1]))])
    found = np.linalg.lstsq(stacked, wanted, rcond=None)[0]
    return found, target - mean @ found


def test_the_solution_and_its_strength_are_those_of_a_naive_cross_validation():
    features, residual, weight = rows()
    ridge = Ridge(5, 3, torch.device("cpu"))
    ridge.add(features, residual, weight, 0)
    fit = ridge.solve()
    lost, fold = {}, torch.arange(len(features)) % FOLDS
    for strength in STRENGTHS[:-1]:
        lost[strength] = 0.0
        for number in range(FOLDS):
            own, rest = fold == number, fold != number
            matrix, bias = naive(features[rest], residual[rest], weight[rest], strength)
            error = residual[own].double().numpy() - features[own].double().numpy() @ matrix - bias
            lost[strength] += float((weight[own].numpy()[:, :, None] * error**2).sum())
    best = min(lost, key=lost.get)
    assert fit.strength == best
    matrix, bias = naive(features, residual, weight, best)
    np.testing.assert_allclose(fit.weight.numpy(), matrix, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(fit.bias.numpy(), bias, rtol=1e-8, atol=1e-10)
    whole = float((weight[:, :, None] * residual**2).sum())
    assert fit.explained == pytest.approx(1 - lost[best] / whole, rel=1e-5)


def test_how_images_are_batched_makes_no_difference():
    features, residual, weight = rows()
    whole, parts = Ridge(5, 3, torch.device("cpu")), Ridge(5, 3, torch.device("cpu"))
    whole.add(features, residual, weight, 0)
    for own in (slice(0, 1), slice(1, 8), slice(8, 12)):
        parts.add(features[own], residual[own], weight[own], own.start)
    torch.testing.assert_close(parts.solve().weight, whole.solve().weight)
    assert parts.solve().strength == whole.solve().strength


def test_what_cannot_be_predicted_is_left_alone():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4, 5, generator=generator)
    answers = features @ torch.randn(5, 3, generator=generator) + 1
    signs = torch.tensor([1.0, 1, -1, -1, 0] * 2)  # of ten images in five folds: the others always say the opposite
    ridge = Ridge(5, 3, torch.device("cpu"))
    ridge.add(features.expand(10, 4, 5), signs[:, None, None] * answers, torch.ones(10, 4), 0)
    assert ridge.solve() is None


# The model


@pytest.mark.parametrize(
    ("config", "left"), [(ToMe(at=1, keep=0.2), 0.9), (TNT(at=1, keep=0.3, score="attention"), 0.985)]
)
def test_the_divergence_falls_on_photos_that_it_has_not_seen(config, left, digits):
    model = reduce_(digits_vit(), config)
    before = divergence(model, digits[1])
    calibrate_(model, digits[0], **QUIET)
    assert divergence(model, digits[1]) < left * before
    assert not model.training


def test_only_projections_of_later_blocks_change():
    model = reduce_(make("plain"), ToMe(at=1, keep=0.9, inside=False))
    images = photos_for(model, 60)
    calibrate_(model, images, **QUIET)
    changed = set(replaced_weights(model))
    depth = len(model.blocks)
    assert changed <= {f"blocks.{n}.attn.proj.{part}" for n in range(1, depth - 1) for part in ("weight", "bias")}
    assert changed


@pytest.mark.parametrize("kind", ["plain", "registers", "layer_scale", "beit"])
def test_tokens_behind_the_attention_come_nearer_to_the_unpruned_models(kind):
    """Also behind a LayerScale, where the change of the weights is another one than that of the tokens."""
    model = reduce_(make(kind), Random(at=1, keep=0.5))
    images, seen = photos_for(model, 60), []

    def lacking():
        seen.clear()
        for one in (base_of(model), model):
            handle = one.blocks[1].norm2.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
            one(images)
            handle.remove()
        whole, own = (tokens[:, : model.num_prefix_tokens] for tokens in seen)
        return float((whole.mean(1) - own.mean(1)).square().sum())

    before = lacking()
    calibrate_(model, images, **QUIET)
    assert "blocks.1.attn.proj.weight" in replaced_weights(model)
    assert lacking() < 0.9 * before


@pytest.mark.parametrize("kind", ["vit_classifier", "clip_vision"])
def test_models_of_transformers(kind, tmp_path):
    pytest.importorskip("transformers")
    from hf_models import make as make_hf

    base = make_hf(kind)
    before = weights(base)
    model = reduce_(base, ToMe(at=1, keep=0.5))
    size = find_backbone(model).input_size(model)
    images = torch.randn(20, *size, generator=torch.Generator().manual_seed(0))
    calibrate_(model, images, **QUIET)
    assert replaced_weights(tower_of(model))
    save(model, tmp_path)
    assert same(weights(load_(make_hf(kind), tmp_path)), weights(model))
    assert same(weights(restore_(model)), before)


@pytest.mark.parametrize("kind", ["distilled", "no_cls", "beit", "rope_mixed"])
def test_restored_is_the_base_bit_for_bit(kind):
    model = make(kind)
    before, classes = weights(model), [type(module) for module in model.modules()]
    reduce_(model, TOME)
    calibrate_(model, photos_for(model, 20), **QUIET)
    own = weights(model)
    assert not same(own, before)
    assert same(weights(base_of(model)), before)  # the unpruned model that it is compared with
    assert same(weights(model), own)  # which takes nothing from this one
    restore_(model)
    assert same(weights(model), before)
    assert [type(module) for module in model.modules()] == classes


def test_another_reduction_takes_it_off():
    model = make("plain")
    before = weights(model)
    calibrate_(reduce_(model, TOME), photos_for(model, 20), **QUIET)
    with pytest.warns(UserNote, match="the corrections that tome learned are lost"):
        reduce_(model, ToMe(at=2, keep=0.5))
    assert same(weights(model), before)


def test_a_copy_keeps_its_own_correction_when_the_first_is_restored():
    model = calibrate_(reduce_(make("plain"), TOME), photos_for(make("plain"), 20), **QUIET)
    images = photos_for(model)
    twin, wanted = copy.deepcopy(model), model(images)
    restore_(model)
    assert torch.equal(twin(images), wanted)
    assert same(weights(restore_(twin)), weights(model))


def test_it_follows_the_model_to_another_precision():
    model = calibrate_(reduce_(make("plain"), TOME), photos_for(make("plain"), 20), **QUIET)
    assert same(weights(restore_(model.half())), weights(make("plain").half()))


def test_saved_and_loaded_bit_for_bit(tmp_path):
    model = calibrate_(reduce_(make("plain"), TOME), photos_for(make("plain"), 20), **QUIET)
    images = photos_for(model)
    path = save(model, tmp_path)
    assert read(path).corrected == 20
    other = load_(make("plain"), tmp_path)
    assert torch.equal(other(images), model(images))
    assert reduction_of(other).corrected == 20
    assert same(weights(restore_(other)), weights(make("plain")))
    changed = sum(value.numel() * 4 for value in replaced_weights(model).values())
    assert changed < path.stat().st_size < changed + 6000  # what was changed, and nothing of the rest


def test_other_weights_are_refused_and_other_options_leave_it_out(tmp_path):
    save(calibrate_(reduce_(make("plain"), TOME), photos_for(make("plain"), 20), **QUIET), tmp_path)
    other = make("plain")
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(1.5)
    with pytest.raises(UserError, match=r"corrects the weights of another model \(.* has a norm of"):
        load_(other, tmp_path)
    with pytest.warns(UserNote, match="is left out"):
        model = load_(make("plain"), tmp_path, keep=0.7)
    assert same(weights(model), weights(make("plain")))


def test_scorers_are_trained_first_and_both_are_saved(tmp_path):
    model = reduce_(make("plain"), TNT(at=2, keep=0.4, noise_blocks=2))
    before = {name: value.clone() for name, value in reduction_of(model).state_dict().items()}
    calibrate_(model, photos_for(model, 20), correct=True, epochs=1, progress=False, amp="none")
    assert not same(reduction_of(model).state_dict(), before)
    save(model, tmp_path)
    assert torch.equal(load_(make("plain"), tmp_path)(photos_for(model)), model(photos_for(model)))


def test_training_again_begins_with_the_base():
    model = calibrate_(
        reduce_(make("plain"), TNT(at=2, keep=0.4, noise_blocks=2)), photos_for(make("plain"), 20), **QUIET
    )
    calibrate_(model, photos_for(model, 20), epochs=1, progress=False, amp="none")
    assert same(weights(model), weights(make("plain")))


def test_the_batches_of_a_loader_make_no_difference():
    images, found = photos_for(make("plain"), 24), []
    for size in (24, 7):
        model = reduce_(make("plain"), TOME)
        calibrate_(model, list(images.split(size)), **QUIET)
        found.append(replaced_weights(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)


def test_the_unpruned_model_that_figures_are_compared_with_is_the_base(digits):
    model = calibrate_(reduce_(digits_vit(), ToMe(keep=0.8)), digits[0], **QUIET)
    asked = evaluate(model, digits[1], base=digits_vit(), progress=False).agreement
    assert evaluate(model, digits[1], progress=False).agreement == asked


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.blocks[2].attn, "proj", torch.nn.Sequential(m.blocks[2].attn.proj)), "plain torch.nn"),
        (lambda m: setattr(m.blocks[2].attn.proj, "weight", m.blocks[1].attn.proj.weight), "shares its weights"),
        (lambda m: m.blocks[2].attn.proj.register_parameter("bias", None), "ends without a bias"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_changed_are_refused(change, message):
    model = reduce_(make("plain"), TOME)
    change(model)
    before = weights(model)
    with pytest.raises(UserError, match=message):
        calibrate_(model, photos_for(make("plain"), 20), **QUIET)
    assert same(weights(model), before)


def test_cells_of_several_patches_are_refused():
    model = reduce_(make("plain"), TOME)
    reduction_of(model).cell = 2
    with pytest.raises(UserError, match="cells of several patches"):
        calibrate_(model, photos_for(model, 20), **QUIET)


def test_post_norm_is_refused_by_name():
    model = reduce_(make("post_norm"), ToMe(at=1, keep=0.6, inside=False))
    with pytest.raises(UserError, match=r"block 1 of .* does not add its attention's output"):
        calibrate_(model, photos_for(model, 20), **QUIET)


@pytest.mark.parametrize(
    ("config", "photos", "options", "kind", "message"),
    [
        (TOME, 9, QUIET, UserError, "9 photos; expected at least 10"),
        (ToMe(at=1, keep=1.0), 20, QUIET, UserError, "removes no token here"),
        (TOME, 20, {**QUIET, "epochs": 3}, UsageError, "epochs=3: nothing is trained here"),
        (TOME, 20, {**QUIET, "correct": "yes"}, UsageError, "expected True, False or 'only'"),
        (TOME, 20, {**QUIET, "correct": True, "unfreeze": "norms"}, UsageError, "both change the model's weights"),
    ],
)
def test_what_does_not_go_is_refused(config, photos, options, kind, message):
    model = reduce_(make("plain"), config)
    with pytest.raises(kind, match=message):
        calibrate_(model, photos_for(model, photos), **options)


def test_a_corrected_model_is_not_fine_tuned():
    model = calibrate_(reduce_(make("plain"), TOME), photos_for(make("plain"), 20), **QUIET)
    with pytest.raises(UserError, match="was corrected for its reduction"):
        calibrate_(model, photos_for(model, 20), unfreeze="norms", epochs=1, progress=False)


def test_a_file_whose_correction_is_broken_is_refused(tmp_path):
    from tntprune.system.storage import packed, read_metadata, read_weights, write

    model = calibrate_(reduce_(make("plain"), TOME), photos_for(make("plain"), 20), **QUIET)
    path = save(model, tmp_path)
    tensors, about = read_weights(path), read_metadata(path)
    write(path, packed(tensors, {**about, "corrected": "many"}))
    with pytest.raises(UserError, match="its correction is of 'many' photos"):
        load_(make("plain"), tmp_path)
    write(path, packed({**tensors, "correction/blocks.90.weight": torch.ones(2)}, about))
    with pytest.raises(UserError, match=r"corrects blocks\.90\.weight, which the model does not have"):
        load_(make("plain"), tmp_path)


# The command line


@pytest.fixture
def folder(tmp_path):
    from PIL import Image

    images = (torch.rand(12, 40, 40, 3, generator=torch.Generator().manual_seed(0)) * 255).byte().numpy()
    for number, image in enumerate(images):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path


def test_train_corrects_a_reduction_that_is_trained_already(folder, capsys):
    line = ["train", "test_vit", "--data", str(folder / "photos"), "--workers", "0"]
    weights_of_it(folder, line)
    tnt = ["--at", "1", "--keep", "0.5", "--epochs", "1", "--out", str(folder / "tnt")]
    assert main([*line, *tnt]) == 0
    assert not read(folder / "tnt").corrected
    out = ["--reducer", str(folder / "tnt"), "--keep", "0.3", "--correct", "--out", str(folder / "corrected")]
    assert main([*line, *out]) == 0
    found = read(folder / "corrected")
    assert found.corrected == 12
    assert found.config.keep == (0.3,)
    assert "corrected with 12 photos" in capsys.readouterr().out
    assert main([*line, *tnt, "--resume", "--correct"]) == 0  # or where it was trained
    assert read(folder / "tnt").corrected == 12


@pytest.mark.parametrize("method", ["tome", "tnt"])
def test_train_corrects(folder, method, capsys):
    out = folder / "run"
    line = ["train", "test_vit", "--data", str(folder / "photos"), "--method", method, "--at", "1", "--keep", "0.5"]
    line += ["--out", str(out), "--workers", "0", "--json", "--correct"]
    line += ["--epochs", "1"] if method == "tnt" else []
    weights_of_it(folder, line)
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out)["photos"] == 12
    assert read(out).corrected == 12


def weights_of_it(folder, line):
    """Add weights to a command line, as nothing can be downloaded."""
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(timm.create_model("test_vit").state_dict(), folder / "weights.safetensors")
    line += ["--weights", str(folder / "weights.safetensors")]

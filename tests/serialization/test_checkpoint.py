from __future__ import annotations

import json
import shutil
import warnings

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from conftest import SMALL, make, photos_for
from tntprune import load_, reduce_, restore_, save
from tntprune.backbones.attach import reduction_of, twin_of
from tntprune.backbones.reduced import Reduced
from tntprune.errors import UsageError, UserError, UserNote
from tntprune.methods import ATC, MCTF, TNT, Random
from tntprune.serialization.checkpoint import FILE, read
from tntprune.system.storage import read_metadata, read_weights

CONFIGS = {
    "linear": TNT(at=3, keep=0.5, similar=6),
    "mlp": TNT(at=(2, 4), keep=(0.8, 0.5), similar=9, similar_how="merge", scorer="mlp", hidden=12, recipe="paper"),
    "tokens": TNT(at=2, tokens=17, partition="sequential", similar=3, order=4),
    "random": Random(at=(0, 3), tokens=(40, 11), order=5),
    "mctf": MCTF(at=(2, 4), r=(9, 5), attention_power=0.2),
    "atc": ATC(at=(2, 4), keep=0.8, linkage="average"),
}
SAVED = TNT(at=3, noise_blocks=(1, 2, 3, 4, 5))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def reduced(kind: str, config) -> torch.nn.Module:
    """With scorers that were not left as they were made."""
    model = reduce_(make(kind), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reduction_of(model).parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def refused(call, *words: str, kind: type[UserError] = UserError) -> None:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.fixture
def saved(tmp_path):
    return save(reduced("plain", SAVED), tmp_path / "run")


@pytest.mark.parametrize("kind", ["plain", "distilled", "registers"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.inference_mode()
def test_what_is_saved_and_loaded_gives_the_same_logits_bit_for_bit(tmp_path, kind, config):
    model, fresh = reduced(kind, config), make(kind)
    path = save(model, tmp_path / "a" / "run")
    assert path == tmp_path / "a" / "run" / FILE
    unpruned = fresh(photos_for(fresh))
    for source in (path, path.parent, str(path.parent)):
        again = load_(fresh, source)
        assert again is fresh and not fresh.training
        assert reduction_of(fresh).config == config
        assert torch.equal(fresh(photos_for(fresh)), model(photos_for(model)))
        assert not torch.equal(fresh(photos_for(fresh)), unpruned)
    assert torch.equal(restore_(fresh)(photos_for(fresh)), unpruned)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_file_is_small_and_holds_nothing_of_the_model(tmp_path, config):
    model = reduced("plain", config)
    path = save(model, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    own = sum(value.numel() for value in reduction_of(model).parameters())
    assert path.stat().st_size < 4 * own + 5000 < 4 * sum(value.numel() for value in model.parameters()) / 5
    tensors = read(path).learned
    assert all(name.startswith("scorers.") for name in tensors)
    assert sum(value.numel() for value in tensors.values()) == own


def test_the_file_says_what_it_was_made_for(saved):
    about = read_metadata(saved)
    assert json.loads(about["backbone"]) == {"embed_dim": 32, "depth": 6} and about["tntprune"]
    found = read(saved.parent)
    assert found.config == SAVED and found.path == saved


def test_saving_again_replaces(tmp_path):
    save(reduced("plain", TNT(at=3)), tmp_path)
    save(reduced("plain", Random(at=1)), tmp_path)
    assert read(tmp_path).config == Random(at=1) and len(list(tmp_path.iterdir())) == 1


def test_a_model_in_training_stays_in_training(saved):
    model = load_(make("plain").train(), saved)
    assert model.training and reduction_of(model).training


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"at": 2, "keep": 0.25}, SAVED.changed(at=2, keep=0.25)),
        ({"tokens": 9}, SAVED.changed(tokens=9)),
    ],
)
@torch.inference_mode()
def test_options_can_be_changed_when_loading(saved, changes, config):
    model, expected = load_(make("plain"), saved, **changes), reduced("plain", config)
    assert reduction_of(model).config == config
    assert torch.equal(model(photos_for(model)), expected(photos_for(expected)))


@pytest.mark.parametrize(
    "changes",
    [{"at": (2, 4), "keep": (0.5, 0.5), "similar": 5}, {"similar": 7, "similar_how": "merge"}, {"similar": 0}],
)
@torch.inference_mode()
def test_similar_tokens_can_go_too_where_tokens_are_dropped(tmp_path, changes):
    saved = save(reduced("plain", TNT(at=3, recipe="relative")), tmp_path)
    config = TNT(**{"at": 3, "recipe": "relative", **changes})
    model, expected = load_(make("plain"), saved, **changes), reduced("plain", config)
    assert reduction_of(model).config == config
    assert torch.equal(model(photos_for(model)), expected(photos_for(expected)))


@torch.inference_mode()
def test_a_run_that_merges_drops_only_where_that_is_said(saved):
    with pytest.raises(UsageError, match=r"similar=5: .* was trained to merge, .* expected how='drop' as well"):
        load_(make("plain"), saved, similar=5)
    model = load_(make("plain"), saved, similar=5, how="drop")
    assert reduction_of(model).config == SAVED.changed(similar=5)


def test_a_run_that_drops_cannot_merge(tmp_path):
    saved = save(reduced("plain", TNT(at=3, recipe="relative")), tmp_path)
    with pytest.raises(UsageError, match=r"how='merge': .* was trained to drop, .* another training"):
        load_(make("plain"), saved, how="merge")


def test_random_drop_can_be_changed_too(tmp_path):
    model = load_(make("plain"), save(reduced("plain", Random(at=3)), tmp_path), at=2, tokens=5, order=8)
    assert reduction_of(model).config == Random(at=2, tokens=5, order=8)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"shiny": 1}, UsageError, "tnt has no option 'shiny'"),
        ({"keep": 2}, UsageError, "keep=2"),
        ({"at": 6}, UsageError, "at=6"),
        ({"at": 0}, UsageError, "at=0: no scorer there"),
        ({"tokens": 65}, UsageError, "only 64 patch tokens"),
        ({"scorer": "mlp"}, UsageError, "was trained with 'linear'"),
        ({"noise_blocks": (1, 2, 3)}, UsageError, "was trained with (1, 2, 3, 4, 5)"),
        ({"recipe": "paper"}, UsageError, "was trained with 'merge'"),
        ({"score_norm": False}, UsageError, "was trained with None"),
    ],
)
def test_changes_that_do_not_fit_are_refused_and_the_model_stays_as_it_is(saved, changes, kind, words):
    model = make("plain")
    refused(lambda: load_(model, saved, **changes), words, kind=kind)
    assert not isinstance(model, Reduced) and not hasattr(model, "reduction")
    before = reduction_of(reduce_(model, Random(at=2)))
    refused(lambda: load_(model, saved, **changes), words, kind=kind)
    assert model.reduction is before


@pytest.mark.parametrize(("option", "value", "own"), [("embed_dim", 64, 32), ("depth", 5, 6)])
def test_a_model_of_another_width_or_depth_is_refused(saved, option, value, own):
    model = VisionTransformer(**{**SMALL, option: value})
    refused(lambda: load_(model, saved), str(saved), f"made for a model of {option} {own}, given one of {value}")
    assert not isinstance(model, Reduced)


def test_a_model_of_another_image_size_is_welcome(saved):
    model = load_(VisionTransformer(**{**SMALL, "img_size": 48}).eval(), saved)
    assert model(photos_for(model)).shape == (3, 7)


def test_a_model_that_is_not_supported_is_refused(saved):
    refused(lambda: load_(timm.create_model("test_resnet"), saved), "ResNet is not supported")


def test_a_model_without_reduction_has_nothing_to_save(tmp_path):
    refused(lambda: save(make("plain"), tmp_path / "run"), "is not reduced")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        refused(lambda path=path: save(reduced("plain", TNT(at=3)), path), f"{path}: cannot be made")


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.99])
def test_a_truncated_file_is_refused(saved, share):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(share * len(whole))])
    model = make("plain")
    refused(lambda: load_(model, saved.parent), f"{saved}: cannot be read")
    assert not isinstance(model, Reduced)


ABOUT = {"config": "{}", "backbone": "{}"}


@pytest.mark.parametrize(
    "about",
    [
        None, {"format": "pt"}, {"config": "{}"}, {"backbone": "{}"}, ABOUT, {**ABOUT, "config": "not json"},
        {**ABOUT, "config": "[]"}, {**ABOUT, "config": "3"}, {**ABOUT, "config": "[" * 100_000},
        {**ABOUT, "config": '{"version": 1, "method": "magic"}'},
        {**ABOUT, "config": '{"version": 99, "method": "tnt"}'},
        {**ABOUT, "config": '{"version": 1, "method": "tnt", "hidden": "wide"}'},
    ],
)  # fmt: skip
def test_foreign_safetensors_are_refused(tmp_path, about):
    save_file({"x": torch.zeros(2)}, tmp_path / FILE, metadata=about)
    refused(lambda: load_(make("plain"), tmp_path))


@pytest.mark.parametrize("backbone", ["not json", "[]", "null", '{"colour": 3}', '{"embed_dim": "x"}'])
def test_a_file_made_for_who_knows_what_is_refused(saved, backbone):
    save_file(read_weights(saved), saved, metadata={**read_metadata(saved), "backbone": backbone})
    refused(lambda: load_(make("plain"), saved), str(saved))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: {**t, "surplus": torch.zeros(1)}, "surplus"),
        (
            lambda t: {name: value for name, value in t.items() if name != "scorers.3.layers.0.bias"},
            "has nothing for scorers.3.layers.0.bias",
        ),
        (lambda t: {name: value.flatten() for name, value in t.items()}, "shapes"),
        (
            lambda t: {**t, "scorers.2.layers.0.weight": torch.full((1, 32), torch.nan)},
            "scorers.2.layers.0.weight holds NaN",
        ),
        (
            lambda t: {**t, "scorers.2.layers.0.bias": torch.tensor([torch.inf])},
            "scorers.2.layers.0.bias holds NaN or inf",
        ),
    ],
    ids=["surplus", "missing", "shapes", "nan", "infinity"],
)
def test_tensors_that_do_not_fit_are_refused(saved, change, word):
    save_file(change(read_weights(saved)), saved, metadata=read_metadata(saved))
    model = make("plain")
    refused(lambda: load_(model, saved), str(saved), word)
    assert not isinstance(model, Reduced)


def test_a_training_that_has_not_ended_says_resume(tmp_path, saved):
    (tmp_path / "half").mkdir()
    shutil.copy(saved, tmp_path / "half" / "checkpoint.safetensors")
    refused(lambda: load_(make("plain"), tmp_path / "half"), "has not ended", "--resume")


def test_a_folder_without_a_reduction_is_refused(tmp_path):
    refused(lambda: load_(make("plain"), tmp_path), f"{tmp_path}: no reduction in it", FILE)


def test_a_missing_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source in (tmp_path / "missing", "missing", "a/b/c", "./missing", "../missing", "~/missing", "/missing"):
        refused(lambda source=source: load_(make("plain"), source), str(source), "no such folder or file")


@pytest.mark.parametrize("source", ["someone/some-thing", "some one/thing", "a/-b--"])
def test_a_hub_id_without_the_hub_gives_one_line(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    refused(lambda: load_(make("plain"), source), source, "no such folder here, and the Hub gave none")


def test_an_error_of_the_hub_without_a_message_still_gives_a_line(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise TimeoutError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    refused(lambda: load_(make("plain"), "someone/something"), "the Hub gave none (TimeoutError)")


@torch.inference_mode()
def test_what_the_hub_gives_is_loaded(saved, tmp_path, monkeypatch):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *names, **options: asked.append(names) or str(saved))
    model = load_(make("plain"), "someone/something", keep=0.25)
    assert asked == [("someone/something", FILE)] and reduction_of(model).config == SAVED.changed(keep=0.25)


def test_a_folder_here_comes_before_the_hub(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved.parent, tmp_path / "someone" / "something")
    assert reduction_of(load_(make("plain"), "someone/something")).config == SAVED


def test_other_weights_of_the_same_shape_are_noted_and_taken_all_the_same(saved):
    model = make("plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_(model, saved)
    with torch.no_grad():
        model.patch_embed.proj.weight.mul_(1.5)
    with pytest.warns(UserNote, match="made for other weights of such a model .patch_embed.proj.weight"):
        load_(model, saved)
    assert reduction_of(model).config == SAVED
    for odd in ("", "[]", '{"norms": [1]}', '{"norms": {"patch_embed.proj.weight": "a", "nothing": 3.0}}'):
        save_file(read_weights(saved), saved, metadata={**read_metadata(saved), "model": odd})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_(model, saved)  # that says nothing of any weights
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_(twin_of(make("plain")), saved, at=2)

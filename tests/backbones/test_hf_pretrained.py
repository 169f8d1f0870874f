"""Models of transformers by name, `hf:FOLDER` and `hf:user/repo`: with their weights, without, and what is refused."""

from __future__ import annotations

import json

import huggingface_hub.constants
import pytest
import torch

from hf_models import EVERY, SHAPE, call, make, photos_for, run, transformers, used
from tntprune.analysis.macs import macs
from tntprune.backbones.classnames import class_names
from tntprune.backbones.models import files_of_model, load_model, random_model, shape_of
from tntprune.errors import UsageError, UserError
from tntprune.serialization.checkpoint import save_weights
from tntprune.sweep.request import digest


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def refused(call, *words, kind=UserError):
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.fixture
def folder(tmp_path):
    def put(kind, **config):
        model = make(kind)
        for name, value in config.items():
            setattr(model.config, name, value)
        model.save_pretrained(tmp_path / kind)
        return f"hf:{tmp_path / kind}"

    return put


@pytest.mark.parametrize("kind", EVERY)
def test_the_model_in_a_folder(kind, folder):
    model, images, name = make(kind), photos_for(kind), folder(kind)
    loaded, shape = load_model(name), shape_of(name)
    assert type(loaded) is type(model) is type(shape) and not loaded.training
    assert torch.equal(run(loaded, images), run(model, images))
    assert {value.device.type for value in shape.state_dict().values()} == {"meta"}
    assert macs(shape).macs == macs(model).macs
    assert loaded.name_or_path == shape.name_or_path == name.removeprefix("hf:")  # where its processor lies


def test_weights_are_single_precision_whatever_the_file_has(folder, tmp_path):
    name = folder("vit")
    make("vit").to(torch.bfloat16).save_pretrained(name.removeprefix("hf:"))
    assert {value.dtype for value in load_model(name).parameters()} == {torch.float32}


def test_a_home_folder_is_found(folder, tmp_path, monkeypatch):
    folder("vit")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert type(load_model("hf:~/vit")) is transformers.ViTModel


def test_names_of_classes_are_those_of_the_config(folder):
    assert class_names(load_model(folder("vit_classifier"))) == []  # LABEL_0 and so on are none
    names = {number: f"kind {number}" for number in range(7)}
    assert class_names(load_model(folder("vit_classifier", id2label=names))) == list(names.values())


def test_weights_of_a_file_bring_their_number_of_classes(folder, tmp_path):
    name, other = folder("vit_classifier"), random_model(folder("vit_classifier"), num_classes=3)
    model = load_model(name, save_weights(other, tmp_path / "w"))
    images = photos_for("vit_classifier")
    assert torch.equal(used(call(model, images)), used(call(other, images))) and model.num_labels == 3
    refused(lambda: load_model(name, save_weights(make("vit"), tmp_path / "v")), "not weights of", "are missing")


def test_a_pooler_that_was_never_trained_is_left_out(folder):
    name = folder("vit")
    transformers.ViTModel(make("vit").config, add_pooling_layer=False).save_pretrained(name.removeprefix("hf:"))
    model = load_model(name)
    out = model(photos_for("vit"))
    assert model.pooler is None and out.pooler_output is None
    assert macs(model).macs < macs(make("vit")).macs


def test_the_encoder_of_a_head_that_is_not_supported_is_taken_and_told(tmp_path, capsys):
    model = transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**SHAPE, encoder_stride=4)).eval()
    model.save_pretrained(tmp_path)
    loaded, images = load_model(f"hf:{tmp_path}"), photos_for("vit")
    assert type(loaded) is transformers.ViTModel
    assert torch.equal(loaded(images).last_hidden_state, model.vit(images).last_hidden_state)
    assert "ViTForMaskedImageModeling is not supported; its ViTModel is taken" in capsys.readouterr().err


def test_the_encoder_of_a_masked_autoencoder_masks_nothing(tmp_path, capsys):
    config = transformers.ViTMAEConfig(**SHAPE, decoder_num_hidden_layers=1)
    torch.manual_seed(0)
    model = transformers.ViTMAEForPreTraining(config).eval()
    model.save_pretrained(tmp_path)
    loaded, images = load_model(f"hf:{tmp_path}"), photos_for("mae")
    assert type(loaded) is transformers.ViTMAEModel and loaded.config.mask_ratio == 0
    model.config.mask_ratio = 0.0
    assert torch.equal(run(loaded, images), run(model.vit, images))
    assert "ViTMAEForPreTraining is not supported; its ViTMAEModel is taken" in capsys.readouterr().err


def test_a_family_that_is_not_supported(tmp_path):
    config = transformers.SwinConfig(embed_dim=8, depths=[1], num_heads=[1], image_size=32, architectures=["SwinModel"])
    config.save_pretrained(tmp_path)
    for find in (load_model, shape_of, random_model):
        refused(
            lambda find=find: find(f"hf:{tmp_path}"), "SwinModel is not supported", "ViT, BEiT, DINOv2", kind=UsageError
        )


@pytest.mark.parametrize("find", [load_model, shape_of, random_model])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:", "no such folder"),
        ("hf:/nowhere/at/all", "no such folder"),
        ("hf:./nowhere", "no such folder"),
        ("hf:user/nowhere", "no config of a model of transformers could be read"),
        ("hf:user/nowhere@v1", "no config of a model of transformers could be read"),
    ],
)
def test_a_name_that_is_nowhere(find, name, words):
    refused(lambda: find(name), name, words, kind=UsageError)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "nonsense"}'])
def test_a_config_that_is_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    refused(lambda: load_model(f"hf:{tmp_path}"), f"hf:{tmp_path}: no config", kind=UsageError)


def test_weights_that_do_not_fit_are_refused(folder, tmp_path):
    place = tmp_path / "vit"
    name = folder("vit")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "architectures": ["ViTForImageClassification"]}))
    refused(lambda: load_model(name), "2 tensors are missing, classifier.bias for one")
    (place / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    refused(lambda: load_model(name), f"{name}: its weights cannot be loaded")
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors").write_bytes(b"nonsense")
    refused(lambda: load_model(name), f"{name}: its weights cannot be loaded")
    (place / "model.safetensors").unlink()
    refused(lambda: load_model(name), f"{name}: its weights cannot be loaded")


def test_weights_that_are_not_finite_are_refused(folder, tmp_path):
    name, model = folder("vit"), make("vit")
    model.layernorm.bias.data[3] = torch.nan
    model.save_pretrained(tmp_path / "vit")
    refused(lambda: load_model(name), "layernorm.bias holds NaN or infinity")


def test_another_image_size_is_refused(folder):
    name = folder("vit")
    for find in (lambda: load_model(name, img_size=(48, 48)), lambda: shape_of(name, (48, 48))):
        refused(find, "--img-size 48 48", "as its image processor makes them", kind=UsageError)


def test_what_a_sweep_tells_models_in_folders_apart_by(folder):
    name = folder("vit")
    assert [file.name for file in files_of_model(name)] == ["config.json", "model.safetensors"]
    before = digest(*files_of_model(name))
    assert files_of_model("vit_tiny_patch16_224") == []
    model = make("vit")
    model.layernorm.bias.data += 1
    model.save_pretrained(name.removeprefix("hf:"))
    assert digest(*files_of_model(name)) != before

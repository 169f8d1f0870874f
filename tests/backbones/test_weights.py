"""Weights whose values would become others are refused, not loaded."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from conftest import make
from tntprune import TNT, TopK, load_, reduce_, save
from tntprune.backbones.classnames import name_classes
from tntprune.backbones.digits_vit import digits_vit
from tntprune.backbones.models import load_model, load_weights
from tntprune.errors import UserError
from tntprune.serialization.checkpoint import save_weights

NAME = "blocks.0.attn.qkv.weight"


def changed(dtype: torch.dtype, value: float | None = None) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in digits_vit().state_dict().items()}
    tensors[NAME] = tensors[NAME].to(dtype)
    if value is not None:
        tensors[NAME][0, 0] = value
    return tensors


def refused(call, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float64, 1e300), (torch.float64, -1e39), (torch.int64, None), (torch.int8, None), (torch.uint8, None),
     (torch.bool, None), (torch.complex64, None)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_values_that_would_become_others_are_refused(tmp_path, suffix, dtype, value):
    path, tensors = tmp_path / f"w.{suffix}", changed(dtype, value)
    save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)
    refused(lambda: load_model("digits_vit", path), str(path), NAME)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_floats_of_other_widths_are_weights(tmp_path, dtype):
    save_file(changed(dtype), tmp_path / "w.safetensors")
    own = load_model("digits_vit", tmp_path / "w.safetensors").state_dict()[NAME]
    assert torch.equal(own, changed(dtype)[NAME].float())


def test_half_precision_overflows_earlier(tmp_path):
    save_file(changed(torch.float32, 1e5), tmp_path / "w.safetensors")
    load_weights(digits_vit(), tmp_path / "w.safetensors", "digits_vit")
    refused(lambda: load_weights(digits_vit().half(), tmp_path / "w.safetensors", "digits_vit"), NAME, "float16")


@pytest.mark.filterwarnings("ignore")
def test_quantized_weights_are_refused(tmp_path):
    tensors = changed(torch.float32)
    tensors[NAME] = torch.quantize_per_tensor(tensors[NAME], 0.1, 0, torch.qint8)
    torch.save(tensors, tmp_path / "w.pth")
    refused(lambda: load_model("digits_vit", tmp_path / "w.pth"), "w.pth", "quantized")


def test_the_ending_is_read_in_either_case(tmp_path):
    path = tmp_path / "W.SAFETENSORS"
    model = digits_vit()
    name_classes(model, [f"digit {number}" for number in range(10)])
    save_weights(model, tmp_path)
    (tmp_path / "model.safetensors").rename(path)
    assert load_model("digits_vit", path).pretrained_cfg["label_names"][3] == "digit 3"


@pytest.mark.parametrize(
    "names",
    ["[1,2", "3", "null", '"abc"', "{}", json.dumps([*range(10)]), json.dumps(["a"] * 10), '["a", "b"]', "[" * 10**5],
)  # fmt: skip
def test_broken_names_of_classes_are_refused(tmp_path, names):
    save_file(changed(torch.float32), tmp_path / "w.safetensors", metadata={"classes": names})
    refused(lambda: load_model("digits_vit", tmp_path / "w.safetensors"), "w.safetensors", "classes")


def test_names_of_a_head_that_was_replaced_are_not_saved(tmp_path):
    model = digits_vit()
    name_classes(model, ["cat", "dog"])
    save_weights(model, tmp_path)
    assert "label_names" not in load_model("digits_vit", tmp_path / "model.safetensors").pretrained_cfg


@pytest.mark.parametrize("value", [1e39, None])
def test_what_was_learned_is_held_to_the_same(tmp_path, value):
    model = reduce_(make("plain"), TNT(at=2))
    path = save(model, tmp_path)
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    name = next(name for name in tensors if "weight" in name)
    tensors[name] = tensors[name].long() if value is None else tensors[name].double()
    if value is not None:
        tensors[name].flatten()[0] = value
    save_file(tensors, path, metadata=about)
    refused(lambda: load_(make("plain"), tmp_path), str(path), name)


@pytest.mark.parametrize("kind", ["plain", "eva02", "beit"])
@pytest.mark.parametrize("size", [(16, 16), (-64, 64), "abc", (0, 0)])
def test_a_size_that_is_refused_changes_nothing(kind, size):
    model = reduce_(make(kind), TopK(at=(1, 3), tokens=(40, 20)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = model(images)
    with pytest.raises((UserError, ValueError, TypeError, AssertionError, ArithmeticError)):
        model.set_input_size(img_size=size)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(model(images), expected) and model.patch_embed.img_size == (32, 32)
    model.set_input_size(img_size=(48, 48))
    assert model(torch.randn(1, 3, 48, 48)).shape == (1, 7)

from __future__ import annotations

import huggingface_hub.constants
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import vision_transformer
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from conftest import SMALL, make, photos_for
from tntprune.backbones.models import check_device, check_name, load_model, load_weights, shape_of
from tntprune.errors import UsageError, UserError


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}


@pytest.fixture
def file(tmp_path):
    def put(tensors: dict[str, torch.Tensor], name: str = "w.safetensors"):
        (save_file if name.endswith("safetensors") else torch.save)(tensors, tmp_path / name)
        return tmp_path / name

    return put


def refused(call, *words: str, kind: type[UserError] = UserError) -> None:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("vit_tiny_patch16_24", "vit_tiny_patch16_224"),
        ("vit_16", "vit16"),
        ("digit_vit", "digits_vit"),
        ("deit_tiny_distilled_patch16_244", "deit_tiny_distilled_patch16_224"),
        ("vit_tiny_patch16_224.no_such_tag", "vit_tiny_patch16_224"),
        ("xyzzy", "timm.list_models()"),
        ("", "timm.list_models()"),
    ],
)
@pytest.mark.parametrize("call", [check_name, shape_of, load_model])
def test_an_unknown_name_is_refused_with_near_ones(call, name, near):
    refused(lambda: call(name), f"unknown model {name!r}", near, kind=UsageError)


@pytest.mark.parametrize("name", ["vit16", "digits_vit", "vit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k"])
def test_known_names_pass(name):
    check_name(name)


def test_a_name_with_a_tag_is_that_model(file):
    assert shape_of("vit_tiny_patch16_224.augreg_in21k").num_classes == 21843


def test_a_model_with_weights_from_a_file_is_in_eval_mode(file):
    saved = weights_of(timm.create_model("test_vit"))
    for name in ("w.safetensors", "w.pth"):
        model = load_model("test_vit", file(saved, name))
        assert not model.training and next(model.parameters()).device.type == "cpu"
        assert all(torch.equal(value, saved[key]) for key, value in weights_of(model).items())


def test_loaded_weights_are_the_file_bit_for_bit(file):
    other = make("plain")
    model = VisionTransformer(**SMALL).eval()
    load_weights(model, file(weights_of(other)), "small")
    assert torch.equal(model(photos_for(model)), other(photos_for(model)))


def test_half_precision_weights_load_into_single(file):
    model = VisionTransformer(**SMALL)
    load_weights(model, file({name: value.half() for name, value in weights_of(make("plain")).items()}), "small")
    assert {value.dtype for value in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "kind", ["distilled", "no_cls", "registers", "layer_scale", "qk_norm", "map_pool", "swiglu", "test_vit"]
)
def test_weights_of_another_model_are_refused(file, kind):
    path, model = file(weights_of(make(kind))), make("plain")
    before = weights_of(model)
    refused(lambda: load_weights(model, path, "small"), f"{path}: not weights of small")
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())


def test_weights_of_something_else_are_refused(file):
    path = file({"conv.weight": torch.zeros(3)})
    refused(lambda: load_model("test_vit", path), "not weights of test_vit", "tensors are missing")
    refused(lambda: load_model("test_resnet", path), "ResNet is not supported")
    refused(lambda: load_model("digits_vit", path), "not weights of digits_vit", "tensors are missing")


def test_missing_extra_and_misshapen_tensors_are_named(file):
    weights = weights_of(make("plain"))
    missing = {name: value for name, value in weights.items() if name != "norm.bias"}
    refused(lambda: load_weights(make("plain"), file(missing), "small"), "1 tensors are missing, norm.bias")
    extra = {**weights, "surplus": torch.zeros(1)}
    refused(lambda: load_weights(make("plain"), file(extra), "small"), "1 tensors too many, surplus")
    head = {**weights, "head.weight": torch.zeros(9, 32)}
    refused(lambda: load_weights(make("plain"), file(head), "small"), "head.weight is (9, 32), expected (7, 32)")


def test_position_embeddings_of_another_image_size_are_resampled_as_timm_does(file):
    torch.manual_seed(0)
    big, small = VisionTransformer(**{**SMALL, "img_size": 64}), VisionTransformer(**SMALL)
    load_weights(small, file(weights_of(big)), "small")
    assert torch.equal(small.pos_embed, checkpoint_filter_fn(weights_of(big), small)["pos_embed"])
    assert torch.equal(small.blocks[3].mlp.fc1.weight, big.blocks[3].mlp.fc1.weight)


def test_each_family_has_timms_own_way_with_its_weights(file):
    """BEiT's tables are resampled for another window, EVA's files may have the names of DINOv3's release."""
    images = photos_for(make("beit"))
    small, big = (
        make("beit"),
        Beit(**{**SMALL, "img_size": 48}, use_rel_pos_bias=True, use_abs_pos_emb=False, init_values=0.1),
    )
    load_weights(big, file(weights_of(small)), "big")
    assert big.blocks[0].attn.relative_position_bias_table.shape == (23 * 23 + 3, 4)
    load_weights(big := make("beit"), file(weights_of(small)), "small")
    assert torch.equal(big(images), small(images))
    model, weights = make("dinov3"), weights_of(make("dinov3"))
    weights["storage_tokens"] = weights.pop("reg_token")
    for key in [key for key in weights if "gamma_" in key]:
        weights[key.replace("gamma_", "ls") + ".gamma"] = weights.pop(key)
    expected = model(images)
    model.reg_token.data.zero_()
    load_weights(model, file(weights), "dinov3")
    assert torch.equal(model(images), expected)


def test_patches_of_another_size_are_refused_and_not_resampled(file):
    path = file(weights_of(VisionTransformer(**{**SMALL, "patch_size": 8})))
    refused(
        lambda: load_weights(make("plain"), path, "small"),
        "patch_embed.proj.weight is (32, 3, 8, 8), expected (32, 3, 4, 4)",
    )


def test_patch_weights_of_a_linear_layer_are_reshaped(file):
    model, weights = make("plain"), weights_of(make("plain"))
    weights["patch_embed.proj.weight"] = weights["patch_embed.proj.weight"].flatten(1)  # as in timm's old files
    load_weights(model, file(weights), "small")
    assert torch.equal(model(photos_for(model)), make("plain")(photos_for(model)))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (1, 2), (1, 65, 33), (7, 7, 7, 7), (1, 3, 4, 4, 4)])
@pytest.mark.parametrize("name", ["pos_embed", "patch_embed.proj.weight", "cls_token", "head.weight"])
def test_any_wrong_shape_is_told_in_one_line(file, name, shape):
    path = file({**weights_of(make("plain")), name: torch.zeros(shape)})
    refused(lambda: load_weights(make("plain"), path, "small"), f"{path}: not weights of small")


def test_an_error_of_timm_without_a_message_still_gives_a_line(file, monkeypatch):
    def fail(*arguments):
        raise AssertionError

    monkeypatch.setattr(vision_transformer, "checkpoint_filter_fn", fail)
    refused(lambda: load_weights(make("plain"), file(weights_of(make("plain"))), "small"), "(AssertionError)")


def test_weights_that_are_not_finite_are_refused(file):
    weights = weights_of(make("plain"))
    weights["norm.bias"][3] = float("nan")
    refused(lambda: load_weights(make("plain"), file(weights), "small"), "norm.bias holds NaN or infinity")


def test_weights_that_are_not_there_are_refused(tmp_path):
    refused(lambda: load_model("test_vit", tmp_path / "missing.pth"), f"{tmp_path / 'missing.pth'}: no such file")


def test_vit16_needs_weights(tmp_path):
    refused(lambda: load_model("vit16"), "vit16", "--weights")


def test_digits_vit_brings_its_weights():
    model = load_model("digits_vit")
    assert not model.training and all(value.isfinite().all() for value in model.parameters())
    assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 10)


def test_digits_vit_takes_other_weights(file):
    weights = {name: torch.zeros_like(value) for name, value in weights_of(load_model("digits_vit")).items()}
    assert load_model("digits_vit", file(weights)).head.weight.abs().sum() == 0


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_vit"])
def test_without_the_hub_weights_are_asked_for(tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refused(lambda: load_model(name), name, "Hub", "--weights")


def test_a_model_that_has_no_pretrained_weights_asks_for_them():
    refused(lambda: load_model("test_vit4"), "--weights")


@pytest.mark.parametrize("device", ["tpu", "", "cpu:-1", "meta", "hpu", "privateuseone", "ipu", "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused(device):
    refused(lambda: check_device(device), f"device {device!r}", "expected cpu, cuda or mps", kind=UsageError)
    refused(lambda: load_model("digits_vit", device=device), f"device {device!r}", kind=UsageError)


def test_cpu_can_be_used():
    assert check_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["vit16", "digits_vit", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_a_shape_is_on_the_meta_device(name):
    assert {value.device.type for value in shape_of(name).state_dict().values()} == {"meta"}


def test_vit16_is_the_paper_model():
    model = shape_of("vit16")
    assert len(model.blocks) == 12 and model.embed_dim == 768
    assert all(block.mlp.fc1.out_features == 768 for block in model.blocks)
    assert model.patch_embed.patch_size == (16, 16) and model.patch_embed.num_patches == 196
    assert model.cls_token is None and model.num_prefix_tokens == 0 and model.pos_embed.shape == (1, 196, 768)
    assert model.global_pool == "avg" and model.head.out_features == 1000


@pytest.mark.realdata
def test_the_real_weights_load_and_fit_no_other_model(data):
    path = data / "vit_tiny_patch16_224.safetensors"
    model = load_model("vit_tiny_patch16_224", path)
    assert sum(value.numel() for value in model.parameters()) == 5_717_416
    for name in ("deit_tiny_distilled_patch16_224", "vit_small_patch16_224", "test_vit"):
        refused(lambda name=name: load_model(name, path), f"not weights of {name}")

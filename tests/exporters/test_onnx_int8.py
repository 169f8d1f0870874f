"""ONNX Runtime in int8: products with weights run in integers, and what decides which tokens stay is fp32."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

import conftest
import hf_models
from configs import CONFIGS, stirred
from conftest import make, photos_for
from tntprune import TNT, reduce_
from tntprune.errors import UserError
from tntprune.exporters import formats, quantise
from tntprune.exporters.check import check
from tntprune.exporters.export import export, reopen

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
numpy_helper = pytest.importorskip("onnx.numpy_helper")


def small(kind, depth=2):
    with patch.dict(conftest.SMALL, depth=depth):
        return make(kind)


def as_run(path, folder):
    """What onnxruntime makes of a file when it loads it: its nodes, and the constants by name."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, str(folder / "run.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(folder / "run.onnx").graph
    return list(graph.node), {tensor.name: tensor for tensor in graph.initializer}


def integer_products(path, folder):
    """The weights that are multiplied as integers, and those that are not; (D, out) both."""
    nodes, constants = as_run(path, folder)
    integers = [node for node in nodes if node.op_type in ("QGemm", "QLinearMatMul", "MatMulIntegerToFloat")]
    floats = [node for node in nodes if node.op_type in ("Gemm", "MatMul", "FusedMatMul")]
    return integers, [node for node in floats if node.input[1] in constants]


def test_products_with_weights_are_in_integers_and_the_scorer_is_not(tmp_path):
    model = reduce_(small("plain"), TNT(at=1, keep=0.5))
    images = photos_for(model, 20)
    options = {"dynamic_batch": True, "indices": True, "calibration": images[:8]}
    found = export(model, tmp_path / "m.onnx", "onnx", "int8", **options)
    assert found.about["dtype"] == "int8" and found.about["calibration_images"] == 8
    assert set(tmp_path.iterdir()) == set(found.files)
    integers, floats = integer_products(found.path, tmp_path)
    assert len(integers) == 2 * 4 + 1  # queries to values, attention's output, two of the MLP; the head
    assert len(floats) == 1  # the scorer
    told = check(model, found.path, images[8:])
    assert told.problem is None and told.correlation > 0.99 and told.kept > 90
    assert told.relative > 1e-4  # it is not fp32


def graph_of(model, folder):
    """The model as quantise gets it."""
    return export(model, folder / "whole.onnx", "onnx").path


def test_smoothing_changes_no_result_and_makes_room_for_an_outlier(tmp_path):
    model = small("plain", depth=1)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.bias[3] = 300.0  # as large as some in a real ViT
        model.blocks[0].mlp.fc2.weight[:, 3] *= 0.01
    whole, images = graph_of(model, tmp_path), photos_for(model, 8)
    expected, errors = model(images), []
    for smooth in (nullcontext(), patch.object(quantise, "_smooth")):
        with smooth:
            quantise.quantise(whole, tmp_path / "int8.onnx", images.split(1))
        session = onnxruntime.InferenceSession(tmp_path / "int8.onnx", providers=["CPUExecutionProvider"])
        told = torch.cat([torch.from_numpy(session.run(None, {"images": i.numpy()})[0]) for i in images.split(1)])
        errors.append((told - expected).norm() / (expected - expected.mean(0)).norm())
    assert errors[0] < errors[1] / 3, errors
    fused = quantise._fused(whole)
    products = [node for node in fused.graph.node if node.op_type == "Gemm"]
    quantise._smooth(fused, products, images.split(1))
    session = onnxruntime.InferenceSession(fused.SerializeToString(), providers=["CPUExecutionProvider"])
    (told,) = session.run(None, {"images": images[:1].numpy()})
    torch.testing.assert_close(torch.from_numpy(told), expected[:1], atol=1e-4, rtol=1e-3)
    divided = [node for node in fused.graph.node if node.name.endswith("/smoothed")]
    assert len(divided) == 3  # attention's output, the second of the MLP and the head; norms divide for the others


def test_more_weights_than_one_file_holds_are_refused(tmp_path, monkeypatch):
    model = small("plain", depth=1)
    monkeypatch.setattr(formats, "LARGE", 1000)
    with pytest.raises(UserError, match=r"weights, int8 takes .* expected openvino"):
        export(model, tmp_path / "m.onnx", "onnx", "int8", calibration=photos_for(model))
    assert not list(tmp_path.iterdir())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("eva02", "tnt"), ("dinov3", "tnt-merging-inside"), ("swiglu", "tome"), ("map_pool", "tnt-similar-merge"),
        ("post_norm", "tnt"), ("hf vit", "tnt"), ("hf dinov2_classifier", "tome"),
    ],
)  # fmt: skip
def test_every_family_is_near(kind, name, tmp_path):
    if kind.startswith("hf "):
        model = stirred(hf_models.make(kind[3:]), CONFIGS[name]).eval()
        images = hf_models.photos_for(kind[3:], 12)
    else:
        model = stirred(make(kind), CONFIGS[name]).eval()
        images = photos_for(model, 12)
    path = export(model, tmp_path / "m.onnx", "onnx", "int8", calibration=images[:8], batch_size=2).path
    told = check(model, path, images[8:])
    assert told.problem is None, told.problem
    integers, floats = integer_products(path, tmp_path)
    assert len(integers) > 3 * len(floats)


@pytest.mark.wide
@pytest.mark.realdata
def test_real_photos_keep_their_class_and_their_tokens(data, tmp_path):
    from tntprune import load_
    from tntprune.backbones.models import load_model
    from tntprune.exporters.samples import choose_photos, read_photos

    model = load_model("vit_tiny_patch16_224", data / "vit_tiny_patch16_224.safetensors")
    load_(model, "pretrained", at=3, keep=0.5)
    used, others = (read_photos(model, part) for part in choose_photos(data / "calibration-1000", 32, 64))
    options = {"dynamic_batch": True, "indices": True, "calibration": used}
    path = export(model, tmp_path / "m.onnx", "onnx", "int8", **options).path
    told = check(model, path, others)
    assert told.problem is None and told.agreement >= 92 and told.kept > 94 and told.correlation > 0.98
    assert reopen(path)[1]["batch"] == "dynamic"

"""Reduced models, and larger modules that hold one, go through torch's and OpenVINO's own exporters."""

from __future__ import annotations

import warnings
from unittest.mock import patch

import pytest
import torch
from torch import nn

import conftest
import hf_models
import tntprune
from configs import CONFIGS, stirred
from conftest import make, photos_for

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
FIXED = (  # one of each kind; ATS and A-ViT itself keep another number in each image
    "random-several", "tnt", "tnt-merging-inside", "tnt-similar-merge", "topk", "evit", "dynamicvit", "tome",
    "tome-passes", "pitome", "tofu", "zerotprune", "avit-fixed", "evovit", "mctf", "atc",
)  # fmt: skip


class Segmenter(nn.Module):
    """A reduced tower with a head of its own behind it, which wants a feature for every patch."""

    def __init__(self, tower):
        super().__init__()
        self.tower, self.head = tower, nn.Conv2d(32, 3, 1)

    def forward(self, images):
        return self.head(tntprune.features(self.tower, images))


def built(kind, name):
    if kind.startswith("hf "):
        return stirred(hf_models.make(kind[3:]), CONFIGS[name]).eval(), hf_models.photos_for(kind[3:])
    short = {"tnt-merging": 3, **dict.fromkeys(("tome", "pitome", "tofu", "mctf"), 2)}
    with patch.dict(conftest.SMALL, depth=short.get(name, 6)):  # the time grows with it
        model = stirred(make(kind.removeprefix("inside ")), CONFIGS[name])
    images = photos_for(model)
    return (Segmenter(model).eval() if kind.startswith("inside ") else model), images


def used(out):
    return out if isinstance(out, torch.Tensor) else hf_models.used(out)


def through_onnx(model, images, file):
    """What ONNX Runtime gives for a file with any batch size, and the TopK nodes whose K is no constant."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        batch = torch.export.Dim("batch", min=1, max=64)
        torch.onnx.export(model, (images,), file, dynamo=True, verbose=False, dynamic_shapes=({0: batch},))
    graph = onnx.load(file).graph
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    computed = [node.name for node in graph.node if node.op_type == "TopK" and node.input[1] not in constants]
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (name,) = (given.name for given in session.get_inputs())
    return [torch.from_numpy(out) for out in session.run(None, {name: images[:2].numpy()})], computed


FAMILIES = ("inside plain", "map_pool", "eva02", "rope_mixed", "beit", "hf vit_classifier", "hf clip_projection")
CASES = [*(("plain", name) for name in FIXED), *((kind, "tnt-merging") for kind in FAMILIES)]


def short(*few):
    """All cases, but those that are not among these only in the wide run."""
    return [pytest.param(*case, marks=[] if case in few else pytest.mark.wide) for case in CASES]


@pytest.mark.parametrize(("kind", "name"), short(("plain", "tnt"), ("hf vit_classifier", "tnt-merging")))
def test_torch_onnx_export(kind, name, tmp_path):
    model, images = built(kind, name)
    outs, computed = through_onnx(model, images, tmp_path / "model.onnx")
    with torch.no_grad():
        expected = used(model(images[:2]))
    assert any(out.shape == expected.shape and torch.allclose(out, expected, atol=1e-4, rtol=1e-3) for out in outs)
    assert computed == []


@pytest.mark.parametrize(("kind", "name"), short(("inside plain", "tnt-merging")))
def test_openvino_convert_model(kind, name):
    openvino = pytest.importorskip("openvino")
    model, images = built(kind, name)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        compiled = openvino.compile_model(
            openvino.convert_model(model, example_input=images), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
        )
        expected = used(model(images))
        outs = [torch.from_numpy(out) for out in compiled(images.numpy()).values()]
    assert any(out.shape == expected.shape and torch.allclose(out, expected, atol=1e-4, rtol=1e-3) for out in outs)

"""int8 for ONNX Runtime: weights take over what activations vary too much in, then its own static quantisation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ALPHA = 0.8  # share of the spread that weights take over; ViT-Tiny is nearer to fp32 than with 0.5, 0.65 and 0.95
PRODUCTS = ("Gemm", "MatMul")
SCOPES = "pkg.torch.onnx.name_scopes"  # where torch's exporter notes from which module a node comes


def quantise(whole: Path, file: Path, batches: Sequence[torch.Tensor]) -> None:
    """Write a file in int8: the products of tokens with weights, in integers; all else stays in fp32.

    Weights have a scale per output channel, activations are unsigned (what VNNI multiplies) with one scale. Products
    give fp32, so their results are not rounded. In fp32 stay: the reduction, which decides what tokens stay; attention,
    where int8 is not faster; and the embedding of patches, whose rounding would change which tokens are kept.

    Args:
        whole: The model in fp32, as torch exports it.
        file: To write.
        batches: Calibration images, each as the file takes them.
    """
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    inside = {node.name for node in onnx.load(whole, load_external_data=False).graph.node if _reduces(node)}
    model = _fused(whole)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    products = [
        node
        for node in model.graph.node
        if node.op_type in PRODUCTS and node.name.split("/")[0] not in inside and node.input[1] in weights
    ]
    products = [node for node in products if len(weights[node.input[1]].dims) == 2]
    _smooth(model, products, batches)
    quantize_static(
        model, file, Reader(model.graph.input[0].name, batches), quant_format=QuantFormat.QDQ,
        op_types_to_quantize=list(PRODUCTS), nodes_to_quantize=[node.name for node in products], per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        extra_options={"OpTypesToExcludeOutputQuantization": list(PRODUCTS)},
    )  # fmt: skip


def _reduces(node: Any) -> bool:
    """Return whether a node of torch's export comes from the reduction."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "")
    return "reduction" in re.split(r"\W+", scopes)


def _fused(whole: Path) -> Any:
    """Return the model with each product and its bias in one node, which onnxruntime can run in integers.

    It is the step of `quant_pre_process` that matters here; that function goes on without it where it fails.
    """
    import onnx
    import onnxruntime

    options, path = onnxruntime.SessionOptions(), whole.with_name("fused.onnx")
    options.optimized_model_filepath, options.log_severity_level = str(path), 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(str(whole), options, providers=["CPUExecutionProvider"])
    return onnx.load(path)


def _smooth(model: Any, products: Sequence[Any], batches: Sequence[torch.Tensor]) -> None:
    """Divide each channel of the activations by a number, and multiply the row of the weights by it.

    One scale for all channels is too coarse where a few are far larger than the others, as after some GELUs. A norm
    before the product divides at no cost; elsewhere a node does. Source: SmoothQuant (Xiao et al., 2023), section 4,
    equation 4: s_j = max|x_j|^alpha / max|w_j|^(1 - alpha).

    Args:
        model: Changed in place; its results stay the same, up to rounding.
        products: Nodes with constant weights (D, out), or (out, D) where they are transposed.
        batches: Calibration images.
    """
    from onnx.helper import make_node
    from onnx.numpy_helper import from_array, to_array

    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    stored = {tensor.name: tensor for tensor in graph.initializer}
    groups: dict[str, list[Any]] = {}  # the products of the same tokens, such as queries, keys and values
    for node in products:
        groups.setdefault(_source(node, makers), []).append(node)
    steps: list[tuple[Any, list[Any]]] = []  # the norm before that divides, or None; its products
    for name, group in groups.items():
        norm = makers.get(name)
        folds = norm is not None and norm.op_type == "LayerNormalization" and set(norm.input[1:]) <= set(stored)
        if folds and _only(name, {node.name for node in group}, users):
            steps.append((norm, group))
        else:
            steps += [(None, [node]) for node in group]
    peaks = _peaks(model, [group[0] for _, group in steps], batches)

    def put(name: str, values: Any) -> str:
        graph.initializer.append(from_array(np.ascontiguousarray(values, np.float32), name))
        return name

    for (norm, group), largest in zip(steps, peaks, strict=True):
        rows = [to_array(stored[node.input[1]]) for node in group]
        rows = [w.T if _transposed(node) else w for node, w in zip(group, rows, strict=True)]  # each (D, out)
        heaviest = np.max([np.abs(w).max(1) for w in rows], axis=0)
        scale = _floored(largest) ** ALPHA / _floored(heaviest) ** (1 - ALPHA)  # (D,)
        for node, w in zip(group, rows, strict=True):
            scaled = w * scale[:, None]
            node.input[1] = put(f"{node.name}/weight", scaled.T if _transposed(node) else scaled)
        if norm is not None:
            for place, own in enumerate(norm.input[1:], 1):  # its weight and bias
                norm.input[place] = put(f"{norm.name}/{place}", to_array(stored[own]) / scale)
            continue
        (node,) = group
        smoothed, at = f"{node.name}/smoothed", [other.name for other in graph.node].index(node.name)
        factors = put(f"{node.name}/factors", 1 / scale)
        graph.node.insert(at, make_node("Mul", [node.input[0], factors], [smoothed], smoothed))
        node.input[0] = smoothed
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _source(node: Any, makers: dict[str, Any]) -> str:
    """Return the tokens that a product takes, by their name before any reshaping."""
    name: str = node.input[0]
    while name in makers and makers[name].op_type == "Reshape":
        name = makers[name].input[0]
    return name


def _only(name: str, products: set[str], users: dict[str, list[Any]]) -> bool:
    """Return whether nothing but these products takes the tokens, reshaped or not."""
    return all(
        user.name in products or (user.op_type == "Reshape" and _only(user.output[0], products, users))
        for user in users.get(name, [])
    )


def _transposed(node: Any) -> bool:
    return any(entry.name == "transB" and entry.i for entry in node.attribute)


def _floored(values: Any) -> Any:
    """Return largest values with those raised that are next to nothing: photos that were not seen may have more."""
    return np.maximum(values, max(float(np.median(values)) / 100, 1e-5))


def _peaks(model: Any, products: Sequence[Any], batches: Sequence[torch.Tensor]) -> list[Any]:
    """Return for each product the largest absolute value of each channel of the tokens that it takes, (D,)."""
    import onnx
    import onnxruntime
    from onnx.helper import make_empty_tensor_value_info, make_node
    from onnx.numpy_helper import from_array

    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    graph = probe.graph
    dims = {tensor.name: tensor.dims for tensor in graph.initializer}
    graph.initializer.append(from_array(np.array([0]), "peak/axes"))
    del graph.output[:]
    for number, node in enumerate(products):
        width = dims[node.input[1]][1 if _transposed(node) else 0]
        flat, size, peak = (f"peak/{number}/{part}" for part in ("flat", "size", "peak"))
        graph.initializer.append(from_array(np.array([-1, width]), f"{flat}/shape"))
        graph.node.append(make_node("Reshape", [node.input[0], f"{flat}/shape"], [flat]))
        graph.node.append(make_node("Abs", [flat], [size]))
        graph.node.append(make_node("ReduceMax", [size, "peak/axes"], [peak], keepdims=0))
        graph.output.append(make_empty_tensor_value_info(peak))
    session: Any = onnxruntime.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    found = [session.run(None, {graph.input[0].name: part.numpy()}) for part in batches]
    return [np.max(values, axis=0) for values in zip(*found, strict=True)]


class Reader:
    """The images, one batch after the other, as quantize_static reads them."""

    def __init__(self, name: str, batches: Sequence[torch.Tensor]) -> None:
        self.name, self.parts = name, iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch by the name of the input, or None after the last."""
        part = next(self.parts, None)
        return None if part is None else {self.name: part.numpy()}

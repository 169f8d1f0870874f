"""Results that must stay the same, bit for bit, while the code around them is moved: digests of every method on every
kind of backbone, and of short trainings.

Digests depend on the processor's vector instructions and on torch's version, so they are compared only where
`frozen.json` has both. After a change that is meant to change results: `TNTPRUNE_FREEZE=1 pytest tests/test_frozen.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

import conftest
import hf_models
import tntprune
from configs import CONFIGS
from tntprune.analysis.record import record
from tntprune.backbones.attach import reduction_of
from tntprune.backbones.base import find_backbone
from tntprune.methods import TNT, AViT, DynamicViT, EViT, implementation
from tntprune.reduce import reduce_, restore_

FILE = Path(__file__).with_name("frozen.json")
FREEZE = bool(os.environ.get("TNTPRUNE_FREEZE"))
MACHINE = f"torch {torch.__version__.split('+')[0]}, {torch.backends.cpu.get_cpu_capability()}"
if torch.cpu._is_amx_tile_supported():
    MACHINE += ", AMX"
FROZEN = json.loads(FILE.read_text())  # digests by machine
FORMER = {"merge_weights": "weights", "merge_gates": "fades", "norm_corrections": "lifts"}  # names when it was frozen
LEARNING = {
    "tnt": TNT(at=2, keep=0.5),
    "tnt-several": TNT(at=(1, 2), keep=0.7, metric="mean", inside=True),
    "tnt-paper": TNT(at=2, keep=0.5, recipe="paper"),
    "dynamicvit": DynamicViT(at=(1, 2), keep=0.6),
    "avit": AViT(),
    "evit": EViT(at=2, keep=0.5, anneal=(0.0, 1.0)),
}
KINDS = [*(f"timm {kind}" for kind in conftest.BACKBONES), *(f"hf {kind}" for kind in hf_models.KINDS)]

pytestmark = pytest.mark.skipif(
    not FREEZE and MACHINE not in FROZEN, reason=f"frozen with {' and '.join(FROZEN)}, this is {MACHINE}"
)


def digest(*values):
    """Of tensors, None and lists of them, by their bytes."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.update(str(value.dtype).encode() + str(tuple(value.shape)).encode())
            found.update(value.detach().contiguous().numpy().tobytes())
        else:
            found.update(str(value).encode())
    return found.hexdigest()[:16]


def former(tensors):
    """The same tensors under the names that they had when the digests were taken."""
    return {".".join(FORMER.get(part, part) for part in name.split(".")): value for name, value in tensors.items()}


def compare(found):
    if FREEZE:
        FROZEN.setdefault(MACHINE, {}).update(found)
        FILE.write_text(json.dumps(FROZEN, indent=0, sort_keys=True) + "\n")
        return
    assert found == {name: FROZEN[MACHINE].get(name) for name in found}


def stir(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reduction_of(model).parameters():
            noise = torch.randn(parameter.numel(), generator=generator)
            parameter.add_(noise.view(parameter.shape))


def built(kind):
    where, _, name = kind.partition(" ")
    if where == "timm":
        model = conftest.make(name)
        return model, conftest.photos_for(model)
    return hf_models.make(name), hf_models.photos_for(name)


@pytest.mark.parametrize("kind", KINDS)
def test_kept_tokens_sizes_and_logits(kind):
    model, images = built(kind)
    backbone = find_backbone(model)
    layout, found = backbone.layout(model), {}
    for name, config in CONFIGS.items():
        if implementation(type(config)).obstacle(layout, config):
            continue
        try:
            reduce_(model, config)
        except tntprune.UsageError:  # more tokens, or more blocks, than this one has
            restore_(model)
            continue
        stir(model)
        with torch.inference_mode(), record(model) as trace:
            answer = backbone.answer(model, images)
        kept = [value for pair in sorted(trace.kept.items()) for value in pair]
        found[f"{kind} {name}"] = digest(answer.logits, answer.tokens.x, answer.tokens.size, *kept, *trace.counts)
        restore_(model)
    assert len(found) > 10
    compare(found)


@pytest.mark.parametrize("name", LEARNING)
def test_weights_after_a_short_training(name):
    model = conftest.make("layer_scale")
    reduce_(model, LEARNING[name])
    images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    labels = torch.arange(32) % 7
    more = {"backbone_lr": 1e-4} if name == "evit" else {}
    tntprune.calibrate_(model, [(images[:16], labels[:16]), (images[16:], labels[16:])], epochs=3, **more)
    learned = [value for pair in sorted(former(model.state_dict()).items()) for value in pair]
    flat = [value.flatten() if isinstance(value, torch.Tensor) else value for value in learned]
    compare({f"trained {name}": digest(*flat)})

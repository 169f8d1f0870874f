"""What docs/models.md says, done with models that are small and random instead of fetched."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import tntprune
from hf_models import DINO, WORDS, make, transformers
from tntprune.backbones.attach import is_reduced
from tntprune.backbones.base import FAMILIES, _adapters

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class Auto:
    """Gives a small model for a name on the Hub, and what transformers gives for a folder."""

    def __init__(self, real, small):
        self.real, self.small = real, small

    def from_pretrained(self, name, **options):
        return self.real.from_pretrained(name, **options) if Path(name).is_dir() else self.small(**options)


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tntprune.training.config.STEPS", 5)
    dino = {**DINO, "num_hidden_layers": 12}
    names = {
        "tntprune": tntprune, "images": torch.randn(2, 3, 32, 32), "words": WORDS,
        "AutoModelForImageClassification": Auto(
            transformers.AutoModelForImageClassification, lambda: make("deit_classifier")
        ),
        "CLIPModel": Auto(transformers.CLIPModel, lambda: make("clip")),
        "AutoBackbone": Auto(
            None, lambda **options: transformers.Dinov2Backbone(transformers.Dinov2Config(**dino, **options))
        ),
    }  # fmt: skip
    assert len(CODE) == 5
    for code in CODE:
        exec(code, names)
    assert names["logits"].shape == (2, 7) and names["probabilities"].shape == (2, 2)
    assert [tuple(x.shape) for x in names["maps"]] == [(2, 32, 8, 8)] * 2
    assert is_reduced(names["again"]) and (tmp_path / "small" / "reducer.safetensors").is_file()


def test_every_supported_model_is_on_the_page():
    for package in FAMILIES:
        for adapter in _adapters(package):
            for kind in {**adapter.swaps, **adapter.holders}:
                name = kind.__name__.replace("WithRegisters", "")
                assert f"`{name}`" in PAGE, kind

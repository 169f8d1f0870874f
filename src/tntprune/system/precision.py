"""The precision of a forward pass: under autocast, with the head in fp32; and attention that suits it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import nn

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ExactLinear(nn.Linear):
    """A linear layer that runs in fp32 under autocast as well."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.float())


def exact_head_(model: nn.Module) -> nn.Module:
    """Let a model's classifiers run in fp32 under autocast, in place: a thousand logits in bf16 have ties."""
    for name in ("head", "head_dist", "classifier", "cls_classifier", "distillation_classifier"):
        head = getattr(model, name, None)
        if type(head) is nn.Linear:
            head.__class__ = ExactLinear
    return model


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[None]:
    """Run what is inside in a precision; "fp32" leaves it as it is."""
    return torch.autocast(device.type, DTYPES.get(precision), enabled=precision in DTYPES)


@contextmanager
def unfused(modules: list[Any]) -> Iterator[None]:
    """Do without the fused kernel of attention, whose backward pass in bfloat16 on a CPU is more than twice as slow."""
    for module in modules:
        module.fused_attn = False
    try:
        yield
    finally:
        for module in modules:
            module.fused_attn = True

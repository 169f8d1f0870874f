"""The layers of which methods' scorers and predictors are made."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Affine(nn.Module):
    """A linear layer that computes in the precision of its input, whatever that of its own weights.

    It is no `nn.Linear`, because those who look for the model's linear layers (LoRA on all of them, dynamic
    quantization) do not mean a scorer: an adapter there would get no gradient, and int8 would change the ranking.

    Args:
        inputs: Width of the input.
        outputs: Width of the output.
        generator: For the initial weights: normal, with a standard deviation of 0.02, truncated; biases are 0.
    """

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.trunc_normal_(self.weight, std=0.02, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

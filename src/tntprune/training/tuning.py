"""What of a model is fine-tuned under its reduction: all of it, its head, its norms, or low-rank changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tntprune.backbones.attach import device_of, reduction_of
from tntprune.backbones.base import tower_of
from tntprune.errors import UsageError, UserError

HEADS = ("head", "head_dist", "classifier", "cls_classifier", "distillation_classifier")  # timm's, and transformers'
PARTS = {"all": "parameters", "head": "head", "norms": "norms that learn", "lowrank": "linear layers in its blocks"}


def opened(model: nn.Module, kind: str) -> dict[str, nn.Parameter]:
    """The model's own parameters that gradients have to reach, by name; never the reduction's.

    Args:
        model: A reduced model.
        kind: "all"; "head": the classifiers; "norms": weights and biases of every norm; "lowrank": the weights of the
            linear layers in the blocks, whose changes are of low rank.

    Raises:
        UserError: the model has none of them.
    """
    tower: Any = tower_of(model)
    if kind == "head":
        found = [p for name in HEADS if getattr(model, name, None) for p in getattr(model, name).parameters()]
    elif kind == "norms":
        norms = [module for module in tower.modules() if "norm" in type(module).__name__.lower()]
        found = [p for module in norms for p in module.parameters(recurse=False) if p.ndim == 1]
    elif kind == "lowrank":
        linears = [m for block in tower.blocks for m in block.modules() if isinstance(m, nn.Linear)]
        found = [linear.weight for linear in linears]
    else:
        found = list(model.parameters())
    wanted = set(found) - set(reduction_of(model).parameters())
    if not wanted:
        others = ", ".join(other for other in PARTS if other != kind)
        raise UserError(f"unfreeze={kind!r}: {type(model).__name__} has no {PARTS[kind]}; expected one of {others}")
    return {name: parameter for name, parameter in model.named_parameters() if parameter in wanted}


class LowRank:
    """Changes of low rank: W + up @ down for the weight W of each linear layer in the blocks.

    The sum is written into the model's own weights after every step, so that the model has the shape, the names and
    the speed of the base at any time. Gradients of the two factors follow from those of the sum by the chain rule.

    Args:
        model: A reduced model.
        rank: Of the change, 1 to the smaller side of each layer.
        seed: For `down` (rank, in), drawn from N(0, 1 / in); `up` (out, rank) is zero, so that nothing has changed yet.

    Raises:
        UsageError: the rank is larger than a layer's smaller side.
        UserError: there are no linear layers in the blocks.
    """

    def __init__(self, model: nn.Module, rank: int, seed: int) -> None:
        self.weights = opened(model, "lowrank")
        self.start = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.learned: dict[str, nn.Parameter] = {}
        generator, device = torch.Generator().manual_seed(seed), device_of(model)
        for name, weight in self.weights.items():
            rows, columns = weight.shape
            if rank > min(rows, columns):
                raise UsageError(f"rank={rank}: {name} is {rows} x {columns}; expected 1 to {min(rows, columns)}")
            down = torch.randn(rank, columns, generator=generator) / columns**0.5
            self.learned[f"{name}.down"] = nn.Parameter(down.to(device))
            self.learned[f"{name}.up"] = nn.Parameter(torch.zeros(rows, rank, device=device))

    def pull(self) -> None:
        """Turn the gradients of the weights into those of the factors."""
        for name, weight in self.weights.items():
            if weight.grad is None:
                continue
            up, down, grad = self.learned[f"{name}.up"], self.learned[f"{name}.down"], weight.grad.float()
            up.grad, down.grad = grad @ down.detach().T, up.detach().T @ grad
            weight.grad = None

    def merge(self) -> None:
        """Write into the model what the factors say."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                change = self.learned[f"{name}.up"] @ self.learned[f"{name}.down"]
                weight.data.copy_(self.start[name] + change.to(weight.dtype))

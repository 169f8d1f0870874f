"""What learns in a training, and against what: the reduction, the model, or in fine-tuning a part of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tntprune.backbones.attach import device_of, reduction_of
from tntprune.backbones.base import tower_of
from tntprune.errors import UsageError, UserError
from tntprune.training.config import Training

HEADS = ("head", "head_dist", "classifier", "cls_classifier", "distillation_classifier")  # timm's, and transformers'
PARTS = {"all": "parameters", "head": "head", "norms": "norms that learn", "lowrank": "linear layers in its blocks"}


def weights_of(model: nn.Module, training: Training) -> tuple[float, float]:
    """Weigh a training's cross-entropy and divergence: by its own weights in fine-tuning, else by the method's."""
    if training.unfreeze:
        return 1 - training.share_of_kl, training.share_of_kl
    method = reduction_of(model)
    return method.ce, method.kl


def learned_parameters(model: nn.Module, tunes: bool, unfreeze: str | None = None) -> dict[str, nn.Parameter]:
    """Name what gradients have to reach: the reduction's parameters, and the model's own if it `tunes`; or those of the
    model, never the reduction's, that are unfrozen.

    Of `unfreeze`, "head" is the classifiers, "norms" the weights and biases of every norm, "lowrank" the weights of the
    linear layers in the blocks, whose changes are of low rank.

    Raises:
        UserError: the model has none of them.
    """
    tower: Any = tower_of(model)
    own = set(reduction_of(model).parameters())
    wanted: set[Any] = own
    if unfreeze == "head":
        wanted = {p for name in HEADS if getattr(model, name, None) for p in getattr(model, name).parameters()} - own
    elif unfreeze == "norms":
        norms = [module for module in tower.modules() if "norm" in type(module).__name__.lower()]
        wanted = {p for module in norms for p in module.parameters(recurse=False) if p.ndim == 1} - own
    elif unfreeze == "lowrank":
        wanted = {m.weight for block in tower.blocks for m in block.modules() if isinstance(m, nn.Linear)} - own
    elif unfreeze or tunes:
        wanted = set(model.parameters()) - (own if unfreeze else set())
    if unfreeze and not wanted:
        others = ", ".join(other for other in PARTS if other != unfreeze)
        raise UserError(
            f"unfreeze={unfreeze!r}: {type(model).__name__} has no {PARTS[unfreeze]}; expected one of {others}"
        )
    return {name: parameter for name, parameter in model.named_parameters() if parameter in wanted}


@contextmanager
def learning(model: nn.Module, tunes: bool = False, unfreeze: str | None = None) -> Iterator[None]:
    """Let the reduction learn, in training mode; the base is in eval mode, and frozen unless it `tunes`.

    With `unfreeze` that of the base learns instead, and the reduction is in eval mode too. All is undone after.
    """
    method = reduction_of(model)
    modes = {module: module.training for module in model.modules()}
    learns = {parameter: (parameter.requires_grad, parameter.grad) for parameter in model.parameters()}
    model.requires_grad_(False).eval()
    for parameter in learns:
        parameter.grad = None  # a caller's would be added to, where no optimizer has the parameter
    method.train(not unfreeze)
    for parameter in learned_parameters(model, tunes, unfreeze).values():
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, (learned, grad) in learns.items():
            parameter.requires_grad_(learned)
            parameter.grad = grad
        method.trained = 1.0


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
        self.weights = learned_parameters(model, True, "lowrank")
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

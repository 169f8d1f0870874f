"""What learns in a training, and against what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tntprune.backbones.attach import reduction_of
from tntprune.training.config import Training
from tntprune.training.tuning import opened


def weights_of(model: nn.Module, training: Training) -> tuple[float, float]:
    """The weights of a training's cross-entropy and divergence: its own in fine-tuning, else the method's."""
    if training.unfreeze:
        return 1 - training.share_of_kl, training.share_of_kl
    method = reduction_of(model)
    return method.ce, method.kl


def learned_parameters(
    model: nn.Module, tunes: bool, unfreeze: str | None = None
) -> Iterator[tuple[str, nn.Parameter]]:
    """What gradients have to reach in a training: the reduction's parameters, and the model's own if it is trained too;
    or those of the model that are unfrozen.
    """
    if unfreeze:
        yield from opened(model, unfreeze).items()
        return
    own = set(reduction_of(model).parameters())
    for name, parameter in model.named_parameters():
        if tunes or parameter in own:
            yield name, parameter


@contextmanager
def learning(model: nn.Module, tunes: bool = False, unfreeze: str | None = None) -> Iterator[None]:
    """The reduction learns, in training mode; the base is in eval mode, and frozen unless it `tunes`. Undone after.

    With `unfreeze` that of the base learns instead, and the reduction is in eval mode too.
    """
    method = reduction_of(model)
    modes = {module: module.training for module in model.modules()}
    learns = {parameter: (parameter.requires_grad, parameter.grad) for parameter in model.parameters()}
    model.requires_grad_(False).eval()
    for parameter in learns:
        parameter.grad = None  # a caller's would be added to, where no optimizer has the parameter
    method.train(not unfreeze)
    for _, parameter in learned_parameters(model, tunes, unfreeze):
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, (learning, grad) in learns.items():
            parameter.requires_grad_(learning)
            parameter.grad = grad
        method.trained = 1.0

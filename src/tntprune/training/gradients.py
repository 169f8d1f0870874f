"""Gradients of a step that several processes worked on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tntprune.system.distributed import World


def together(parameters: Sequence[nn.Parameter], loss: torch.Tensor, world: World) -> torch.Tensor:
    """Add up the gradients of all processes, in place, and the loss: one message a step.

    A parameter that nobody's part of the batch had to do with stays without a gradient, as it does in one process.

    Args:
        parameters: The same ones in every process, on one device.
        loss: A scalar, this process's.
        world: The processes.

    Returns:
        The sum of the losses.
    """
    if world.size == 1:
        return loss
    had = torch.tensor([float(p.grad is not None) for p in parameters], device=loss.device)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = world.sum(torch.cat([*(grad.float().flatten() for grad in grads), had, loss.float().reshape(1)]))
    sums: Sequence[torch.Tensor] = flat.split([*(p.numel() for p in parameters), len(parameters), 1])
    *sums, had, total = sums
    for parameter, value, owners in zip(parameters, sums, had.tolist(), strict=True):
        parameter.grad = value.view_as(parameter).to(parameter.dtype) if owners else None
    return total.reshape(())

"""From a model to a graph that any exporter takes: a thin module around it, captured by torch.export."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tntprune.backbones.base import find_backbone, tower_of
from tntprune.backbones.reduced import Reduced
from tntprune.errors import UserError
from tntprune.exporters.formats import EMBEDDING, INPUT, KEPT, LOGITS, Captured, quiet
from tntprune.system.messages import first_line


class Answering(nn.Module):
    """Images to logits in fp32 and, if asked for, the places in the original grid of the tokens left at the end.

    Args:
        model: A supported model, reduced or not.
        indices: Whether the places are given too, (B, n); -1 for a token that has none.
    """

    def __init__(self, model: nn.Module, indices: bool) -> None:
        super().__init__()
        self.model, self.indices, self.backbone = model, indices, find_backbone(model)
        self.dtype = next(model.parameters()).dtype
        first = LOGITS if self.backbone.classes(model) else EMBEDDING  # what a model without classes gives
        self.outputs = (first, KEPT) if indices else (first,)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take (B, C, H, W) in fp32, whatever the model computes in."""
        answer = self.backbone.answer(self.model, images.to(self.dtype), narrow=not self.indices)
        logits = answer.logits.float()
        if not self.indices:
            return (logits,)
        assert answer.tokens is not None  # of a model of images alone
        return (logits, answer.tokens.index)


def exportable(model: nn.Module) -> None:
    """Refuse what cannot become one graph.

    Raises:
        UserError: the model is not supported, takes more than images of one size, is in training mode, not in fp32, or
            keeps another number of tokens in each image.
    """
    if not find_backbone(model).in_parts:
        raise UserError(
            f"{type(model).__name__} takes prompts, or packed images of every size, and a file has one graph for "
            "images of one size; expected a classifier or an embedder"
        )
    if model.training:
        raise UserError("the model is in training mode; call model.eval() first")
    odd = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32), None)
    if odd is not None:
        raise UserError(f"the model is in {str(odd).removeprefix('torch.')}; expected fp32, the export converts it")
    tower = tower_of(model)
    if isinstance(tower, Reduced) and tower.reduction.config.variable:
        raise UserError(
            f"{tower.reduction.config.method} keeps another number of tokens in each image, and a file has one graph "
            "for all of them; expected a method with fixed counts, such as tnt, topk, evit, tome, or avit with at"
        )


def capture(model: nn.Module, dtype: torch.dtype, indices: bool, batch: int | None) -> Captured:
    """Capture a model as a graph. The model itself stays as it is.

    Args:
        model: What `exportable` has let through.
        dtype: What the graph computes in; scores are ranked in fp32 all the same.
        indices: See `Answering`.
        batch: Images at a time, or None for any number.

    Raises:
        UserError: torch cannot capture it, and why.
    """
    twin = copy.deepcopy(model).cpu().to(dtype)
    tower = tower_of(twin)
    if isinstance(tower, Reduced):
        tower.traces = None  # nobody records what a graph does
    answering = Answering(twin, indices).eval().requires_grad_(False)
    count = 2 if batch is None else batch  # 1 would be taken for a constant
    images = torch.zeros(count, *find_backbone(model).input_size(model))
    shapes = {INPUT: {0: torch.export.Dim("batch", min=1, max=2**16)}} if batch is None else None
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(answering, (images,), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises a dozen kinds
        raise UserError(f"torch.export cannot capture the model ({first_line(error)})") from None
    return Captured(program, answering.outputs, batch)

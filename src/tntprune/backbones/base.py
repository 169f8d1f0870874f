"""What the library must know of a family of models, and the walk of the tokens through a reduced one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tntprune.errors import UserError
from tntprune.methods.base import Layout, Method
from tntprune.tokens import Tokens, start
from tntprune.trace import Trace

FAMILIES = ("timm_vit",)  # the files of this folder, in the order in which they are asked


class BlockCost(NamedTuple):
    """Multiply-accumulates of one block: `attention` for each token, `pair` for each pair, `mlp` for each token."""

    attention: int
    pair: int
    mlp: int


class Costs(NamedTuple):
    """Multiply-accumulates of everything for one image of the model's own size.

    Args:
        embed: The patch embedding, with the norm that may follow it.
        blocks: Each block.
        norm: The final norm, for each token, prefix tokens included.
        pool: Attention pooling, for each patch token.
        head: The rest: heads, the norm after pooling, what pooling does whatever the number of tokens.
    """

    embed: int
    blocks: tuple[BlockCost, ...]
    norm: int
    pool: int
    head: int


class Backbone(ABC):
    """One family. `swaps` maps each class of the family to the static subclass that a reduced model takes on."""

    swaps: ClassVar[dict[type[nn.Module], type[nn.Module]]]

    @abstractmethod
    def obstacle(self, model: nn.Module) -> str | None:
        """What about this model is not supported, by name; None if nothing."""

    @abstractmethod
    def layout(self, model: nn.Module) -> Layout:
        """The shape of the model."""

    @abstractmethod
    def costs(self, model: nn.Module) -> Costs:
        """What its parts cost."""

    @abstractmethod
    def ce_logits(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """The logits that cross-entropy is taken of in training: those of the CLS head alone on distilled models."""


def find_backbone(model: nn.Module) -> Backbone:
    """The adapter of a model, reduced or not.

    Raises:
        UserError: no adapter knows the model's class, or something about the model is not supported.
    """
    adapters: list[Backbone] = [import_module(f"tntprune.backbones.{name}").ADAPTER for name in FAMILIES]
    for adapter in adapters:
        if type(model) in adapter.swaps or type(model) in adapter.swaps.values():
            if reason := adapter.obstacle(model):
                raise UserError(f"{reason} is not supported")
            return adapter
    known = ", ".join(f"{c.__module__.split('.')[0]} {c.__name__}" for a in adapters for c in a.swaps)
    hint = "; reduce the model before it is wrapped or compiled" if hasattr(model, "_orig_mod") else ""
    raise UserError(f"{type(model).__module__}.{type(model).__name__} is not supported; expected {known}{hint}")


class Reduced:
    """What the reduced class of every family has besides its family's own class."""

    reduction: Method
    trace: Trace | None = None  # where `record` wants to know what is kept
    blocks: nn.Sequential
    num_prefix_tokens: int
    grad_checkpointing: bool

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """Images to (B, prefix + N, D)."""
        raise NotImplementedError

    def walk(self, images: torch.Tensor) -> Tokens:
        """From images to the tokens that leave the last block, before the final norm."""
        if self.trace is not None:
            self.trace.begin()
        tokens = start(self.embed(images), self.num_prefix_tokens, follow=self.trace is not None)
        plan = self.reduction.plan(tokens.count)
        for number in range(len(self.blocks) + 1):
            if number:
                tokens = replace(tokens, x=self.run_block(self.blocks[number - 1], tokens.x))
            before = tokens
            tokens = self.reduction(tokens, number, plan)
            if self.trace is not None and tokens.index is not before.index:
                self.trace.add(number, tokens)
        return tokens

    def run_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One block, (B, n, D) to (B, n, D)."""
        if self.grad_checkpointing and torch.is_grad_enabled() and x.requires_grad:
            recomputed: torch.Tensor = checkpoint(block, x, use_reentrant=False)
            return recomputed
        out: torch.Tensor = block(x)
        return out

    def forward_intermediates(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: timm would fold the remaining tokens into a false grid, without an error."""
        raise UserError(
            "forward_intermediates needs the full grid of tokens; call tntprune.restore_ first, "
            "or read what is left with forward_features and tntprune.record"
        )

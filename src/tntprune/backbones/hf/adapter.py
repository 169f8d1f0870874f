"""What the adapters of Hugging Face's transformers have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import transformers
from torch import nn

from tntprune.backbones.base import Answer, Backbone, BlockCost, Costs
from tntprune.backbones.hf.anatomy import Anatomy, as_it_is
from tntprune.backbones.hf.towers import ReducedTower
from tntprune.errors import UserError
from tntprune.methods.base import Layout
from tntprune.ops.tokens import Tokens, start

OLDEST = (5, 24)  # of transformers; before it, the blocks are built otherwise


class HuggingFace(Backbone):
    """An adapter without what differs from family to family."""

    anatomy: ClassVar[Anatomy]

    @property
    def names(self) -> list[str]:
        return [self.anatomy.name]

    def takes_images(self, model: nn.Module) -> bool:
        return not hasattr(model, "text_model")  # which reads words

    def classes(self, model: nn.Module) -> int:
        return int(getattr(model, "num_labels", 0))  # which models without a classifier do not have

    def input_size(self, model: nn.Module) -> tuple[int, int, int]:
        tower = self.tower(model)
        return (self.anatomy.patch(tower).in_channels, *self.anatomy.image_size(tower))

    def check_images(self, model: nn.Module, images: torch.Tensor) -> None:
        super().check_images(model, images)
        given, own = tuple(images.shape[-2:]), self.anatomy.image_size(self.tower(model))
        if self.anatomy.interpolates and given != own:
            raise UserError(
                f"images of {given[0]} x {given[1]}: {type(model).__name__} takes {own[0]} x {own[1]}; expected that "
                "size, or a model made for another one (image_size in its config)"
            )
        if not all(self.grid(model, images)):
            raise UserError(f"images of {given[0]} x {given[1]}: smaller than one patch; expected larger ones")

    def grid(self, model: nn.Module, images: torch.Tensor) -> tuple[int, int]:
        return self.anatomy.grid(self.tower(model), images)

    def obstacle(self, model: nn.Module) -> str | None:
        if reason := outdated():
            return reason
        for block in self.anatomy.blocks(self.tower(model)):
            if self.plain(block) not in self.anatomy.layers:
                names = ", ".join(layer.__name__ for layer in self.anatomy.layers)
                return f"block {self.plain(block).__name__} (supported: {names})"
        return None

    def pool(self, model: nn.Module) -> str:
        """Return what the head reads, as in `Layout`."""
        return "token"

    def layout(self, model: nn.Module) -> Layout:
        tower, anatomy = self.tower(model), self.anatomy
        blocks, prefix, patch = anatomy.blocks(tower), anatomy.prefix(tower), anatomy.patch(tower)
        parts = anatomy.parts(blocks[0])
        rows, columns = (size // step for size, step in zip(anatomy.image_size(tower), patch.stride, strict=True))
        return Layout(
            family=f"transformers {anatomy.name}",
            embed_dim=parts.query.in_features,
            depth=len(blocks),
            prefix=prefix,
            grid=(rows, columns),
            cls=prefix > 0,
            distilled=hasattr(tower.embeddings, "distillation_token"),
            heads=parts.query.out_features // parts.head_dim,
            attn_dim=parts.query.out_features,
            pool=self.pool(model),
        )

    def projection(self, block: nn.Module) -> tuple[nn.Linear, torch.Tensor | None] | None:
        parts = self.anatomy.parts(block)
        plain = parts.join is as_it_is or isinstance(parts.join, nn.Dropout)
        return (parts.project, None) if plain else None

    def costs(self, model: nn.Module) -> Costs:
        tower, shape = self.tower(model), self.layout(model)
        norm = self.anatomy.norm * shape.embed_dim  # as fvcore counts it, for each token
        blocks = []
        for block in self.anatomy.blocks(tower):
            parts = self.anatomy.parts(block)
            attention = linears(parts.query, parts.key, parts.value, parts.project)
            key = linears(parts.key, parts.value) + norm
            blocks.append(BlockCost(attention + norm, 2 * shape.attn_dim, linears(parts.mlp) + norm, key))
        embed = shape.patches * self.anatomy.patch(tower).weight.numel()
        return self.ends(model, Costs(embed, tuple(blocks), norm, 0, 0), shape)

    @abstractmethod
    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        """Add the costs before the first and after the last block. The final norm is counted per token so far."""

    def output(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return self.answer(model, images, narrow=True).logits  # a whole CLIP would ask for words too

    def answer(self, model: nn.Module, images: torch.Tensor, narrow: bool = False) -> Answer:
        tower: Any = self.tower(model)
        if isinstance(tower, ReducedTower):
            return self.judge(model, tower.walk(images, narrow=narrow and self.is_narrow(model)))
        x, pooled = self.unpruned(tower, images)
        tokens = start(x, self.anatomy.prefix(tower))
        return Answer(*self.head(model, tokens, pooled), tokens)

    def judge(self, model: nn.Module, tokens: Tokens) -> Answer:
        tower: Any = self.tower(model)
        tokens = tower.final(tokens)
        return Answer(*self.head(model, tokens, tower.pooled(tokens)), tokens)

    def unpruned(self, tower: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last tokens of a tower that is not reduced, (B, prefix + N, D), and what it pools of them."""
        out = tower(images, **self.anatomy.options(tower, images))
        return out.last_hidden_state, out.pooler_output

    @abstractmethod
    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and those for cross-entropy; of a model without classes the embedding."""


def outdated() -> str | None:
    """Name the installed transformers and the oldest that is supported; None where it is new enough."""
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= OLDEST:
        return None
    wanted = ".".join(map(str, OLDEST))
    return f"transformers {transformers.__version__} (expected {wanted} or newer: pip install -U transformers)"


def linears(*modules: nn.Module) -> int:
    """Return multiply-accumulates of all linear layers in some modules, for each token."""
    return sum(m.weight.numel() for module in modules for m in module.modules() if isinstance(m, nn.Linear))

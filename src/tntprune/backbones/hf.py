"""What the vision towers of Hugging Face's transformers have in common: one walk, one output, one way of saving.

The reduced classes bear the names of the plain ones, because transformers looks classes up by name: in `architectures`
of a saved config, and in its pipelines.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

from tntprune.attention import Heads
from tntprune.backbones.base import Answer, Backbone, BlockCost, Costs, Halves, Reduced, Visit, tower_of
from tntprune.checkpoint import save
from tntprune.errors import UserError
from tntprune.methods.base import Layout
from tntprune.reduce import base_of
from tntprune.tokens import Tokens, start

OLDEST = (5, 24)  # of transformers; before it, the blocks are built otherwise


class Parts(NamedTuple):
    """One block of any family, under one set of names.

    Args:
        norm: Before the attention.
        query: The projection to all heads; key and value: the same.
        project: What the heads give, to the width of the tokens.
        head_dim: Of each head.
        scale: Of the logits.
        dropout: Of the attention map, in training.
        join: What is done to the attention's output before it is added to the residual.
        mlp_norm: Before the MLP.
        mlp: The MLP.
        mlp_join: What is done to its output before it is added to the residual.
    """

    norm: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    project: nn.Linear
    head_dim: int
    scale: float
    dropout: float
    join: Callable[[torch.Tensor], torch.Tensor]
    mlp_norm: nn.Module
    mlp: nn.Module
    mlp_join: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Anatomy:
    """Where the towers of one family have what every one of them has.

    Args:
        name: Of the family.
        layers: The classes of its blocks.
        blocks: A tower's blocks.
        prefix: A tower's number of prefix tokens.
        patch: A tower's patch convolution.
        image_size: A tower's own image size, rows and columns of pixels.
        parts: A block's parts.
        interpolates: Whether its embedding has to be told to interpolate positions, where it does not do so by itself.
    """

    name: str
    layers: tuple[type[nn.Module], ...]
    blocks: Callable[[Any], nn.ModuleList]
    prefix: Callable[[Any], int]
    patch: Callable[[Any], nn.Conv2d]
    image_size: Callable[[Any], tuple[int, int]]
    parts: Callable[[Any], Parts]
    interpolates: bool = True

    def grid(self, tower: Any, images: torch.Tensor) -> tuple[int, int]:
        """Rows and columns of patches of such images."""
        height, width = self.patch(tower).stride
        return images.shape[-2] // height, images.shape[-1] // width

    def options(self, tower: Any, images: torch.Tensor) -> dict[str, Any]:
        """What its embedding has to be told of images of this size, where the caller does not say."""
        own = tuple(images.shape[-2:]) == self.image_size(tower)
        return {"interpolate_pos_encoding": True} if self.interpolates and not own else {}


class ReducedModel:
    """A model of transformers with a reduction somewhere in it."""

    def save_pretrained(
        self: Any,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save the unpruned model as transformers does, and the reduction beside it, for `tntprune.load_`."""
        tower = tower_of(self)
        path = next(name for name, module in self.named_modules() if module is tower)
        own = f"{path}.reduction." if path else "reduction."
        if state_dict is not None:
            state_dict = {name: value for name, value in state_dict.items() if not name.startswith(own)}
        hub = {name: kwargs.pop(name) for name in ("repo_id", "commit_message", "create_pr") if name in kwargs}
        base_of(self).save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)
        if is_main_process:
            save(self, save_directory)
        if push_to_hub and is_main_process:  # which saves once more, so that the reduction goes there too
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), token=kwargs.get("token"), **hub)


class ReducedTower(ReducedModel, Reduced):
    """What the reduced towers have in common besides their families' own classes."""

    anatomy: ClassVar[Anatomy]
    config: Any
    embeddings: Any

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        """The blocks."""
        return self.anatomy.blocks(self)

    @property
    def num_prefix_tokens(self) -> int:  # type: ignore[override]
        """CLS, distillation and register tokens."""
        return self.anatomy.prefix(self)

    @property
    def grad_checkpointing(self) -> bool:  # type: ignore[override]
        """As `gradient_checkpointing_enable` has set it."""
        return bool(self.blocks[0].gradient_checkpointing)

    def grid(self, images: torch.Tensor) -> tuple[int, int]:
        return self.anatomy.grid(self, images)

    def embed(self, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        return self.embeddings(images, **(options or self.anatomy.options(self, images))), None

    def whole(self, number: int, x: torch.Tensor, places: Any) -> torch.Tensor:
        # not the layer's own __call__, which would checkpoint what the walk checkpoints already
        return nn.Module.__call__(self.blocks[number - 1], x, None)  # type: ignore[no-any-return]

    def halves(self, number: int, places: Any) -> Halves:
        parts = self.anatomy.parts(self.blocks[number - 1])
        fused = self.config._attn_implementation != "eager"

        def open_(x: torch.Tensor, bias: torch.Tensor | None) -> Heads:
            x = parts.norm(x)
            query, key, value = (
                layer(x).unflatten(2, (-1, parts.head_dim)).transpose(1, 2)  # (B, heads, n, head_dim)
                for layer in (parts.query, parts.key, parts.value)
            )
            return Heads(query, key, value, parts.scale, bias, fused=fused, dropout=parts.dropout)

        def close(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return x + parts.join(parts.project(out.transpose(1, 2).flatten(2)))

        def mlp(x: torch.Tensor) -> torch.Tensor:
            return x + parts.mlp_join(parts.mlp(parts.mlp_norm(x)))

        return Halves(open_, close, mlp)

    def pooled(self, tokens: Tokens) -> torch.Tensor | None:
        """Tokens that leave `final` to the `pooler_output`, (B, D)."""
        raise NotImplementedError

    def run(
        self,
        pixel_values: torch.Tensor,
        masks: tuple[Any, ...] = (),
        flags: dict[str, Any] | None = None,
        pools: bool = True,
        **options: Any,
    ) -> tuple[Tokens, BaseModelOutputWithPooling]:
        """From images to the tokens that leave the last norm, and to what transformers makes of them.

        Args:
            pixel_values: (B, C, H, W).
            masks: Arguments that a reduced model does not take: each has to be None.
            flags: What else the caller gave: `output_hidden_states`, `output_attentions`, and what nobody looks at.
            pools: Whether anyone reads the `pooler_output`.
            **options: For the embedding.

        Raises:
            UserError: something was asked for that a reduced model cannot do.
        """
        asked = {
            name: (flags or {}).get(name, getattr(self.config, name, False))
            for name in ("output_attentions", "output_hidden_states")
        }
        if any(mask is not None for mask in masks):
            raise UserError(
                "a reduced model takes no attention_mask or bool_masked_pos: a mask for all tokens fits no longer; "
                "expected none, or call tntprune.restore_ first"
            )
        if asked["output_attentions"]:
            raise UserError(
                "a reduced model gives no attention maps (output_attentions=True): the places of their rows and "
                "columns would be lost; expected False, or call tntprune.restore_ first"
            )
        wanted = asked["output_hidden_states"]
        if wanted not in (None, False, True):
            raise UserError(
                f"output_hidden_states={wanted!r}: a reduced model gives all or none; expected True or False"
            )
        states: list[torch.Tensor] = []
        visit: Visit | None = (lambda number, tokens: states.append(tokens.x)) if wanted else None
        tokens = self.final(self.walk(pixel_values, visit, **options))
        out = BaseModelOutputWithPooling(
            last_hidden_state=tokens.x,
            pooler_output=self.pooled(tokens) if pools else None,
            hidden_states=tuple(states) if wanted else None,
        )
        return tokens, out

    def answer(self, pixel_values: torch.Tensor, masks: tuple[Any, ...], flags: dict[str, Any], **options: Any) -> Any:
        """What `forward` returns; see `run`."""
        return as_asked(self, self.run(pixel_values, masks, flags, **options)[1], flags)


class ReducedPooling(ReducedModel):
    """A classifier whose head takes the mean of the patch tokens, which has to weigh merged ones by their size."""

    def classify(
        self: Any, labels: torch.Tensor | None, found: tuple[Tokens, Any], flags: dict[str, Any], **loss: Any
    ) -> Any:
        """What `forward` returns.

        Args:
            labels: (B,), for a loss.
            found: What the tower's `run` gives.
            flags: What else the caller gave.
            **loss: For the loss function.
        """
        logits = self.classifier(self.pool(found[0]))
        error = None if labels is None else self.loss_function(labels, logits, self.config, **loss)
        out = ImageClassifierOutput(loss=error, logits=logits, hidden_states=found[1].hidden_states)
        return as_asked(self, out, flags)


def as_asked(model: Any, out: Any, flags: dict[str, Any]) -> Any:
    """An output of transformers as it is, or as a tuple where `return_dict` is False."""
    given = flags.get("return_dict")
    return out if (model.config.return_dict if given is None else given) else out.to_tuple()


def mean_by_size(tokens: Tokens) -> torch.Tensor:
    """The mean of the patch tokens, (B, n, D) to (B, D): a merged one counts as often as it stands for patches."""
    if tokens.size is None:
        return tokens.patches.mean(1)
    size = tokens.size[:, :, None]
    return ((tokens.patches * size).sum(1) / size.sum(1).clamp(min=1e-6)).to(tokens.x.dtype)


class HuggingFace(Backbone):
    """What the adapters have in common."""

    anatomy: ClassVar[Anatomy]

    def classes(self, model: nn.Module) -> int:
        return int(getattr(model, "num_labels", 0))  # which models without a classifier do not have

    def input_size(self, model: nn.Module) -> tuple[int, int, int]:
        tower = self.tower(model)
        return (self.anatomy.patch(tower).in_channels, *self.anatomy.image_size(tower))

    def grid(self, model: nn.Module, images: torch.Tensor) -> tuple[int, int]:
        return self.anatomy.grid(self.tower(model), images)

    def obstacle(self, model: nn.Module) -> str | None:
        if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
            wanted = ".".join(map(str, OLDEST))
            return f"transformers {transformers.__version__} (expected {wanted} or newer: pip install -U transformers)"
        for block in self.anatomy.blocks(self.tower(model)):
            if type(block) not in self.anatomy.layers:
                names = ", ".join(layer.__name__ for layer in self.anatomy.layers)
                return f"block {type(block).__name__} (supported: {names})"
        return None

    def pool(self, model: nn.Module) -> str:
        """What the head reads, as in `Layout`."""
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

    def costs(self, model: nn.Module) -> Costs:
        tower, shape = self.tower(model), self.layout(model)
        norm = 5 * shape.embed_dim  # as fvcore counts a LayerNorm, for each token
        blocks = []
        for block in self.anatomy.blocks(tower):
            parts = self.anatomy.parts(block)
            attention = linears(parts.query, parts.key, parts.value, parts.project)
            blocks.append(BlockCost(attention + norm, 2 * shape.attn_dim, linears(parts.mlp) + norm))
        embed = shape.patches * self.anatomy.patch(tower).weight.numel()
        return self.ends(model, Costs(embed, tuple(blocks), norm, 0, 0), shape)

    @abstractmethod
    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        """The costs with those before the first and after the last block; so far the final norm is for each token."""

    def answer(self, model: nn.Module, images: torch.Tensor) -> Answer:
        tower: Any = self.tower(model)
        if isinstance(tower, ReducedTower):
            tokens, out = tower.run(images)
        else:
            out = tower(images, **self.anatomy.options(tower, images))
            tokens = start(out.last_hidden_state, self.anatomy.prefix(tower))
        return Answer(*self.head(model, tokens, out.pooler_output), tokens)

    @abstractmethod
    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits, and those for cross-entropy, of what a tower gives; of a model without classes the embedding."""


def linears(*modules: nn.Module) -> int:
    """Multiply-accumulates of all linear layers in some modules, for each token."""
    return sum(m.weight.numel() for module in modules for m in module.modules() if isinstance(m, nn.Linear))

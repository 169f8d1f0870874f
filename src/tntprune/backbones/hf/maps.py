"""Backbones of transformers that give feature maps, for dense heads."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import BackboneOutput

from tntprune.backbones.hf.towers import ReducedTower, as_asked
from tntprune.backbones.reduced import refuse_proxy
from tntprune.ops.tokens import Tokens, fill, spread


class MapsTower(ReducedTower):
    """A reduced tower that gives a full map of each stage asked for."""

    norms: bool | None = None  # whether every stage is normalised; None where the config says so
    reshapes: bool | None = None  # whether a stage is (B, D, rows, columns) and not (B, N, D); None likewise
    norms_last = False  # whether the last stage is normalised even where `apply_layernorm` is off
    prefixed = True  # whether stages that are not reshaped have their prefix tokens

    def forward(self: Any, pixel_values: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Turn images into a map of each stage asked for, with dropped places filled as in `tntprune.features`.

        Of a stage come the tokens that its block computed, before those go that are dropped after it; of the last, what
        is left.
        """
        refuse_proxy(pixel_values)
        wanted = self.check((attention_mask,), kwargs)
        grid, depth = self.grid(pixel_values), len(self.blocks)
        norms = self.config.apply_layernorm if self.norms is None else self.norms
        reshapes = self.config.reshape_hidden_states if self.reshapes is None else self.reshapes
        maps: list[torch.Tensor] = []
        classes: list[torch.Tensor] = []
        states: list[torch.Tensor | None] = []

        def add(number: int, tokens: Tokens) -> None:
            if self.stage_names[number] not in self.out_features:
                return
            tokens = self.reduction.unfold(tokens)
            normed = norms or (self.norms_last and number == depth)
            tokens = self.final(tokens) if normed else tokens
            classes.append(tokens.x[:, 0])
            if reshapes:
                maps.append(fill(tokens, grid))
            else:
                first = [tokens.x[:, : tokens.prefix]] if self.prefixed else []
                maps.append(torch.cat([*first, spread(tokens, grid)], 1))  # (B, N, D), or with the prefix tokens

        def made(number: int, tokens: Tokens) -> None:
            if number < depth:
                add(number, tokens)

        def left(number: int, tokens: Tokens) -> None:
            states.append(tokens.x if number in wanted else None)
            if number == depth:
                add(number, self.joined(tokens))

        self.walk(pixel_values, visit=left, made=made)
        return as_asked(self, self.mapped(tuple(maps), tuple(classes), tuple(states) if wanted else None), kwargs)

    def mapped(self, maps: tuple[Any, ...], classes: tuple[torch.Tensor, ...], states: tuple[Any, ...] | None) -> Any:
        """Return the output of the maps, of the stages' CLS tokens and of the hidden states that were asked for."""
        return BackboneOutput(feature_maps=maps, hidden_states=states)

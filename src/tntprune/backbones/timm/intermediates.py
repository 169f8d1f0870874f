"""timm's interface to the tokens of inner blocks, for reduced models: the full grid, with dropped places filled."""

from __future__ import annotations

import copy
from typing import Any

import torch
from timm.models._features import feature_take_indices

from tntprune.errors import UserError
from tntprune.ops.tokens import Tokens, fill, spread


class Intermediates:
    """What a reduced class of timm's answers besides images with logits."""

    def forward_intermediates(
        self: Any,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """timm's own, with the full grid of every block that is asked for.

        Of a block come the tokens that it computed, before those go that are dropped after it; what was dropped earlier
        is filled as in `features`. Of the last block comes what the last norm sees. The features that are not
        intermediate are those of `forward_features`: the tokens that are left, for `forward_head`.

        Args:
            x: Images (B, C, H, W).
            indices: The last so many blocks, or these blocks from 0; None for all.
            return_prefix_tokens: Give pairs of the grid and the prefix tokens (B, P, D).
            norm: Apply the last norm to each.
            stop_early: Run no block after the last that is asked for.
            output_fmt: "NCHW" for (B, D, rows, columns), "NLC" for (B, N, D).
            intermediates_only: Leave the features out that are not intermediate.
            output_dict: Give a dict, with timm's keys.
            attn_mask: Refused.
            is_causal: Refused.

        Raises:
            UserError: a mask is given, or there is no such format.
        """
        if attn_mask is not None or is_causal:
            raise UserError("a reduced model takes no attn_mask or is_causal: a mask for all tokens fits no longer")
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt={output_fmt!r}: expected 'NCHW' or 'NLC'")
        depth, grid = len(self.blocks), self.grid(x)
        wanted, most = feature_take_indices(depth, indices)
        grids, prefixes = [], []

        def note(tokens: Tokens) -> None:
            tokens = self.reduction.unfold(tokens)
            tokens = self.final(tokens) if norm else tokens
            grids.append((fill if output_fmt == "NCHW" else spread)(tokens, grid))
            prefixes.append(tokens.x[:, : tokens.prefix])

        def made(number: int, tokens: Tokens) -> None:
            if number - 1 in wanted and number < depth:
                note(tokens)

        def left(number: int, tokens: Tokens) -> None:
            if number - 1 in wanted and number == depth:
                note(tokens)

        tokens = self.walk(x, visit=left, made=made, last=most + 1 if stop_early else None)
        both = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            told = {"image_intermediates": grids}
            if both:
                told["image_intermediates_prefix"] = prefixes
            return told if intermediates_only else {**told, "image_features": self.final(tokens).x}
        found = list(zip(grids, prefixes, strict=True)) if both else grids
        return found if intermediates_only else (self.final(tokens).x, found)

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the reduction was made for all blocks."""
        raise UserError(
            "prune_intermediate_layers takes blocks away for which the reduction was made; "
            "expected it before tntprune.reduce_, as timm.create_model(..., features_only=True) does it"
        )

    def set_input_size(self: Any, *args: Any, **kwargs: Any) -> None:
        """timm's own; the reduction then counts the patches of the new size. One that is refused changes nothing."""
        tried = copy.deepcopy(self.patch_embed)
        tried.set_input_size(*args, **kwargs)
        copy.deepcopy(self.reduction).resize(tuple(tried.grid_size))
        super().set_input_size(*args, **kwargs)  # type: ignore[misc]
        self.reduction.resize(tuple(self.patch_embed.grid_size))

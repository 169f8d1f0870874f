"""Hugging Face's BEiT, alone and with a classifier. The relative position bias goes with the tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.beit import modeling_beit as beit

from tntprune.backbones.base import Costs
from tntprune.backbones.blocks import Inside
from tntprune.backbones.hf.adapter import HuggingFace, linears
from tntprune.backbones.hf.anatomy import Anatomy, Parts
from tntprune.backbones.hf.towers import (
    OpenAttention,
    OpenLayer,
    ReducedModel,
    ReducedTower,
    derived,
    mean_by_size,
)
from tntprune.methods.base import Layout
from tntprune.ops.attention import added
from tntprune.ops.tokens import Tokens


def _parts(block: Any) -> Parts:
    attention = block.attention
    return Parts(
        block.layernorm_before, attention, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        attention.head_dim, lambda x: block.drop_path(block.lambda_1 * block.dropout(x)),
        block.layernorm_after, block.mlp, lambda x: block.drop_path(block.lambda_2 * block.dropout(x)),
    )  # fmt: skip


class Window(NamedTuple):
    """What a bias by relative position needs to know.

    Args:
        pixels: Rows and columns of pixels of the images.
        grid: Rows and columns of patches.
        shared: The bias that all blocks share, (1 or B, heads, 1 + n, 1 + n), of the tokens that there are; or None.
        rows: (B, 1 + n), the row of each token in a bias for all places, one past its end for a token without a place;
            None if all are there.
    """

    pixels: tuple[int, int]
    grid: tuple[int, int]
    shared: torch.Tensor | None
    rows: torch.Tensor | None = None

    def bias(self, table: Any) -> torch.Tensor:
        """Return the bias of a table for the tokens that there are, (1 or B, heads, 1 + n, 1 + n)."""
        whole: torch.Tensor = table(self.grid)  # (1, heads, 1 + N, 1 + N)
        return whole if self.rows is None else among(whole, self.rows)


def among(whole: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Select the pairs of the tokens in some rows (B, m) of a bias (1, heads, p, p); row p is 0: (B, heads, m, m)."""
    padded = F.pad(whole[0], (0, 1, 0, 1))
    return padded[:, rows[:, :, None], rows[:, None]].transpose(0, 1)


ANATOMY = Anatomy(
    name="BEiT",
    layers=(beit.BeitLayer,),
    blocks=lambda tower: tower.layers,
    prefix=lambda tower: 1,
    patch=lambda tower: tower.embeddings.patch_embeddings.projection,
    image_size=lambda tower: tuple(tower.embeddings.patch_embeddings.image_size),
    parts=_parts,
    interpolates=False,
)


class _Layer(OpenLayer):
    parts = staticmethod(_parts)

    def attention_half(
        self: Any, x: torch.Tensor, inside: Inside, attention_mask: Any = None, window: Any = None, **context: Any
    ) -> torch.Tensor:
        own = None if self.relative_position_bias is None else window.bias(self.relative_position_bias)
        return super().attention_half(x, inside, attention_mask=added(own, attention_mask))


class _Table:
    """A table of biases that can be trained also after a pass in inference mode.

    transformers keeps the places in the table from pass to pass, for all models; autograd refuses those that were made
    in inference mode.
    """

    @staticmethod
    def generate_relative_position_index(window_size: tuple[int, int]) -> torch.Tensor:
        """Return where each pair of tokens stands in the table, (1 + N, 1 + N)."""
        index: torch.Tensor = beit.BeitRelativePositionBias.generate_relative_position_index(window_size)
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not index.is_inference():
            return index
        return index.clone()


class _Pooler:
    """A pooler whose mean weighs merged tokens by their size."""

    def forward(self: Any, hidden_states: torch.Tensor, tokens: Tokens | None = None) -> torch.Tensor:
        """Pool tokens (B, 1 + n, D) to (B, D)."""
        if tokens is None or tokens.size is None or self.layernorm is None:
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        return self.layernorm(mean_by_size(tokens))  # type: ignore[no-any-return]


class _Tower(ReducedTower):
    anatomy = ANATOMY
    output = beit.BeitModelOutputWithPooling

    def embed(self: Any, images: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Window]:
        grid, shared = self.grid(images), self.shared_position_bias
        pixels = (images.shape[-2], images.shape[-1])
        return self.embeddings(images), Window(pixels, grid, None if shared is None else shared(grid))

    def placed(self: Any, places: Window, index: torch.Tensor) -> Window:
        count = places.grid[0] * places.grid[1]
        rows = F.pad(torch.where(index < 0, count, index) + 1, (1, 0))  # (B, 1 + n), the CLS token first
        return places._replace(rows=rows, shared=None if places.shared is None else among(places.shared, rows))

    def context(self, number: int, places: Window, opened: bool) -> dict[str, Any]:
        more = {"window": places} if opened else {"resolution": places.pixels}
        return {"attention_mask": places.shared, **more}

    def run(
        self, number: int, x: torch.Tensor, places: Window, inside: Inside | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if places.rows is not None and inside is None:
            inside = Inside()  # the plain layer would make its bias for all places
        return super().run(number, x, places, inside)

    def final(self: Any, tokens: Tokens) -> Tokens:
        return replace(tokens, x=self.layernorm(tokens.x))

    def pooled(self: Any, tokens: Tokens) -> torch.Tensor | None:
        return None if self.pooler is None else self.pooler(tokens.x, tokens)

    def forward(self, pixel_values: Any, bool_masked_pos: Any = None, **kwargs: Any) -> Any:
        """Turn images into the tokens that are left, normalised, and pooled where the model does that."""
        return self.answer(pixel_values, (bool_masked_pos, kwargs.get("attention_mask")), kwargs)


class HuggingFaceBeit(HuggingFace):
    """The adapter."""

    anatomy = ANATOMY
    swaps: ClassVar = {
        beit.BeitModel: derived(beit.BeitModel, _Tower, home=__name__),
        beit.BeitForImageClassification: derived(beit.BeitForImageClassification, ReducedModel, home=__name__),
    }
    opened: ClassVar = {
        beit.BeitLayer: derived(beit.BeitLayer, _Layer, home=__name__),
        beit.BeitAttention: derived(beit.BeitAttention, OpenAttention, home=__name__),
        beit.BeitRelativePositionBias: derived(beit.BeitRelativePositionBias, _Table, home=__name__),
        beit.BeitPooler: derived(beit.BeitPooler, _Pooler, home=__name__),
    }
    holders: ClassVar = {beit.BeitForImageClassification: "beit"}

    def pool(self, model: nn.Module) -> str:
        tower: Any = self.tower(model)
        return "avg" if tower.config.use_mean_pooling and tower.pooler is not None else "token"

    def ends(self, model: Any, costs: Costs, shape: Layout) -> Costs:
        tables = [m for m in model.modules() if isinstance(m, beit.BeitRelativePositionBias)]
        rows = sum(table.num_relative_distance - 3 for table in tables)  # which are resampled at each pass
        costs = costs._replace(embed=costs.embed + 4 * shape.heads * rows)
        head = linears(getattr(model, "classifier", nn.Identity()))
        if shape.pool == "avg":  # the norm is for the mean alone
            return costs._replace(norm=0, head=costs.norm + head)
        return costs._replace(head=head)

    def head(self, model: Any, tokens: Tokens, pooled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = tokens.x[:, 0] if pooled is None else pooled
        out = model.classifier(out) if hasattr(model, "classifier") else out
        return out, out


ADAPTER = HuggingFaceBeit()

"""The vision towers of Hugging Face's Qwen2-VL, Qwen2.5-VL and Qwen3-VL, in which a token is a cell of 2 x 2 patches.

Their mergers turn each cell into one visual token, so a cell is kept or dropped as a whole. See `packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from tntprune.backbones.hf.packed import (
    Course,
    Grid,
    Group,
    Windows,
    course_of,
    grouped,
    in_row,
    packed,
    side_by_side,
    unpacked,
)
from tntprune.backbones.hf.towers import ReducedModel, ReducedTower, as_asked
from tntprune.backbones.reduced import Reduced, Visit, refuse_proxy
from tntprune.errors import UserError
from tntprune.methods.steps import BlockPlan
from tntprune.ops.attention import attend
from tntprune.ops.tokens import Tokens, lay, sized, spread

PRECOMPUTED = ("cu_seqlens", "max_seqlen", "window_index", "cu_window_seqlens", "max_window_seqlen")
Pair = tuple[torch.Tensor, torch.Tensor]
Note = Callable[[int, tuple[Group, ...], torch.Tensor, Course], None]


class WeighedAttention:
    """An attention in which merged tokens can count by their size."""

    rotate: ClassVar[Callable[..., Pair]]

    def forward(
        self: Any, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: Any = None,
        max_seqlen: int | None = None, bias: torch.Tensor | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Run the attention as the plain class does, or with a bias (patches,) added to the logits of each key."""
        if bias is None:
            return super().forward(hidden_states, cu_seqlens, position_embeddings, max_seqlen, **kwargs)  # type: ignore[misc, no-any-return]
        heads = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1))  # (patches, 3, heads, head_dim)
        query, key = self.rotate(heads[:, 0], heads[:, 1], *position_embeddings)
        lengths = cu_seqlens.diff().tolist()
        parts = [x.transpose(0, 1)[None].split(lengths, 2) for x in (query, key, heads[:, 2])]
        biases = bias[None, None, None].split(lengths, 3)
        rate = self.attention_dropout if self.training else 0.0
        out = [attend(q, k, v, self.scaling, one, rate) for q, k, v, one in zip(*parts, biases, strict=True)]
        return self.proj(torch.cat(out, 2)[0].transpose(0, 1).flatten(1))  # type: ignore[no-any-return]


class Scene(NamedTuple):
    """Some images once they are embedded.

    Args:
        groups: All cells of the images of each grid.
        turns: Of each group (N + 1, unit, 2 * head_dim), the rotary positions of its patches, cosine and sine; the last
            is for a token without a place.
        course: Where they stand in the row.
    """

    groups: tuple[Group, ...]
    turns: tuple[torch.Tensor, ...]
    course: Course


class QwenTower(ReducedModel, Reduced):
    """A tower that walks images of every size through its blocks together.

    Args:
        output: The class of what `forward` returns.
    """

    output: ClassVar[Any] = BaseModelOutputWithPooling
    check = ReducedTower.check
    num_prefix_tokens = 0
    grad_checkpointing = False  # its blocks do it themselves
    config: Any

    @property
    def unit(self: Any) -> int:
        """Patches of a cell."""
        return int(self.spatial_merge_size**2)

    def grid(self: Any, images: torch.Tensor) -> Grid:
        """Return rows and columns of cells that such images have."""
        step = self.patch_embed.patch_size * self.spatial_merge_size
        rows, columns = (size // step for size in images.shape[-2:])
        if (rows * step, columns * step) != tuple(images.shape[-2:]) or not rows * columns:
            raise UserError(
                f"images of {images.shape[-2]} x {images.shape[-1]}: no whole number of cells of {step} x {step}; "
                "expected multiples of that"
            )
        return rows, columns

    def windows(self: Any, grid: Grid) -> Windows | None:
        """Return the windows of one grid; None where the blocks have none."""
        if not hasattr(self, "fullatt_block_indexes"):
            return None
        side = self.spatial_merge_size
        shape = torch.tensor([[1, grid[0] * side, grid[1] * side]])
        cells, ends = get_vision_window_index(shape, side, self.window_size, self.patch_size)
        number = torch.arange(len(ends) - 1).repeat_interleave(ends.diff() // self.unit)
        rank, window = cells.argsort(), torch.empty_like(cells).scatter(0, cells, number)
        last = rank.new_tensor([len(cells)]), window.new_tensor([len(ends) - 1])
        device = self.blocks[0].norm1.weight.device
        return Windows(*(torch.cat(pair).to(device) for pair in zip((rank, window), last, strict=True)))

    def scene(self: Any, patches: torch.Tensor, shapes: torch.Tensor, follow: bool, given: dict[str, Any]) -> Scene:
        """Embed images.

        Args:
            patches: Of all images, one after the other.
            shapes: (images, 3): frames, rows and columns of patches. The frames of a video do not see each other, so
                each is an image.
            follow: Keep `Tokens.carrier`.
            given: What else the caller gave: tables that are already there are taken out of it and used.

        Raises:
            UserError: the two do not fit.
        """
        side = self.spatial_merge_size
        rows = shapes.tolist()
        if any(height % side or width % side or not height * width for _, height, width in rows):
            raise UserError(f"grid_thw {rows}: expected rows and columns of patches in multiples of {side}")
        count = sum(frames * height * width for frames, height, width in rows)
        if count != len(patches):
            raise UserError(
                f"{len(patches)} patches for grid_thw {rows}; expected {count} of them, as the processor makes both"
            )
        x = self.patch_embed(patches)
        if hasattr(self, "pos_embed"):
            index, weight = get_vision_interpolation_indices_and_weights(
                shapes, self.num_grid_per_side, self.interpolation_mode, self.interpolation_align_corners, side,
                kwargs=given,
            )  # fmt: skip
            x = x + (self.pos_embed(index) * weight[:, :, None]).sum(1).to(x.dtype)
        turns = torch.cat(self.rotary_pos_emb(x, get_vision_position_ids(shapes, side, kwargs=given)), 1)
        grids = [(height // side, width // side) for frames, height, width in rows for _ in range(frames)]
        cells = [value.reshape(-1, self.unit * value.shape[1]) for value in (x, turns)]
        groups, own = (grouped(value, grids, follow) for value in cells)
        width = turns.shape[1] // 2
        still = torch.cat([turns.new_ones(1, self.unit, width), turns.new_zeros(1, self.unit, width)], 2)
        tables = [torch.cat([one.tokens.x[0].unflatten(1, (self.unit, -1)), still]) for one in own]
        return Scene(groups, tuple(tables), self.course(groups))

    def course(self, groups: Sequence[Group]) -> Course:
        """Return where the tokens of some images stand in the row."""
        return course_of(groups, self.unit, self.windows)

    def travel(
        self: Any, scene: Scene, note: Note, every: bool = False
    ) -> tuple[tuple[Group, ...], torch.Tensor, Course]:
        """Walk from the embedding to the tokens that leave the last block.

        Args:
            scene: The images.
            note: Called with the number of each block, 0 for the embedding, the tokens that leave it without those that
                are dropped after it, and the same in a row. The tokens are those of the last step unless `every`.
            every: Also give it the tokens themselves.

        Returns:
            The tokens, the same in a row, (cells, unit * D), and where they stand in it.
        """
        groups, trace = scene.groups, self.trace
        plans = [self.plan(group) for group in groups]
        course, row = scene.course, packed([own.tokens.x for own in groups], groups, scene.course)
        turns = self.turns(scene, groups, course)
        if trace is not None:
            trace.begin()
        for number in range(len(self.blocks) + 1):
            if number:
                row = self.run_row(number, row, turns, course, self.biases(number, groups, plans, course))
            acting = any(plan[number].after is not None or plan[number].watchers for plan in plans)
            if number and (acting or every or number == len(self.blocks)):
                groups = unpacked(row, groups, course)
                groups = tuple(own._replace(tokens=replace(own.tokens, block=number)) for own in groups)
            before = groups
            if acting:
                pairs = zip(groups, plans, strict=True)
                groups = tuple(own._replace(tokens=self.leave(own.tokens, plan[number], None)) for own, plan in pairs)
            moved = any(new.tokens.index is not old.tokens.index for new, old in zip(groups, before, strict=True))
            if moved:
                course = self.course(groups)
                turns = self.turns(scene, groups, course)
            if acting:
                row = packed([own.tokens.x for own in groups], groups, course)
            if trace is not None:
                together = side_by_side(groups)
                if moved:
                    trace.add(number, together)
                trace.count(together)
                if number < len(self.blocks):
                    trace.count(together)  # those that enter the MLP are those that enter the block
            note(number, groups, row, course)
        if trace is not None:
            trace.ended = True
        return groups, row, course

    def plan(self: Any, group: Group) -> tuple[BlockPlan, ...]:
        """Return what the reduction does at each block to images of one grid.

        Raises:
            UserError: it acts inside a block or looks at its attention.
        """
        plan: tuple[BlockPlan, ...] = self.reduction.plan(group.tokens.count)
        if any(block.inside is not None or block.sees for block in plan):
            raise UserError(
                f"{self.reduction.config.method} acts inside blocks or reads their attention, and those of "
                f"{type(self).__name__} cannot be opened; expected a method that needs the tokens alone, such as tnt"
            )
        return plan

    def turns(self, scene: Scene, groups: Sequence[Group], course: Course) -> Pair:
        """Return cosine and sine of the rotary positions of all patches in the row, (patches, head_dim) each."""
        own = [
            table[group.tokens.index.masked_fill(group.tokens.index < 0, len(table) - 1)]  # (B, n, unit, 2 * head_dim)
            for table, group in zip(scene.turns, groups, strict=True)
        ]
        cosine, sine = packed(own, groups, course).flatten(0, 1).chunk(2, 1)
        return cosine, sine

    def biases(
        self: Any, number: int, groups: Sequence[Group], plans: Sequence[Any], course: Course
    ) -> torch.Tensor | None:
        """Return what is added to the logits of each patch in a block, (patches,); None where nothing is."""
        found: list[torch.Tensor | None] = []
        for group, plan in zip(groups, plans, strict=True):
            tokens, bias = group.tokens, None
            if plan[number].biased:
                proportional = self.reduction.proportional and tokens.size is not None
                bias = self.reduction.bias(sized(tokens) if proportional else tokens, number)
            found.append(None if bias is None else bias[:, 0, 0])  # (B, n)
        if all(bias is None for bias in found):
            return None
        whole = [
            torch.zeros_like(group.tokens.index, dtype=torch.float) if bias is None else bias
            for group, bias in zip(groups, found, strict=True)
        ]
        return packed(whole, groups, course).repeat_interleave(self.unit)

    def run_row(
        self: Any, number: int, row: torch.Tensor, turns: Any, course: Course, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Call one block with all images in a row, (cells, unit * D) to the same."""
        full = course.windows is None or number - 1 in self.fullatt_block_indexes
        context: dict[str, Any] = {} if bias is None else {"bias": bias}
        out = self.blocks[number - 1](
            row.view(-1, row.shape[1] // self.unit), cu_seqlens=course.whole if full else course.windows,
            position_embeddings=turns, **context,
        )  # fmt: skip
        return out.view(len(row), -1)  # type: ignore[no-any-return]

    def merged(self: Any, row: torch.Tensor, merger: nn.Module) -> torch.Tensor:
        """Turn cells (cells, unit * D) into visual tokens (cells, width of the language model)."""
        return merger(row.reshape(-1, row.shape[1] // self.unit))  # type: ignore[no-any-return]

    def walk(
        self: Any, images: torch.Tensor, visit: Visit | None = None, made: Visit | None = None, follow: bool = False,
        last: int | None = None, narrow: bool = False, **options: Any,
    ) -> Tokens:  # fmt: skip
        """Walk from images (B, C, H, W) to the tokens that leave the last block, before the merger."""
        patches, shapes = patches_of(self, images)
        if not torch.compiler.is_compiling():
            self.warn()
        scene = self.scene(patches, shapes, follow or visit is not None or self.trace is not None, {})

        def note(number: int, groups: tuple[Group, ...], *_: Any) -> None:
            if visit is not None:
                visit(number, groups[0].tokens)

        return self.travel(scene, note, every=visit is not None)[0][0].tokens  # type: ignore[no-any-return]

    def final(self: Any, tokens: Tokens) -> Tokens:
        merged = self.merged(tokens.x.flatten(0, 1), self.merger)
        return replace(tokens, x=merged.unflatten(0, tokens.x.shape[:2]))

    def forward(self: Any, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> Any:
        """Turn patches (patches, C * frames * P * P) of images into the visual tokens that are left.

        Inside a larger model there is one for every cell: the dropped ones are filled, or NaN for `output="tokens"`.
        """
        refuse_proxy(hidden_states)
        wanted = self.check((), kwargs)
        for name in PRECOMPUTED:  # of all patches, which a reduced tower does not keep
            kwargs.pop(name, None)
        if not torch.compiler.is_compiling():
            self.warn()
        scene = self.scene(hidden_states, grid_thw, bool(self.reduction.output) or self.trace is not None, kwargs)
        states: list[torch.Tensor | None] = []
        deep: list[torch.Tensor] = []
        stacked = list(getattr(self, "deepstack_visual_indexes", ()))

        def in_tower(groups: Sequence[Group], course: Course) -> torch.Tensor:
            """Return patches in the tower's own order."""
            row = packed(self.shown(groups), groups, scene.course if self.reduction.output else course)
            return row.reshape(-1, row.shape[1] // self.unit)

        def in_grid(row: torch.Tensor, merger: nn.Module, groups: Sequence[Group], course: Course) -> torch.Tensor:
            """Return the visual tokens of cells (cells, unit * D), image by image and row by row."""
            groups = unpacked(self.merged(row, merger), groups, course)
            groups = (groups[0]._replace(tokens=self.joined(groups[0].tokens)), *groups[1:])
            return torch.cat(in_row(self.shown(groups), groups))

        def note(number: int, groups: tuple[Group, ...], row: torch.Tensor, course: Course) -> None:
            states.append(in_tower(groups, course) if number in wanted else None)
            if number - 1 in stacked:
                deep.append(in_grid(row, self.deepstack_merger_list[stacked.index(number - 1)], groups, course))

        groups, row, course = self.travel(scene, note, every=bool(wanted))
        out = self.output(
            last_hidden_state=in_tower(groups, course),
            hidden_states=tuple(states) if wanted else None,
            pooler_output=in_grid(row, self.merger, groups, course),
            **({"deepstack_features": deep} if hasattr(self, "deepstack_visual_indexes") else {}),
        )
        return as_asked(self, out, kwargs)

    def shown(self, groups: Sequence[Group]) -> list[torch.Tensor]:
        """Return the tokens of each group as what follows wants to have them, as `ReducedTower.shown` does."""
        found, output = [], self.reduction.output
        for group in groups:
            tokens = self.reduction.unfold(group.tokens)
            laid = spread if output == "grid" else lay
            found.append(laid(tokens, group.grid) if output else tokens.x)
        return found


def patches_of(tower: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut images (B, C, H, W) into what a tower reads: patches (B * N, C * frames * P * P), and shapes of grids (B, 3).

    A single image stands for every frame of a patch, as the processor makes it.
    """
    embed, side = tower.patch_embed, tower.spatial_merge_size
    rows, columns = QwenTower.grid(tower, images)
    size = embed.patch_size
    x = images.unflatten(3, (columns, side, size)).unflatten(2, (rows, side, size))  # (B, C, H, s, P, W, s, P)
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)  # (B, H, W, s, s, C, P, P)
    x = x.unsqueeze(6).expand(*x.shape[:6], embed.temporal_patch_size, size, size)
    shapes = torch.tensor([[1, rows * side, columns * side]], device=images.device).expand(len(images), -1)
    return x.reshape(-1, images.shape[1] * embed.temporal_patch_size * size * size), shapes

"""Images of different sizes in one row of tokens, as the towers of Qwen's models take them.

What a tower merges before its language model is one token here: a cell of 2 x 2 patches, side by side. So a reduction
keeps, drops and merges whole cells. Images of one grid are one batch of tokens; the blocks are given all of them in a
row, image by image and in each window by window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tntprune.ops.tokens import NOWHERE, Tokens, pick, start

Grid = tuple[int, int]  # rows and columns of cells


class Group(NamedTuple):
    """Images of one grid.

    Args:
        members: Their numbers in the row.
        grid: Rows and columns of cells.
        tokens: Theirs, (B, n, patches of a cell * D).
    """

    members: tuple[int, ...]
    grid: Grid
    tokens: Tokens


class Windows(NamedTuple):
    """The windows of one grid, to which some blocks confine attention.

    Args:
        rank: (N + 1,), each cell's place in the order of the windows; the last is for a token without a place.
        window: (N + 1,), the number of each cell's window.
    """

    rank: torch.Tensor
    window: torch.Tensor


class Course(NamedTuple):
    """The places of the tokens in the row, until some of them go.

    Args:
        orders: Of each group (B, n), its tokens in the order of the windows; None where that is their own.
        backs: Of each group (B, n), where in that order each token is.
        whole: (images + 1,), where each image begins, in patches, and the end.
        windows: Likewise each window; None where there are none.
    """

    orders: tuple[torch.Tensor | None, ...]
    backs: tuple[torch.Tensor | None, ...]
    whole: torch.Tensor
    windows: torch.Tensor | None


def grouped(row: torch.Tensor, grids: Sequence[Grid], follow: bool) -> tuple[Group, ...]:
    """Take images apart, (cells, D) in a row, and put those of one grid together.

    Args:
        row: The cells of each image, row by row.
        grids: Of each image.
        follow: Keep `Tokens.carrier`.
    """
    images = row.split([rows * columns for rows, columns in grids])
    found = []
    for grid in dict.fromkeys(grids):
        members = tuple(number for number, own in enumerate(grids) if own == grid)
        found.append(Group(members, grid, start(torch.stack([images[number] for number in members]), 0, follow, grid)))
    return tuple(found)


def course_of(groups: Sequence[Group], unit: int, windows: Callable[[Grid], Windows | None]) -> Course:
    """Work out where the tokens of some images stand in the row.

    Args:
        groups: The images.
        unit: Patches of a cell.
        windows: Those of a grid; None where attention is not confined to any.
    """
    orders: list[torch.Tensor | None] = []
    inside: list[torch.Tensor] = []
    for group in groups:
        index, own = group.tokens.index, windows(group.grid)
        if own is None:
            orders.append(None)
            continue
        index = index.masked_fill(index == NOWHERE, len(own.rank) - 1)
        order = own.rank[index].argsort(dim=1, stable=True)
        orders.append(order)
        inside.append(own.window[index.gather(1, order)])
    device = groups[0].tokens.x.device
    lengths = in_row([[group.tokens.count] * len(group.members) for group in groups], groups)
    backs = tuple(None if order is None else order.argsort(1) for order in orders)
    whole = _ends(torch.tensor(lengths, device=device) * unit)
    if not inside:
        return Course(tuple(orders), backs, whole, None)
    apart = 1 + max(int(window.max()) for window in inside)  # windows of different images have different numbers
    numbers = torch.cat([window + number * apart for number, window in enumerate(in_row(inside, groups))])
    counts = numbers.unique_consecutive(return_counts=True)[1]
    return Course(tuple(orders), backs, whole, _ends(counts * unit))


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def in_row(values: Iterable[Iterable[Any]], groups: Sequence[Group]) -> list[Any]:
    """Return what each group has for each of its images as one list, in the order of the images."""
    found = {number: one for own, group in zip(values, groups, strict=True) for number, one in zip(group.members, own)}
    return [found[number] for number in range(len(found))]


def packed(values: Sequence[torch.Tensor], groups: Sequence[Group], course: Course) -> torch.Tensor:
    """Put something of each token, of each group (B, n, ...), into one row, (tokens, ...)."""
    sorted_values = [
        own if order is None else pick(own, order) for own, order in zip(values, course.orders, strict=True)
    ]
    return torch.cat(in_row(sorted_values, groups))


def unpacked(row: torch.Tensor, groups: Sequence[Group], course: Course) -> tuple[Group, ...]:
    """Return the groups with what stands in the row, (tokens, D), in their tokens."""
    counts = in_row([[group.tokens.count] * len(group.members) for group in groups], groups)
    images = row.split(counts)
    found = []
    for group, back in zip(groups, course.backs, strict=True):
        x = torch.stack([images[number] for number in group.members])
        x = x if back is None else pick(x, back)
        found.append(group._replace(tokens=replace(group.tokens, x=x)))
    return tuple(found)


def side_by_side(groups: Sequence[Group]) -> Tokens:
    """Return the places of the tokens of all images, in the order of the images and without the tokens themselves.

    Shorter images are filled up with tokens without a place, of size 0.
    """
    tokens = [group.tokens for group in groups]
    most, total = max(one.count for one in tokens), max(one.grid_size for one in tokens)

    def filled(values: Iterable[torch.Tensor], width: int, value: float) -> torch.Tensor:
        same = [F.pad(own, (0, width - own.shape[1]), value=value) for own in values]  # of each group (B, width)
        return torch.stack(in_row(same, groups))

    index = filled([one.index for one in tokens], most, NOWHERE)
    sizes = [torch.ones_like(one.index, dtype=torch.float) if one.size is None else one.size for one in tokens]
    followed = [one.carrier for one in tokens if one.carrier is not None]
    carrier = filled(followed, total, -1) if len(followed) == len(tokens) else None
    size = filled(sizes, most, 0)
    return Tokens(size.new_zeros(*size.shape, 0), index, 0, size=size, carrier=carrier, grid_size=total)

"""Windows: tokens that lie near each other in the grid, and are compared with each other alone.

After a first reduction a square of the grid holds any number of tokens. So windows are made of tokens and not of
places: all tokens in an order in which neighbours follow each other, cut into parts of the same length. No shape
depends on the image, no window is ever empty, and their reach grows where few tokens are left.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import NamedTuple

import torch

from tntprune.ops.tokens import Tokens, ranking, row_blocks


class Windows(NamedTuple):
    """The windows of some tokens.

    Args:
        order: (B, n), positions of the tokens, window by window.
        number: How many windows there are.
    """

    order: torch.Tensor
    number: int


class Cut(NamedTuple):
    """A cut of n tokens in a row into parts, whose lengths differ by 1 at most.

    Args:
        place: (parts, m), where in the row each one of a part stands. What fills up shorter parts is any other token.
        real: (parts, m), False where a part is only filled up, at its end.
        slot: (n,), where in the parts, end to end, each token of the row is.
    """

    place: torch.Tensor
    real: torch.Tensor
    slot: torch.Tensor


def cut(n: int, parts: int, device: torch.device) -> Cut:
    """Cut a row of n tokens into parts, of which each has at least one."""
    part, longest = torch.arange(parts + 1, device=device), ceil(n / parts)
    ends = part * n // parts
    place = ends[:-1, None] + torch.arange(longest, device=device)
    row = torch.arange(n, device=device)
    own = ((row + 1) * parts - 1) // n  # which part each is in
    return Cut(place.clamp(max=n - 1), place < ends[1:, None], own * longest + row - ends[own])


def number_of_windows(n: int, window: int | None, most: int | None = None) -> int:
    """Return into how many windows n tokens are cut.

    Args:
        n: How many tokens there are.
        window: Tokens in a window, at most, are the square of it; None is one window for all.
        most: Windows there may be.
    """
    number = 1 if window is None else ceil(n / window**2)
    return number if most is None else min(number, most)


def windows_of(tokens: Tokens, window: int | None, grid: tuple[int, int], most: int | None = None) -> Windows | None:
    """Put tokens into windows by their places in the original grid; None where all are in one.

    The grid is cut into bands of rows, as high as a window is wide; the order runs through each column by column, and
    turns back at its end. So a window is a rectangle, nearly a square where tokens went evenly. Tokens without a
    place come last.

    Args:
        tokens: n patch tokens.
        window: See `number_of_windows`.
        grid: Rows and columns of the model's own grid, for tokens that do not tell theirs. Where neither has as many
            places as the tokens come from, places follow each other row by row.
        most: See `number_of_windows`.
    """
    number = number_of_windows(tokens.count, window, most)
    if number == 1:
        return None
    rows, columns = tokens.grid or grid
    if rows * columns != tokens.grid_size:
        rows, columns = 1, max(1, tokens.grid_size)
    index = tokens.index
    bands = min(rows, max(1, round(rows / sqrt(rows * columns / number))))
    row, column = index // columns, index % columns
    band = row * bands // rows
    column = torch.where(band % 2 == 1, columns - 1 - column, column)
    key = (band * columns + column) * rows + row
    return Windows(ranking(torch.where(index < 0, bands * columns * rows, key)), number)


def closest_near(first: torch.Tensor, second: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `similarity.closest` does, where tokens of a part of one group look in that part of the other alone.

    Args:
        first: (B, a, d), in fp32, of length 1, in the order of the windows.
        second: (B, b, d), likewise.
        parts: Into how many both are cut.
    """
    asking, asked = (cut(group.shape[1], parts, group.device) for group in (first, second))
    a, b = (_parted(group, own) for group, own in ((first, asking), (second, asked)))
    likeness, best = [], []
    with torch.autocast(first.device.type, enabled=False):
        for some in row_blocks(parts, a.shape[2] * b.shape[2]):
            alike = a[:, some] @ b[:, some].transpose(2, 3)  # (B, some, longest of a, longest of b)
            found = alike.masked_fill(~asked.real[some, None], -2.0).max(3)  # below any cosine
            likeness.append(found.values)
            best.append(found.indices + asked.place[some, :1])
    return tuple(torch.cat(one, 1).flatten(1)[:, asking.slot] for one in (likeness, best))  # type: ignore[return-value]


def _parted(x: torch.Tensor, own: Cut) -> torch.Tensor:
    """Cut (B, n, d) into parts, (B, parts, m, d)."""
    parts: torch.Tensor = x[:, own.place.flatten()].unflatten(1, own.place.shape)
    return parts


def compared_near(first: int, second: int, parts: int) -> int:
    """Return how many pairs of tokens `closest_near` compares."""
    return parts * ceil(first / parts) * ceil(second / parts)

"""Square cells of patches as tokens, for what can only be kept or dropped as a whole.

A projector that joins cells of patches needs all patches of each. Here a cell is one token, its patches side by side,
so that any method that selects or merges tokens selects or merges cells. The grid of patches is square, as those
projectors take it.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

import torch

from tntprune.ops.tokens import NOWHERE, Tokens, take


def by_cells(tokens: Tokens, side: int) -> Tokens:
    """Put all patches of a grid, which stand row by row, in the order of their cells, and row by row in each."""
    order = _numbers(tokens.grid_size, side, tokens.x.device).argsort()
    return take(tokens, order.expand(len(tokens.x), -1))


def join_cells(tokens: Tokens, side: int) -> Tokens:
    """Make one token of each cell, (B, prefix + n, D) to (B, n / side², side² * D), without prefix tokens.

    Args:
        tokens: Patches of whole cells, cell by cell.
        side: Patches along one side of a cell.
    """
    unit, number = side**2, _numbers(tokens.grid_size, side, tokens.x.device)
    index, carrier = tokens.index[:, ::unit], tokens.carrier  # (B, n / unit), the first patch of each
    if carrier is not None:
        found = carrier[:, number.argsort()[::unit]]  # (B, N / unit)
        carrier = torch.where(found >= 0, found // unit, -1)
    return replace(
        tokens,
        x=tokens.patches.unflatten(1, (-1, unit)).flatten(2),
        index=torch.where(index == NOWHERE, NOWHERE, number[index.clamp(min=0)] // unit),
        prefix=0,
        size=None if tokens.size is None else tokens.size[:, ::unit],
        carrier=carrier,
        grid_size=tokens.grid_size // unit,
        logs=None,
        grid=None if tokens.grid is None else (tokens.grid[0] // side, tokens.grid[1] // side),
    )


def split_cells(cells: Tokens, side: int, tokens: Tokens) -> Tokens:
    """Take cells apart again, (B, m, side² * D) to (B, prefix + m * side², D), cell by cell.

    Args:
        cells: That are left.
        side: Patches along one side of a cell.
        tokens: From which they were joined, with the prefix tokens.
    """
    unit = side**2
    places = _numbers(tokens.grid_size, side, cells.x.device).argsort().view(-1, unit)  # (N / unit, unit)
    index = places[cells.index.clamp(min=0)]  # (B, m, unit)
    index = torch.where(cells.index[:, :, None] == NOWHERE, NOWHERE, index)
    carrier = cells.carrier
    if carrier is not None:
        number = torch.arange(unit, device=carrier.device)
        each = torch.where(carrier[:, :, None] >= 0, carrier[:, :, None] * unit + number, -1)  # (B, N / unit, unit)
        carrier = torch.empty_like(tokens.carrier).scatter(1, places.flatten().expand(len(each), -1), each.flatten(1))  # type: ignore[arg-type]
    patches = cells.x.unflatten(2, (unit, -1)).flatten(1, 2)
    return replace(
        cells,
        x=torch.cat([tokens.x[:, : tokens.prefix], patches], 1),
        index=index.flatten(1),
        prefix=tokens.prefix,
        size=None if cells.size is None else cells.size.repeat_interleave(unit, 1),
        carrier=carrier,
        grid_size=tokens.grid_size,
        logs=None,
        grid=tokens.grid,
    )


def _numbers(total: int, side: int, device: torch.device) -> torch.Tensor:
    """Return each patch's number when patches are counted cell by cell, (N,)."""
    width = isqrt(total)
    row, column = (torch.arange(width, device=device).view(shape) for shape in ((-1, 1), (1, -1)))
    cell = row // side * (width // side) + column // side
    return (cell * side**2 + row % side * side + column % side).flatten()

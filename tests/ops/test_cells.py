"""Cells of patches as tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tntprune.ops.cells import by_cells, join_cells, split_cells
from tntprune.ops.tokens import NOWHERE, append, merge, start, take


def places(cell, width, side):
    """The patches of a cell, as loops."""
    row, column = divmod(cell, width // side)
    return [(row * side + y) * width + column * side + x for y in range(side) for x in range(side)]


@pytest.mark.parametrize(("width", "side"), [(8, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("prefix", [0, 2])
def test_a_cell_is_its_patches_side_by_side(width, side, prefix):
    x = torch.randn(3, prefix + width**2, 5)
    tokens = by_cells(start(x, prefix, follow=True, grid=(width, width)), side)
    cells = join_cells(tokens, side)
    assert cells.grid == (width // side, width // side) and split_cells(cells, side, tokens).grid == (width, width)
    assert cells.x.shape == (3, (width // side) ** 2, side**2 * 5) and cells.prefix == 0
    assert torch.equal(cells.index, cells.carrier) and cells.index[0].tolist() == list(range(cells.count))
    for cell in range(cells.count):
        assert torch.equal(cells.x[:, cell], x[:, prefix:][:, places(cell, width, side)].flatten(1))
    back = split_cells(cells, side, tokens)
    assert torch.equal(back.x[:, :prefix], x[:, :prefix]) and back.prefix == prefix
    assert torch.equal(back.patches, x[:, prefix:].gather(1, back.index[:, :, None].expand(-1, -1, 5)))
    assert torch.equal(back.index.gather(1, back.carrier), torch.arange(width**2).expand(3, -1))


def test_what_is_taken_and_merged_stays_with_its_patches():
    x = torch.randn(2, 1 + 36, 5)
    tokens = by_cells(start(x, 1, follow=True), 2)
    picked = torch.tensor([[5, 0, 7, 3], [1, 8, 2, 4]])
    cells = take(join_cells(tokens, 2), picked)
    patches = split_cells(cells, 2, tokens)
    assert patches.count == 16 and patches.x.shape == (2, 17, 5)
    for image in range(2):
        expected = [place for cell in picked[image].tolist() for place in places(cell, 6, 2)]
        assert patches.index[image].tolist() == expected
        assert torch.equal(patches.patches[image], x[image, 1:][expected])
        carried = [patches.index[image, at].item() if at >= 0 else -1 for at in patches.carrier[image].tolist()]
        assert carried == [place if place in expected else -1 for place in range(36)]
    again = join_cells(patches, 2)
    assert torch.equal(again.index, picked) and torch.equal(again.x, cells.x)
    assert torch.equal(again.carrier, cells.carrier)
    into = torch.tensor([1])
    merged = merge(again, torch.tensor([[0], [0]]), into, torch.tensor([[2], [3]]), torch.tensor([[0], [0]]))
    out = split_cells(merged, 2, patches)
    assert out.size.tolist() == [[1.0] * 4 + [2.0] * 4] * 2
    for image, gone in enumerate((2, 3)):
        both = again.x[image, [1, gone]].mean(0).view(4, 5)
        torch.testing.assert_close(out.patches[image, 4:], both)
        first = places(int(again.index[image, gone]), 6, 2)[0]
        assert out.carrier[image, first] == 4  # the first patch of the cell into which it went
    assert join_cells(out, 2).size.tolist() == [[1.0, 2.0]] * 2


def test_cells_without_a_place_stay_without_one():
    tokens = by_cells(start(torch.randn(1, 16, 3), 0), 2)
    cells = append(join_cells(tokens, 2), torch.randn(1, 1, 12))
    patches = split_cells(cells, 2, tokens)
    assert patches.index[0, 16:].tolist() == [NOWHERE] * 4
    again = join_cells(replace(patches, carrier=None), 2)
    assert torch.equal(again.x, cells.x) and again.index.tolist() == [[0, 1, 2, 3, NOWHERE]]

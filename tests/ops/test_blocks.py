"""Tables of pairs of tokens that are made in blocks of rows say what whole ones say, in less memory."""

from __future__ import annotations

import pytest
import timm
import torch

from conftest import make, photos_for
from tntprune import TNT, ToMe, reduce_
from tntprune.backbones.attach import reduction_of, twin_of
from tntprune.methods.tome import match
from tntprune.ops import tokens
from tntprune.ops.merging import choose, comparisons, fold
from tntprune.ops.similarity import nearest
from tntprune.ops.tokens import merge, row_blocks, start
from tntprune.system.clock import peak_memory

CPU = torch.device("cpu")


@pytest.fixture
def in_blocks(monkeypatch):
    """Return how to begin to make tables of more than so many entries in blocks."""
    return lambda size=60: monkeypatch.setattr(tokens, "TABLE", size)


@pytest.mark.parametrize("rows", [0, 1, 7, 4096])
@pytest.mark.parametrize("columns", [0, 1, 4096, 2**21])
def test_blocks_cover_every_row_once_and_are_small(rows, columns):
    blocks = row_blocks(rows, columns)
    assert [row for block in blocks for row in range(rows)[block]] == list(range(rows))
    assert all((block.stop - block.start) * columns <= max(tokens.TABLE, columns) for block in blocks)
    assert len(row_blocks(1024, 1024)) == 1  # small grids are compared at once


def features(kind, batch=2, n=37, width=6):
    """Features of tokens: any, or such as are all alike or not alike at all, so that there are ties everywhere."""
    generator = torch.Generator().manual_seed(0)
    if kind == "ties":
        return torch.eye(width)[torch.randint(0, width, (batch, n), generator=generator)]
    return torch.randn(batch, n, width, generator=generator)


@pytest.mark.parametrize("kind", ["any", "ties"])
def test_the_same_tokens_stay_and_take_in_the_same_ones(kind, in_blocks):
    x = features(kind)
    score, size = torch.linspace(-1, 1, 37).expand(2, -1), torch.arange(1.0, 38).expand(2, -1)

    def find():
        chosen = choose(score, x, size, 11, 0.5, 0.3)
        return chosen, nearest(x[:, :20], x[:, 20:]), match(x, 9, odd=1)

    whole = find()
    in_blocks()
    assert len(row_blocks(37, 37)) > 30
    for one, other in zip(whole, find(), strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(b, a, atol=1e-6, rtol=0) if a.is_floating_point() else None
            assert a.is_floating_point() or torch.equal(a, b)


@pytest.mark.parametrize("traced", [False, True])
def test_tokens_are_folded_as_at_once(traced, in_blocks, monkeypatch):
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: traced)
    arrived = start(features("any", n=38, width=8), 1)
    order = torch.stack([torch.randperm(37, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    stay, source, target = order[:, :12], order[:, 12:], torch.arange(25).expand(2, -1) % 12
    weight, share, correction = torch.rand(2, 37) + 0.5, torch.rand(2, 25) * 0.9 + 0.1, torch.tensor([0.7])
    into = torch.arange(20, 37)

    def do():
        return (
            fold(arrived, stay, source, target, weight, share, correction),
            fold(arrived, stay, source, target, weight),
            merge(arrived, order.sort(1).values[:, :7], into, torch.arange(7, 20).expand(2, -1), target[:, :13]),
        )

    whole = do()
    in_blocks()
    for one, other in zip(whole, do(), strict=True):
        torch.testing.assert_close(other.x, one.x, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(other.size, one.size)
        assert torch.equal(other.index, one.index)


def test_gradients_go_through_the_blocks(in_blocks):
    x = features("any", n=10).requires_grad_()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).expand(2, -1)
    found = []
    for begin in (lambda: None, in_blocks):
        begin()
        weight = torch.ones(2, 10, requires_grad=True)
        out = fold(start(x, 0), order[:, :4], order[:, 4:], torch.arange(6).expand(2, -1) % 4, weight).x
        found.append(torch.autograd.grad(out.square().sum(), [x, weight]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("config", [TNT(at=2), ToMe(r=9)], ids=["tnt", "tome"])
def test_models_and_their_exports_give_the_same(config, in_blocks):
    model = reduce_(make("distilled"), config)
    reduction_of(model).warned = True
    images = photos_for(model)
    with torch.inference_mode():
        whole = model(images)
        in_blocks(size=1000)
        torch.testing.assert_close(model(images), whole, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        batch = {0: torch.export.Dim("batch", min=1, max=64)}
        program = torch.export.export(model, (images,), dynamic_shapes=(batch,)).module()
        torch.testing.assert_close(program(images[:2]), whole[:2], atol=1e-5, rtol=1e-4)


def test_macs_count_the_comparisons_that_are_made(in_blocks):
    assert comparisons(37, 11) == 37**2
    in_blocks()
    blocks = row_blocks(37, 37)
    assert comparisons(37, 11) == sum((one.stop - one.start) * one.stop for one in blocks) + 26 * 11


def test_no_table_of_all_pairs_is_made_of_a_large_grid():
    x, score, size = torch.randn(1, 4096, 16), torch.randn(1, 4096), torch.ones(1, 4096)
    table = 4 * 4096**2
    assert peak_memory(lambda: choose(score, x, size, 2048, 0.5, 0.3), CPU) < table / 4
    order = torch.randperm(4096)[None]
    arrived, target = start(x, 0), torch.randint(0, 2048, (1, 2048))
    folding = peak_memory(lambda: fold(arrived, order[:, :2048], order[:, 2048:], target, size), CPU)
    assert folding < table / 4


@pytest.mark.wide
@pytest.mark.parametrize(
    "config",
    [
        TNT(at=1),
        TNT(at=1, how="drop", similar=500),
        ToMe(r=200),
        TNT(at=1, window=16),
        TNT(at=1, window=40),
        ToMe(r=200, window=16),
    ],
    ids=["tnt", "tnt drop", "tome", "tnt windows", "tnt large windows", "tome windows"],
)
def test_4096_tokens_take_little_more_memory_than_the_unpruned_model(config):
    model = timm.create_model("vit_tiny_patch16_224", img_size=1024, depth=2).eval()
    images = torch.randn(8, 3, 1024, 1024)
    reduced = reduce_(twin_of(model), config)
    reduction_of(reduced).warned = True
    with torch.inference_mode():
        plain, ours = (peak_memory(lambda which=which: which(images), CPU) for which in (model, reduced))
    assert ours <= 1.2 * plain

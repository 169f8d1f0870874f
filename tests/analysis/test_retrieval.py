"""Neighbours, recall and votes against loops that do one thing at a time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tntprune.analysis.retrieval import TEMPERATURE, Neighbours, knn_accuracy, neighbours, recall, search
from tntprune.system.distributed import ProcessGroup


def vectors(count=23, width=5, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def naive_neighbours(found, count):
    order = []
    for a in range(len(found)):
        near = [(F.cosine_similarity(found[a], found[b], dim=0).item(), b) for b in range(len(found)) if b != a]
        order.append([b for _, b in sorted(near, reverse=True)[:count]])
    return order


@pytest.mark.parametrize("cells", [1, 23 * 4, 23 * 5 + 1, 10**6])
def test_neighbours(cells):
    found = vectors() * torch.logspace(-3, 3, 23)[:, None]  # their length does not matter
    near = neighbours(found, 10, cells=cells)
    assert near.place.tolist() == naive_neighbours(found, 10)
    expected = torch.stack([F.cosine_similarity(found[a], found[near.place[a]]) for a in range(23)])
    torch.testing.assert_close(near.similarity, expected)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_fewer_vectors_than_are_asked_for(count):
    near = neighbours(vectors(count), 10)
    assert near.place.shape == (count, count - 1)


def test_memory_is_bounded(monkeypatch):
    largest, topk = [], torch.Tensor.topk

    def noted(self, *given, **more):
        largest.append(self.numel())
        return topk(self, *given, **more)

    monkeypatch.setattr(torch.Tensor, "topk", noted)
    neighbours(vectors(300), 3, cells=3000)
    assert len(largest) == 30 and max(largest) == 3000


def test_processes_share_the_rows():
    class Half(ProcessGroup):
        """Finds what the other one finds."""

        def gather(self, value):
            mine.append(value)
            return mine

    found, mine = vectors(), []
    for rank in (1, 0):
        near = neighbours(found, 4, Half(rank, 2), cells=23 * 3)
    assert near.place.tolist() == naive_neighbours(found, 4) and all(mine)


def test_recall():
    own, unpruned = vectors(), vectors() + 0.4 * vectors(seed=1)
    a, b = naive_neighbours(own, 10), naive_neighbours(unpruned, 10)
    found = search(own, unpruned, torch.full((23,), -1))
    for count, value in ((1, found.recall1), (5, found.recall5), (10, found.recall10)):
        hits = sum(len({*x[:count]} & {*y[:count]}) for x, y in zip(a, b))
        assert value == pytest.approx(100 * hits / (23 * count)) and value < 100
    assert recall(torch.tensor(a), torch.tensor(b), 11) is None and found.knn is None


def naive_votes(found, labels, count):
    right = []
    for a, near in enumerate(naive_neighbours(found, count)):
        votes = {}
        for b in near:
            if labels[b] >= 0:
                weight = math.exp(F.cosine_similarity(found[a], found[b], dim=0).item() / TEMPERATURE)
                votes[labels[b]] = votes.get(labels[b], 0) + weight
        if labels[a] >= 0 and labels.count(labels[a]) > 1:
            right.append(bool(votes) and max(votes, key=votes.get) == labels[a])
    return 100 * sum(right) / len(right)


@pytest.mark.parametrize("seed", range(3))
def test_votes(seed):
    labels = torch.randint(-1, 6, (40,), generator=torch.Generator().manual_seed(seed))
    labels[0] = 10**15  # one that no other has, and that is no index of anything
    found = vectors(40, seed=seed) + 2 * F.one_hot(labels.clamp(0, 5) % 5, 5)
    value = knn_accuracy(neighbours(found, 10), labels)
    assert value == pytest.approx(naive_votes(found, labels.tolist(), 10)) and 20 < value < 100


def test_votes_that_say_nothing():
    near = neighbours(vectors(4), 3)
    for labels in ([-1] * 4, [0, 1, 2, 3], [5] * 4, [-1, -1, 0, 0]):
        assert knn_accuracy(near, torch.tensor(labels)) is None
    unlabelled = Neighbours(torch.ones(4, 1), torch.tensor([[2], [2], [3], [2]]))
    assert knn_accuracy(unlabelled, torch.tensor([0, 0, -1, 1])) == 0  # nobody votes


def test_the_search_of_the_unpruned_model_is_done_once(monkeypatch):
    own, calls = vectors(), []
    monkeypatch.setattr(
        "tntprune.analysis.retrieval.neighbours", lambda *given: calls.append(given) or neighbours(*given)
    )
    assert search(own, own, torch.arange(23) % 3).recall10 == 100 and len(calls) == 1

"""Nearest neighbours among the embeddings of photos: which ones a reduced model finds, and which label they have."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from tntprune.system.distributed import ALONE, ProcessGroup

VOTERS = 10  # neighbours that vote for a label
TEMPERATURE = 0.07  # a neighbour's vote weighs exp(cosine / temperature), as in DINO's evaluation
CELLS = 2**25  # similarities that are in memory at a time: 128 MiB


class Retrieval(NamedTuple):
    """How well a reduced model's embeddings serve in a search, in percent; None where there are too few photos.

    Args:
        recall1: Of the nearest neighbours by the unpruned model's embeddings, those that are also nearest by its own.
        recall5: The same of the five nearest.
        recall10: The same of the ten nearest.
        knn: Photos whose label wins the vote of their `VOTERS` nearest neighbours; None without labels.
        knn_unpruned: The same with the unpruned model's embeddings.
    """

    recall1: float | None = None
    recall5: float | None = None
    recall10: float | None = None
    knn: float | None = None
    knn_unpruned: float | None = None


class Neighbours(NamedTuple):
    """The nearest other vectors of each vector, the nearest first: their cosine `similarity` and `place`, (N, k)."""

    similarity: torch.Tensor
    place: torch.Tensor


def search(own: torch.Tensor, unpruned: torch.Tensor, labels: torch.Tensor, group: ProcessGroup = ALONE) -> Retrieval:
    """Search for each photo among all others, by two models' embeddings.

    Args:
        own: The reduced model's embeddings (N, D).
        unpruned: The unpruned model's, of the same photos; `own` itself if nothing is reduced.
        labels: (N,), -1 where there is none.
        group: Processes that share the search; each has all embeddings.
    """
    found = neighbours(own, VOTERS, group)
    expected = found if unpruned is own else neighbours(unpruned, VOTERS, group)
    one, five, ten = (recall(found.place, expected.place, count) for count in (1, 5, 10))
    return Retrieval(one, five, ten, knn_accuracy(found, labels), knn_accuracy(expected, labels))


def neighbours(vectors: torch.Tensor, count: int, group: ProcessGroup = ALONE, cells: int = CELLS) -> Neighbours:
    """Find the nearest other ones of each vector by cosine similarity.

    Args:
        vectors: (N, D), on any device, of any length.
        count: How many to find; all others where there are fewer.
        group: Processes that share the work; each has all vectors, and gets all neighbours.
        cells: Similarities that are in memory at a time.

    Returns:
        Tensors (N, min(count, N - 1)) on the CPU.
    """
    unit = F.normalize(vectors.float(), dim=1)
    total = len(unit)
    rows, count = max(1, cells // max(1, total)), min(count, max(0, total - 1))
    found = []
    for first in group.share(range(0, total, rows)):
        similarity = unit[first : first + rows] @ unit.T  # (rows, N)
        own = torch.arange(len(similarity), device=unit.device)
        similarity[own, first + own] = -torch.inf
        near = similarity.topk(count, dim=1)
        found.append((first, near.values.cpu(), near.indices.cpu()))
    parts = sorted((part for each in group.gather(found) for part in each), key=lambda part: part[0])
    return Neighbours(torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts]))


def recall(found: torch.Tensor, expected: torch.Tensor, count: int) -> float | None:
    """Return the percent of the `count` nearest that were expected which are among the `count` nearest found.

    Args:
        found: Places of neighbours (N, k), the nearest first.
        expected: The same, by embeddings that are taken for right.
        count: How many of them to look at; the result is None if there are not so many.
    """
    if found.shape[1] < count:
        return None
    a, b = found[:, :count], expected[:, :count]
    return 100 * float((a[:, :, None] == b[:, None, :]).any(2).double().mean())


def knn_accuracy(near: Neighbours, labels: torch.Tensor) -> float | None:
    """Return the percent of photos whose label wins the vote of their neighbours.

    A neighbour's vote weighs exp(cosine / TEMPERATURE). Photos without a label do not vote, and a photo counts only if
    another one has its label.

    Args:
        near: The neighbours of each photo (N, k).
        labels: (N,), -1 where there is none.

    Returns:
        The percent; None if no photo counts, or all have the same label.
    """
    labels = labels.cpu()
    values, place, sizes = labels.unique(return_inverse=True, return_counts=True)
    counted = (labels >= 0) & (sizes[place] > 1)
    if not counted.any() or int((values >= 0).sum()) < 2:
        return None
    said = labels[near.place]  # (N, k)
    weight = (near.similarity.double() / TEMPERATURE).exp() * (said >= 0)
    score = ((said[:, :, None] == said[:, None, :]) * weight[:, None, :]).sum(2)  # (N, k): for the label of each
    winner = said.gather(1, score.argmax(1, keepdim=True))[:, 0]
    return 100 * float((winner == labels)[counted].double().mean())

"""Threads that record each get what they ran themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from conftest import make, photos_for
from tntprune import TopK, record, reduce_, restore_


def test_each_thread_records_its_own_passes():
    model = reduce_(make("plain"), TopK(at=(2, 4), keep=0.5))
    batches = [photos_for(model, 2, seed) for seed in range(4)]
    alone = []
    for images in batches:
        with record(model) as trace:
            model(images)
        alone.append(dict(trace.kept))
    together = Barrier(5)

    def work(images):
        with record(model) as trace:
            for _ in range(20):
                together.wait(60)
                model(images)
                kept = dict(trace.kept)
                together.wait(60)
        return kept

    def unseen():
        for _ in range(20):
            together.wait(60)
            model(torch.zeros_like(batches[0]))  # by a thread that records nothing
            together.wait(60)

    with ThreadPoolExecutor(5) as pool:
        found = list(map(pool.submit, [work] * 4, batches))
        pool.submit(unseen).result()
    for future, expected in zip(found, alone, strict=True):
        kept = future.result()
        assert kept.keys() == expected.keys() and all(torch.equal(kept[at], expected[at]) for at in kept)
    assert "traces" not in vars(model)


def test_records_within_records_and_copies():
    model = reduce_(make("plain"), TopK(at=2))
    images = photos_for(model, 2)
    with record(model) as outer:
        model(images)
        first = outer.kept[2]
        with record(model) as inner:
            model(images.flip(0))
        assert torch.equal(outer.kept[2], first) and torch.equal(inner.kept[2], first.flip(0))
        model(images.flip(0))
        assert torch.equal(outer.kept[2], first.flip(0))
    model(images)
    assert torch.equal(outer.kept[2], first.flip(0))
    assert "traces" not in vars(restore_(model))

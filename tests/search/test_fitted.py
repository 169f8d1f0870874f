from __future__ import annotations

import pytest

from conftest import make
from tntprune import Random, macs, reduce_
from tntprune.backbones.attach import is_reduced
from tntprune.search.fitted import fitted


@pytest.mark.parametrize("share", [0.75, 0.9, 1.0])
def test_the_largest_rate_that_meets_the_budget(share):
    model = make("plain")
    cost = {k: macs(reduce_(model, Random(at=2, keep=k / 100))).macs for k in range(1, 101)}
    budget = int(share * cost[100])
    assert cost[1] < budget
    found = fitted(model, lambda keep: Random(at=2, keep=keep), budget, 100)
    assert found.keep == (max(k for k in cost if cost[k] <= budget) / 100,) and not is_reduced(model)


def test_a_budget_that_nothing_meets_gives_the_smallest_rate():
    assert fitted(make("plain"), lambda keep: Random(at=2, keep=keep), 1, 50).keep == (0.02,)

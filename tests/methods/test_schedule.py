from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tntprune.errors import UsageError
from tntprune.methods import TNT, Random
from tntprune.methods.schedule import schedule
from tntprune.methods.steps import Place, Step, counts, truncated


@given(n=st.integers(1, 5000), rate=st.floats(min_value=1e-6, max_value=1.0))
def test_truncated_is_the_whole_part_and_never_nothing(n, rate):
    count = truncated(n, rate)
    assert 1 <= count <= n
    assert count in (1, int(n * rate), int(n * rate + 1e-9))


@pytest.mark.parametrize(("n", "rate", "count"), [(100, 0.29, 29), (196, 0.25, 49), (196, 0.6, 117), (10, 0.7, 7)])
def test_what_is_whole_on_paper_is_whole(n, rate, count):
    assert truncated(n, rate) == count


@given(
    n=st.integers(1, 600),
    keeps=st.lists(st.floats(min_value=0.01, max_value=1.0), min_size=1, max_size=4),
    similar=st.integers(0, 300),
    place=st.sampled_from(["score", "start"]),
)
def test_counts_chain_and_can_be_carried_out(n, keeps, similar, place):
    at = tuple(range(1, len(keeps) + 1))
    steps = schedule([TNT(at=at, keep=keeps, similar=similar, similar_at=place)], n, 12)
    count = n
    for step in steps:
        assert step.entering == count
        assert 1 <= step.leaving <= step.ranked <= step.entering
        assert step.ranked - step.leaving <= step.ranked // 2  # only one group loses tokens
        assert step.leaving < step.entering
        count = step.leaving
    expected = n - min(similar, n // 2) if place == "start" else n
    for keep in keeps:
        expected = truncated(expected, keep)
    assert count == expected  # whatever is similar, the number that stays is what was asked for
    assert counts(steps, n, 12).last == count and len(counts(steps, n, 12).attention) == 12


def test_the_paper_single_layer_takes_the_best_and_then_the_similar():
    assert schedule([TNT(at=3, keep=0.5, similar=25)], 196, 12) == (Step(Place(3), 196, 123, 98),)


def test_the_paper_multi_layer_takes_the_similar_first():
    steps = schedule([TNT(at=(3, 4, 5), keep=(0.85, 0.85, 0.8), similar=40)], 196, 12)
    assert steps == (
        Step(Place(0), 196, 196, 156),
        Step(Place(3), 156, 132, 132),
        Step(Place(4), 132, 112, 112),
        Step(Place(5), 112, 89, 89),
    )


def test_where_the_authors_code_raises_the_counts_are_clamped():
    assert schedule([TNT(at=3, keep=0.95, similar=25)], 196, 12) == (Step(Place(3), 196, 196, 186),)
    assert schedule([TNT(at=3, keep=0.1, similar=25)], 196, 12) == (Step(Place(3), 196, 38, 19),)


def test_keep_one_has_no_step():
    assert schedule([TNT(at=(3, 4), keep=1.0)], 196, 12) == ()
    assert schedule([Random(at=3, keep=1.0)], 196, 12) == ()


@pytest.mark.parametrize("at", [12, 13, 99])
def test_a_location_after_the_last_block_is_refused(at):
    with pytest.raises(UsageError, match=f"at={at}: the model has 12 blocks"):
        schedule([Random(at=at)], 196, 12)


def test_more_tokens_than_arrive_are_refused():
    with pytest.raises(UsageError, match="tokens=197 after block 3: only 196"):
        schedule([Random(at=3, tokens=197)], 196, 12)
    with pytest.raises(UsageError, match="tokens=120 after block 4: only 98"):
        schedule([Random(at=(3, 4), tokens=(98, 120))], 196, 12)


def test_two_steps_before_block_one_are_refused():
    with pytest.raises(UsageError, match="at=0 with similar_at='start'"):
        schedule([TNT(at=0, similar=5, similar_at="start")], 196, 12)

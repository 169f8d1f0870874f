from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tntprune.errors import UsageError
from tntprune.methods import METHODS, RECIPES, TNT, Random, choices, find_method, from_dict, options, to_dict

rates = st.floats(min_value=0.01, max_value=1.0)


@given(
    at=st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True).map(sorted),
    keep=rates,
    similar=st.integers(0, 100),
    recipe=st.sampled_from(["paper", "relative", "merge"]),
    noise=st.none() | st.lists(st.integers(0, 30), min_size=1, max_size=5),
)
def test_json_round_trip(at, keep, similar, recipe, noise):
    config = TNT(at=at, keep=keep, similar=similar, recipe=recipe, noise_blocks=noise)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_one_and_several_locations_are_the_same_thing():
    assert TNT(at=3, keep=0.5) == TNT(at=(3,), keep=[0.5])
    assert TNT(at=(3, 4, 5), keep=0.9).amounts == (0.9, 0.9, 0.9)
    assert TNT(at=3).amounts == (0.5,)
    assert hash(TNT(at=[3, 4], keep=[0.5, 0.5])) == hash(TNT(at=(3, 4), keep=(0.5, 0.5)))


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"keep": 0}, "keep=0"),
        ({"keep": -0.5}, "keep=-0.5"),
        ({"keep": 1.01}, "keep=1.01"),
        ({"keep": math.nan}, "keep=nan"),
        ({"keep": math.inf}, "keep=inf"),
        ({"keep": True}, "keep=True"),
        ({"keep": "half"}, "keep='half'"),
        ({"at": 3, "keep": (0.5, 0.4)}, "2 values for 1 location"),
        ({"at": (3, 4, 5), "keep": (0.5, 0.4)}, "2 values for 3 location"),
        ({"at": -1}, "at=-1"),
        ({"at": (4, 3)}, "ascending"),
        ({"at": (3, 3)}, "ascending"),
        ({"at": ()}, "no location"),
        ({"at": 2.5}, "at=2.5"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 9.5}, "tokens=9.5"),
        ({"tokens": 9, "keep": 0.5}, "both given"),
        ({"similar": -1}, "similar=-1"),
        ({"similar_at": "end"}, "similar_at='end'"),
        ({"partition": "both"}, "partition='both'"),
        ({"recipe": "mine"}, "recipe='mine'"),
        ({"scorer": "conv"}, "scorer='conv'"),
        ({"beta": 0.0, "recipe": "relative"}, "beta=0.0"),
        ({"beta": math.nan}, "beta=nan"),
        ({"capacity": 1.5}, "capacity=1.5"),
        ({"capacity": "two"}, "capacity='two'"),
        ({"noise_blocks": ()}, "noise_blocks"),
        ({"noise_blocks": -1}, "noise_blocks"),
        ({"hidden": 0}, "hidden=0"),
        ({"at": None}, "at=None"),
        ({"noise_blocks": [[1]]}, "noise_blocks"),
        ({"stream_norm": "no"}, "stream_norm='no'"),
        ({"hidden": 8}, "hidden=8: the linear scorer"),
        ({"objective": "mse"}, "objective='mse'"),
        ({"order": -1}, "order=-1"),
    ],
)
def test_what_is_out_of_range_is_refused_in_one_line(given, word):
    with pytest.raises(UsageError) as caught:
        TNT(**given)
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_a_recipe_fills_in_what_is_not_given_and_nothing_else():
    for name, filled in RECIPES.items():
        resolved = TNT(recipe=name).resolved
        assert {key: getattr(resolved, key) for key in filled} == filled
    mixed = TNT(recipe="paper", beta=0.5, score_norm=True).resolved
    assert (mixed.beta, mixed.score_norm, mixed.stream_norm, mixed.capacity) == (0.5, True, True, "one")
    assert TNT(recipe="relative", stream_norm=True).resolved.stream_norm is True


def test_the_similarity_step_goes_where_the_paper_has_it():
    assert TNT(at=3, similar=25).resolved.similar_at == "score"
    assert TNT(at=(3, 4, 5), similar=40).resolved.similar_at == "start"
    assert TNT(at=(3, 4, 5), similar=40, similar_at="score").resolved.similar_at == "score"


def test_changes_replace_and_unknown_ones_are_refused():
    assert TNT(keep=0.5).changed(tokens=9) == TNT(tokens=9)
    assert TNT(tokens=9).changed(keep=0.25) == TNT(keep=0.25)
    assert TNT(keep=0.5).changed(at=(3, 4)).amounts == (0.5, 0.5)
    with pytest.raises(UsageError, match="random has no option 'similar'; it has at, keep, tokens, order"):
        Random().changed(similar=3)


def test_a_config_from_the_future_is_refused():
    newer = to_dict(TNT()) | {"version": 99}
    with pytest.raises(UsageError, match="version 99"):
        from_dict(newer)
    with pytest.raises(UsageError, match="unknown method 'magic'"):
        from_dict({"version": 1, "method": "magic"})
    with pytest.raises(UsageError, match="no option 'shiny'"):
        from_dict(to_dict(TNT()) | {"shiny": 1})


@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_described(method):
    config = METHODS[method]
    documented = "".join(base.__doc__ or "" for base in config.__mro__)
    for name, entry in options(config).items():
        assert entry.metadata["help"], name
        assert f"{name}: " in documented, name


def test_choices_come_from_the_types():
    assert choices(TNT, "scorer") == ("linear", "mlp")
    assert choices(TNT, "objective") == ("ce", "kl", None)
    assert choices(TNT, "similar") == ()


@pytest.mark.parametrize("name", ["topk", "evit", "tome", "zerotprune", "avit", "evovit", "mctf", "atc"])
def test_what_ranks_by_what_a_block_shows_cannot_act_before_the_first(name):
    with pytest.raises(UsageError, match="at=0: no block has been seen"):
        find_method(name)(at=0)

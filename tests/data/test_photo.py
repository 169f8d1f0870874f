from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tntprune.data.photo import Packed, Photo, packed

NAMES = st.lists(
    st.tuples(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), st.integers(-1)),
    max_size=8,
).map(lambda pairs: [Photo(Path(name), label % 2**31 - (label < 0)) for name, label in pairs])


@given(photos=NAMES, data=st.data())
def test_packed_photos_are_the_same_ones(photos, data):
    found = packed(photos)
    assert isinstance(found, Packed) and list(found) == photos and len(found) == len(photos)
    where = data.draw(st.slices(len(photos)))
    assert list(found[where]) == photos[where]
    for index in range(-len(photos), len(photos)):
        assert found[index] == photos[index]
    with pytest.raises(IndexError):
        found[len(photos)]


def test_names_that_are_no_utf8_survive():
    name = Path(os.fsdecode(b"/x/\xff\xfe.jpg"))
    assert packed([Photo(name, 3)])[0] == Photo(name, 3)


def test_a_photo_takes_little_more_than_its_name():
    photos = [Photo(Path(f"/data/imagenet/train/n01440764/n01440764_{i}.JPEG"), i) for i in range(10_000)]
    assert len(pickle.dumps(packed(photos))) < 10_000 * (len(str(photos[-1].path)) + 20)


def test_what_is_no_list_of_files_stays_as_it_is():
    inside = [Photo(Path("a"), 0), Photo(Path("b"), 1, Image.new("L", (2, 2)))]
    assert packed(inside) is inside
    again = packed([Photo(Path("a"), 0)])
    assert packed(again) is again

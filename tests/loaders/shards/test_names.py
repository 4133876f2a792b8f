"""Names of members: split as by webdataset, ordered by number, also long and odd ones."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.members import Member, stem, uses_of
from orchdata.loaders.shards.fields import _split_long, classify, printable, split_name

IMAGE, AUDIO = 1, 2

WEBDATASETS = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
LONG = 1 << 20


def images(*names: str) -> list[str]:
    """Return the fields in the order of their placeholders."""
    members = [Member(name, IMAGE) for name in names]
    return [names[index] for index in uses_of(members, Recipe()).media["image"]]


@pytest.mark.parametrize("characters", [None, "ab./\n_"])
@given(data=st.data())
def test_long_names_are_split_as_webdataset_splits_short_ones(characters: str | None, data: st.DataObject) -> None:
    name = data.draw(st.text(characters or st.characters(), max_size=14))
    if not name.startswith("__"):
        split = split_name(name)
        assert split == _split_long(name)
        padding = "c" * 300  # after the last dot or slash: nothing else changes
        assert split_name(name + padding) == _split_long(name + padding) == found_by_expression(name + padding)


def found_by_expression(name: str) -> tuple[str, str] | None:
    match = WEBDATASETS.match(name)
    return None if match is None else (match[1], match[2].lower())


@pytest.mark.parametrize(
    "name", ["/" * LONG + "./", "a/" * LONG + ".b/", "." * LONG, "a." * LONG, "9" * LONG + ".jpg", "\n/" * LONG + "a.b"]
)
def test_a_name_of_a_mebibyte_takes_no_time(name: str) -> None:
    """In quadratic time, each would take hours."""
    split = split_name(name)
    for text in (name, "" if split is None else split[1]):
        classify(text)
        printable(text)
        stem(text)
        images(text, "0.jpg")


def test_numbers_of_any_length_order_by_value() -> None:
    huge = "7" * 5_000
    assert images(f"{huge}.jpg", "10.jpg", "9.jpg", "jpg") == ["jpg", "9.jpg", "10.jpg", f"{huge}.jpg"]
    assert images(f"{huge}8.jpg", f"{huge}7.jpg") == [f"{huge}7.jpg", f"{huge}8.jpg"]
    assert images("010.jpg", "9.jpg", "0.jpg", "00.png") == [
        "0.jpg",
        "00.png",
        "9.jpg",
        "010.jpg",
    ]  # ties: as they come
    assert images("\u0663.jpg", "2.jpg", "\u00b2.jpg") == ["\u00b2.jpg", "2.jpg", "\u0663.jpg"]  # Arabic 3; no number

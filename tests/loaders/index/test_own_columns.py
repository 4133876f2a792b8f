"""Types of the user's own columns: one for all shards, in any order; what the index does not keep is named."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pyarrow as pa
import pytest

from orchdata.loaders.index.fields import Piece, column_of_array, column_of_values, joined

KEYS = ("a", "b", "c")


def text(*values: str | None) -> Piece:
    return Piece("text.csv", pa.array(values, pa.large_string()), True)


def stored(*values: Any) -> Piece:
    return Piece("stored.jsonl", column_of_values(values, "stored.jsonl", KEYS, "x"), False)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([text("1", " 2\n"), text("", "3")], [[1, 2], [None, 3]]),
        ([text("1", "2"), text("2.5")], [[1.0, 2.0], [2.5]]),
        ([text("1", "2"), text("x")], [["1", "2"], ["x"]]),
        ([text("007"), text("8")], [["007"], ["8"]]),
        ([text("", None)], [[None, None]]),
        ([text("1"), stored(2.5, None)], [[1.0], [2.5, None]]),
        ([text("1"), stored("de", None)], [["1"], ["de", None]]),
        ([stored(1, 2), stored(2.5)], [[1.0, 2.0], [2.5]]),
        ([stored(1, 2.5)], [[1.0, 2.5]]),
        ([stored(True, None), stored(None)], [[True, None], [None]]),
    ],
)
def test_the_type_is_that_of_all_shards_in_any_order(pieces: list[Piece], expected: list[list[Any]]) -> None:
    for order in itertools.permutations(range(len(pieces))):
        columns = joined([pieces[at] for at in order], "x")
        assert repr([column.to_pylist() for column in columns]) == repr([expected[at] for at in order])


@pytest.mark.parametrize(
    "pieces", [[stored(1), stored("x")], [stored(True), stored(1)], [stored(1), text("x")], [stored(True), text("1")]]
)
def test_shards_of_different_types_are_named(pieces: list[Piece]) -> None:
    for order in (pieces, pieces[::-1]):
        with pytest.raises(ValueError, match=r"index_fields: 'x' is \w+ in \w+\.\w+ and \w+ in"):
            joined(order, "x")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, "x"), "'x' is int and str; the index keeps"),
        ((None, [1]), "'x' is list"),
        (({"a": 1},), "'x' is dict"),
        ((2.5, True), "'x' is bool and float"),
        ((1 << 63,), "'x' cannot be kept: Python int too large"),
        ((2.5, (1 << 53) + 1), "'x' cannot be kept: Integer value 9007199254740993 is outside"),
        (("\ud800",), "'x' cannot be kept: 'utf-8' codec"),
        (("y", "y" * 2000), "sample 'b': 'x' has 2000 bytes, above 1024"),
    ],
)
def test_values_that_the_index_does_not_keep_are_named(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        column_of_values(values, "a.jsonl", KEYS, "x")


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, None], pa.uint8()), [1, None]),
        (pa.array([1.5, 2], pa.float32()), [1.5, 2.0]),
        (pa.array(["a", None, "a"]).dictionary_encode().dictionary_decode(), ["a", None, "a"]),
        (pa.array([datetime.date(2024, 1, 2)]), ["2024-01-02"]),
        (pa.array([True, None]), [True, None]),
        (pa.nulls(2), [None, None]),
    ],
)
def test_columns_of_files(array: pa.Array, expected: list[Any]) -> None:
    assert column_of_array(array, (), "a.parquet", KEYS, "x").to_pylist() == expected


def test_numbers_of_classes_are_their_names() -> None:
    column = column_of_array(pa.array([1, -1, None, 0]), ("cat", "dog"), "a.parquet", "abcd", "x")
    assert column.to_pylist() == ["dog", None, None, "cat"]
    with pytest.raises(ValueError, match=r"a\.parquet: 'x' cannot be kept"):
        column_of_array(pa.array([2]), ("cat", "dog"), "a.parquet", KEYS, "x")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([[1]]), "'x' is list<"),
        (pa.array([{"a": 1}]), "'x' is struct<"),
        (pa.array([b"x"]), "'x' is binary"),
        (pa.array([1 << 63], pa.uint64()), "'x' cannot be kept: Integer value"),
    ],
)
def test_columns_that_the_index_does_not_keep_are_named(array: pa.Array, message: str) -> None:
    with pytest.raises(ValueError, match=rf"a\.parquet: {message}"):
        column_of_array(array, (), "a.parquet", KEYS, "x")

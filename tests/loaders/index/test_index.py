"""The index: mapped, shared, and equal to the tables it was made from."""

from __future__ import annotations

import datetime
import itertools
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from shard_factory import RECIPE, omni_samples, omni_shards, write_shard

from orchdata.bench import synthetic_index
from orchdata.loaders import compact
from orchdata.loaders.compact import RowsOfKeys, Strings
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.fields import Piece, column_of_array, column_of_values, joined
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.index.table import Columns
from orchdata.loaders.recipe import Recipe

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

IMAGE, AUDIO = 1, 2

ARRAYS = [name for name in Columns.__slots__ if name.startswith(("part_", "member_"))]


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return synthetic_index(tmp_path_factory.mktemp("index") / "synthetic.index", 50_000, seed=3, num_shards=7)


def test_arrays_are_read_only_and_the_index_pickles_as_its_path(synthetic: Index) -> None:
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(synthetic, name)[0] = 1
    data = pickle.dumps(synthetic)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).llm_tokens, synthetic.llm_tokens)


def test_find(tmp_path: Path, synthetic: Index) -> None:
    assert synthetic.find("synthetic-000002.tar", synthetic.key(20_000)) == 20_000
    assert synthetic.find("synthetic-000001.tar", synthetic.key(20_000)) is None
    assert synthetic.find("other.tar", "x") is None

    urls = []
    for folder in "ab":
        (tmp_path / folder).mkdir()
        keys = ["same", f"only-{folder}", "längst"]
        urls.append(write_shard(tmp_path / folder / "x.tar", [{"__key__": key, "txt": b"t"} for key in keys]))
    index = build_index(urls, Recipe())
    assert [index.find(url, "same") for url in urls] == [0, 3]
    assert index.find("x.tar", "only-b") == 4
    assert index.find(urls[1], "längst") == 5
    with pytest.raises(ValueError, match=r"several shards called 'x.tar', name one of .*a/x.tar, .*b/x.tar"):
        index.find("x.tar", "same")


# Several indexes as one: each row and part has the values of its own index, and damage is detected.


@pytest.fixture
def indexes(tmp_path: Path) -> list[Index]:
    broken = [{"__key__": "bad", "jpg": b"no image"}, *omni_samples(6, prefix="b", seed=9)]
    one = build_index(omni_shards(tmp_path, shards=2, samples=7), RECIPE)
    two = build_index([write_shard(tmp_path / "broken.tar", broken)], RECIPE)
    return [one, two, one]


def test_failures_names_and_totals_are_those_of_all(indexes: list[Index]) -> None:
    joined = pickle.loads(pickle.dumps(JoinedIndex(indexes)))
    assert [joined.failure(row).key for row in joined.bad_rows().tolist()] == ["bad"]
    assert joined.find_all("broken.tar", "b0003") == [14 + 4]
    key = indexes[0].key(3)
    assert joined.find_all("omni-000000.tar", key) == [3, 14 + 7 + 3], "in both sources that have it"
    assert joined.totals["samples"] == len(joined)
    assert joined.totals["llm_tokens"] == int(joined.llm_tokens[np.arange(len(joined))].sum())
    assert joined.lost_samples().tolist() == [0] * 5
    assert joined.sample_rows().tolist() == list(range(len(joined)))
    assert joined.build_id != JoinedIndex(indexes[:2]).build_id
    with pytest.raises(ValueError, match="row 35 of an index of 35"):
        joined.key(35)
    joined.check_unchanged()


# Compact columns behave as the lists and dicts that they replace.


@pytest.mark.parametrize("same_hashes", [False, True])
def test_rows_of_keys_are_those_of_a_dict(same_hashes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if same_hashes:
        monkeypatch.setattr(compact, "hash", lambda key: len(key), raising=False)
    generator, keys, known = random.Random(3), Strings(), dict[str, int]()
    rows = RowsOfKeys(keys)
    for row in range(400 if same_hashes else 5000):
        key = str(generator.randrange(3000))
        assert (key in rows) == (key in known)
        assert rows.setdefault(key, row) == known.setdefault(key, row)
        keys.append(key)


# Types of the user's own columns: one for all shards, in any order; what the index does not keep is named.


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

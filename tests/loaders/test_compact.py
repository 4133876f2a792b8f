"""Compact columns behave as the lists and dicts that they replace."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from orchdata.loaders import compact
from orchdata.loaders.compact import Names, RowsOfKeys, Strings

WORDS = ["", "a", "ä", "猫", "a\0b", "a", "x" * 300, "\U0001f408"]


@pytest.mark.parametrize("kind", [Strings, Names])
def test_a_column_is_its_list(kind: type[Strings] | type[Names]) -> None:
    column = kind(WORDS)
    column.append("last")
    expected = [*WORDS, "last"]
    assert list(column) == expected and len(column) == len(expected)
    assert [column[row] for row in range(-9, 9)] == [expected[row] for row in range(-9, 9)]
    for wanted in (slice(None, 3), slice(2, -1), slice(5, 5), slice(None, None, 2)):
        assert list(column[wanted]) == expected[wanted]
    for row in (9, -10):
        with pytest.raises(IndexError):
            column[row]
    assert column == kind(expected) and column != kind(WORDS)


@pytest.mark.parametrize("kind", [Strings, Names])
def test_a_column_survives_arrow(kind: type[Strings] | type[Names]) -> None:
    for words in (WORDS, [], [""], ["", ""]):
        array = kind(words).arrow()
        array.validate(full=True)
        assert array.type == pa.string() and array.to_pylist() == words
        assert list(kind.of_arrow(array)) == words
        part = pa.array(["before", *words, "after"], pa.string())[1:-1]
        assert list(kind.of_arrow(part)) == words
    column = kind.of_arrow(pa.array(WORDS, pa.string()))
    column.extend(["a", "new"])
    assert list(column) == [*WORDS, "a", "new"]


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

"""Compact columns behave as the lists and dicts that they replace."""

from __future__ import annotations

import random

import pytest

from orchdata.loaders import compact
from orchdata.loaders.compact import RowsOfKeys, Strings


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

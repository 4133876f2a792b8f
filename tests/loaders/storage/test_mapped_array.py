"""Arrays pickled as files: written when pickled, checked when mapped, written again if damaged."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.cache import MappedArray

VALUES = np.arange(100_000)


def only_file(cache: Path) -> Path:
    (path,) = (cache / "arrays").iterdir()
    return path


def test_an_array_arrives_as_it_was_and_read_only(private_cache: Path) -> None:
    mapped = MappedArray(VALUES)
    assert not list(private_cache.iterdir())  # nothing is written before it is pickled
    data = pickle.dumps(mapped)
    assert len(data) < 400
    arrived = pickle.loads(data).array
    assert np.array_equal(arrived, VALUES) and arrived.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        arrived[0] = 1
    assert np.array_equal(pickle.loads(pickle.dumps(pickle.loads(data))).array, VALUES) and only_file(private_cache)


def test_an_empty_array_is_no_file(private_cache: Path) -> None:
    assert pickle.loads(pickle.dumps(MappedArray(VALUES[:0]))).array.size == 0
    assert not list(private_cache.iterdir())


@pytest.mark.parametrize("damage", ["cut", "altered", "gone"])
def test_a_damaged_file_is_refused_and_made_again(private_cache: Path, damage: str) -> None:
    mapped = MappedArray(VALUES.copy())
    data = pickle.dumps(mapped)
    path = only_file(private_cache)
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
        assert np.array_equal(pickle.loads(data).array, VALUES)  # this process has it open
        del mapped
    else:
        path.write_bytes(content[:-8] if damage == "cut" else content[:800] + b"x" + content[801:])
    with pytest.raises(StorageError, match="create the loader again"):
        pickle.loads(data)
    assert np.array_equal(pickle.loads(pickle.dumps(MappedArray(VALUES))).array, VALUES)

"""Checking named media again before a run: the missing ones, and a sample of the others.

missing when indexed --does one exist now?--> if so, measure the shards with missing media again
there when indexed   --same size and modification time?--> if not, measure all shards that name media again
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DataError, DecodeError, ShardError
from orchdata.loaders.functions import UserFunction
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.jsonl.media_files import MISSING, MediaFolder
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.remote.urls import is_remote

MOST_FILES: Final = 1024
"""Most files that are checked, of the missing ones and of the others."""
_ROWS_PER_SHARD: Final = 8
_NAMED: Final = re.compile(rf"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"): {MISSING}""")


class Indexed(Protocol):
    """The part of an index that is used here."""

    @property
    def shards(self) -> Sequence[ShardInfo]: ...

    def bad_rows(self) -> NDArray[np.int64]: ...
    def failure(self, row: int) -> DataError: ...
    def rows_of(self, shard: int) -> NDArray[np.int64]: ...
    def read_spec(self, row: int) -> list[tuple[int, int, int, str]]: ...


def changed_media(index: Indexed, limits: Limits, record: UserFunction | None = None) -> list[str]:
    """Return the urls of shards with media that may have changed since they were indexed.

    Args:
        record: the recipe's function, which makes the records.

    Raises StorageError if a file cannot be checked now.
    """
    numbers = [number for number, shard in enumerate(index.shards) if _is_checked(shard)]
    if not numbers:
        return []
    missing = {url: names for url, names in _missing(index, numbers) if names}
    reappeared = [url for url in missing if _is_any_there(missing[url])]
    changed = list(missing) if reappeared else []
    if any(_has_changed(index, number, limits, record) for number in numbers[: max(1, MOST_FILES // _ROWS_PER_SHARD)]):
        changed = [index.shards[number].url for number in numbers]
    return changed


def _is_checked(shard: ShardInfo) -> bool:
    """Return whether a shard and what its records name are files: each read of an object is of the indexed version."""
    is_local = not (is_remote(shard.url) or is_remote(shard.media_root))
    return bool(shard.media_root) and is_local and not (shard.container or shard.moved_media)


def _missing(index: Indexed, numbers: Sequence[int]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield (url, [(media_root, name) of each missing file]) of each shard; some of its samples are checked."""
    bad, left = index.bad_rows(), MOST_FILES
    for number in numbers:
        shard, rows = index.shards[number], index.rows_of(number)
        names = []
        first, stop = np.searchsorted(bad, [rows[0], rows[-1] + 1]).tolist() if len(rows) else (0, 0)
        for row in bad[first : min(stop, first + left)].tolist():
            name = _NAMED.search(index.failure(row).reason)
            if name is not None:
                names.append((shard.media_root, str(ast.literal_eval(name[1]))))
        left -= len(names)
        yield shard.url, names


def _is_any_there(names: Sequence[tuple[str, str]]) -> bool:
    for root, name in names:
        try:
            with MediaFolder(root).open(name):
                return True
        except DecodeError:
            continue
    return False


def _has_changed(index: Indexed, number: int, limits: Limits, record: UserFunction | None) -> bool:
    """Check some of the files that the records of a shard name. Return whether one has changed."""
    shard = index.shards[number]
    rows = np.setdiff1d(index.rows_of(number), index.bad_rows(), assume_unique=True)
    chosen = rows[:: max(1, len(rows) // _ROWS_PER_SHARD)][:_ROWS_PER_SHARD].tolist()
    try:
        rules = FieldRules(shard.columns, record)
        opened = open_shard(shard.url, limits=limits, cache=CacheFolder(), media_root=shard.media_root, rules=rules)
        with closing(opened) as file:
            return isinstance(file, JsonLinesShard) and not all(file.names_same(index.read_spec(row)) for row in chosen)
    except ShardError:
        return False  # opening it later raises the error

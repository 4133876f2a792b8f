"""Media that records name, looked at again before a run: those that were missing, and some of those that were there.

missing when indexed --is one there now?--> the shards that lack some are measured again
there when indexed   --some of them: same size and time of change?--> else all shards that name media are
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
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.jsonl.media_files import MISSING, MediaFolder
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.local import LocalFile

MOST_FILES: Final = 1024
"""Looked at of each kind, at most."""
_OF_A_SHARD: Final = 8
_NAMED: Final = re.compile(rf"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"): {MISSING}""")


class Indexed(Protocol):
    """What an index tells of its samples."""

    @property
    def shards(self) -> Sequence[ShardInfo]: ...

    def bad_rows(self) -> NDArray[np.int64]: ...
    def failure(self, row: int) -> DataError: ...
    def rows_of(self, shard: int) -> NDArray[np.int64]: ...
    def read_spec(self, row: int) -> list[tuple[int, int, int, str]]: ...


def changed_media(index: Indexed, limits: Limits) -> list[str]:
    """Urls of shards whose media may be others than they were when they were indexed.

    Raises StorageError where a file cannot be looked at now.
    """
    numbers = [number for number, shard in enumerate(index.shards) if shard.media_root]
    if not numbers:
        return []
    lacking = {url: names for url, names in _missing(index, numbers) if names}
    found = [url for url in lacking if _is_any_there(lacking[url])]
    changed = list(lacking) if found else []
    if any(_is_other(index, number, limits) for number in numbers[: max(1, MOST_FILES // _OF_A_SHARD)]):
        changed = [index.shards[number].url for number in numbers]
    return changed


def _missing(index: Indexed, numbers: Sequence[int]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(url, (media_root, name) of files that its records name and that were not there), of some samples."""
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


def _is_other(index: Indexed, number: int, limits: Limits) -> bool:
    """Whether one of some files that the records of a shard name is not what was indexed."""
    shard = index.shards[number]
    rows = np.setdiff1d(index.rows_of(number), index.bad_rows(), assume_unique=True)
    chosen = rows[:: max(1, len(rows) // _OF_A_SHARD)][:_OF_A_SHARD].tolist()
    try:
        file = JsonLinesShard(shard.url, LocalFile(shard.url), limits=limits, media_root=shard.media_root)
        with closing(file):
            return not all(file.names_same(index.read_spec(row)) for row in chosen)
    except ShardError:
        return False  # whoever opens it says what is wrong

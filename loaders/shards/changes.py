"""Finding shards that changed since they were indexed: by size and modification time, then by their headers.

shards of the index --stat--> same size and time: unchanged
                          --> another size: changed
                          --> same size, another time: a copy, or changed: compare the checksum of the headers

Checking named media again before a run: the missing ones, and a sample of the others.

missing when indexed --does one exist now?--> if so, measure the shards with missing media again
there when indexed   --same size and modification time?--> if not, measure all shards that name media again
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DataError, DecodeError, ShardError, StorageError
from orchdata.loaders.functions import UserFunction
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.fields import FieldRules
from orchdata.loaders.shards.jsonl.media_files import MISSING, MediaFolder
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.open import NO_CONTAINERS, describe_change, open_shard, rules_of
from orchdata.loaders.shards.shard import Member, ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import version
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import FileVersion

_NONE_LISTED: Final[Mapping[str, FileVersion]] = MappingProxyType({})
_THREADS = 16
"""Network file systems answer many requests at the same time."""
_SHARDS_PER_TASK = 1000
"""Shards that a thread checks in one task: a task per shard costs more than a stat of a local file."""
MOST_SHARDS = 1024
"""Most shards with compared headers: a data set that was copied is not read completely before training starts."""
MOST_BYTES = 4 << 30
"""Most bytes read from files without separate headers, which are compared completely."""


def find_changes(
    shards: Sequence[ShardInfo],
    *,
    limits: Limits,
    cache: CacheFolder,
    containers: Mapping[str, Container] = NO_CONTAINERS,
    listed: Mapping[str, FileVersion] = _NONE_LISTED,
) -> tuple[list[str], int]:
    """Check each local shard of an index once. A shard that cannot be checked now counts as unchanged. Objects are
    compared with a listing (`listed`), if there is one: each of their reads is of the version that was indexed.

    Returns the urls of shards that must be measured again; and how many with the same size and another time were not
    compared: each is checked when it is opened.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="orchdata-changes") as pool:
        tasks = (shards[start : start + _SHARDS_PER_TASK] for start in range(0, len(shards), _SHARDS_PER_TASK))
        touched = list(chain.from_iterable(pool.map(lambda task: list(_touched(task, listed)), tasks)))

        # Another size is certainly a change, and so is another etag. Of the others, compare as many as can be read in
        # reasonable time.
        is_sure = [size != shard.size or is_remote(shard.url) for shard, size in touched]
        changed = [shard for (shard, _), sure in zip(touched, is_sure, strict=True) if sure]
        unknown = [shard for (shard, _), sure in zip(touched, is_sure, strict=True) if not sure]
        compared, read_bytes = [], 0
        for shard in unknown[:MOST_SHARDS]:
            read_bytes += 0 if shard.url.endswith(".tar") else shard.size
            if read_bytes <= MOST_BYTES:
                compared.append(shard)
        differ = pool.map(lambda shard: _differs(shard, limits, cache, containers), compared)
        changed += [shard for shard, is_other in zip(compared, differ, strict=True) if is_other]
    return [shard.url for shard in changed], len(unknown) - len(compared)


def _touched(shards: Sequence[ShardInfo], listed: Mapping[str, FileVersion]) -> Iterator[tuple[ShardInfo, int]]:
    """Yield each shard with another size or version than in the index, and its size now."""
    for shard in shards:
        try:
            now = listed.get(shard.url) if is_remote(shard.url) else version(shard.url, retries=False)
        except StorageError:
            continue  # opening it later raises the error
        if now is not None and now != (shard.size, shard.version):
            yield shard, now.size


def _differs(indexed: ShardInfo, limits: Limits, cache: CacheFolder, containers: Mapping[str, Container]) -> bool:
    if indexed.reach:
        return True  # its beginning is measured again as fast as it is compared
    try:
        with closing(
            open_shard(
                indexed.url,
                limits=limits,
                cache=cache,
                media_root=indexed.media_root or None,
                rules=rules_of(indexed, containers),
            )
        ) as shard:
            return describe_change(shard, indexed) is not None
    except ShardError:
        return True  # it could be read when it was indexed: the build records what is wrong


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
    """Return the urls of shards with media that may have changed since they were indexed. Raises StorageError if a file
    cannot be checked now. Of objects and what they name, each read is of the indexed version.
    """
    bad, left = index.bad_rows(), MOST_FILES
    checked: list[str] = []
    missing: list[str] = []
    is_any_there = has_any_changed = False
    for number, shard in enumerate(index.shards):
        is_local = not (is_remote(shard.url) or is_remote(shard.media_root))
        if not shard.media_root or not is_local or shard.container or shard.moved_media:
            continue
        # Some of the missing files.
        rows, folder = index.rows_of(number), MediaFolder(shard.media_root)
        first, stop = np.searchsorted(bad, [rows[0], rows[-1] + 1]).tolist() if len(rows) else (0, 0)
        reasons = (index.failure(row).reason for row in bad[first : min(stop, first + left)].tolist())
        names = [str(ast.literal_eval(name[1])) for name in map(_NAMED.search, reasons) if name is not None]
        left -= len(names)
        missing += [shard.url] if names else []
        is_any_there = is_any_there or any(_is_there(folder, name) for name in names)
        # Some of the others.
        checked.append(shard.url)
        if not has_any_changed and len(checked) <= MOST_FILES // _ROWS_PER_SHARD:
            rows = np.setdiff1d(rows, bad, assume_unique=True)
            chosen = rows[:: max(1, len(rows) // _ROWS_PER_SHARD)][:_ROWS_PER_SHARD].tolist()
            has_any_changed = _has_changed(shard, map(index.read_spec, chosen), limits, record)
    return checked if has_any_changed else missing if is_any_there else []


def _is_there(folder: MediaFolder, name: str) -> bool:
    try:
        with folder.open(name):
            return True
    except DecodeError:
        return False


def _has_changed(
    shard: ShardInfo, samples: Iterable[Sequence[Member]], limits: Limits, record: UserFunction | None
) -> bool:
    """Return whether a file has changed that one of these samples of a shard names."""
    try:
        rules = FieldRules(shard.columns, record)
        opened = open_shard(shard.url, limits=limits, cache=CacheFolder(), media_root=shard.media_root, rules=rules)
        with closing(opened) as file:
            return isinstance(file, JsonLinesShard) and not all(map(file.names_same, samples))
    except ShardError:
        return False  # opening it later raises the error

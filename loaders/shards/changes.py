"""Which shards are no longer those that were indexed: by size and time of change, then by their headers.

shards of the index --stat--> same size and time: unchanged
                          --> another size: changed
                          --> same size, another time: a copy, or changed; the headers' checksum tells
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

from orchdata.loaders.errors import ShardError
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.open import open_shard, tells_apart
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.cache import CacheFolder

_THREADS = 16
"""Network file systems answer many at once."""
_STRETCH = 1000
"""Shards that a thread looks at in one go: handing over one costs more than a stat of a local file."""
MOST_SHARDS = 1024
"""Whose headers are compared at most: a data set that was copied whole is not read whole before training starts."""
MOST_BYTES = 4 << 30
"""Of files without headers of their own, of which all bytes are compared."""


class Changes(NamedTuple):
    """What became of the shards of an index.

    Attributes:
        changed: urls of shards that must be measured again.
        unsure: number of shards with the same size and another time of change that were not compared: each is checked
            when it is opened.
    """

    changed: list[str]
    unsure: int


def find_changes(shards: Sequence[ShardInfo], *, limits: Limits, cache: CacheFolder) -> Changes:
    """Look at each local shard of an index once. A shard that cannot be looked at now counts as unchanged.

    Args:
        shards: as the index lists them.
        limits, cache: for opening shards of which the headers are compared.
    """
    stretches = [shards[start : start + _STRETCH] for start in range(0, len(shards), _STRETCH)]
    with ThreadPoolExecutor(min(_THREADS, len(stretches) or 1), thread_name_prefix="orchdata-changes") as pool:
        touched = [shard for found in pool.map(lambda stretch: list(_touched(stretch)), stretches) for shard in found]

        # Another size is a change for certain; of the rest, as many are compared as are read in reasonable time.
        changed = [shard for shard, size in touched if size != shard.size]
        unknown = [shard for shard, size in touched if size == shard.size]
        compared = list(_affordable(unknown))
        differ = pool.map(lambda shard: _differs(shard, limits, cache), compared)
        changed += [shard for shard, is_other in zip(compared, differ, strict=True) if is_other]
    return Changes([shard.url for shard in changed], len(unknown) - len(compared))


def _touched(shards: Sequence[ShardInfo]) -> Iterator[tuple[ShardInfo, int]]:
    """Shards with another size or time of change than the index says, and their size now."""
    for shard in shards:
        try:
            now = os.stat(shard.url)
        except OSError:
            continue  # whoever opens it says what is wrong
        if (now.st_size, str(now.st_mtime_ns)) != (shard.size, shard.version):
            yield shard, now.st_size


def _affordable(shards: Sequence[ShardInfo]) -> Iterator[ShardInfo]:
    read_bytes = 0
    for shard in shards[:MOST_SHARDS]:
        read_bytes += 0 if shard.url.endswith(".tar") else shard.size
        if read_bytes <= MOST_BYTES:
            yield shard


def _differs(indexed: ShardInfo, limits: Limits, cache: CacheFolder) -> bool:
    try:
        with closing(
            open_shard(indexed.url, limits=limits, cache=cache, media_root=indexed.media_root or None)
        ) as shard:
            return tells_apart(shard, indexed) is not None
    except ShardError:
        return True  # it could be read when it was indexed: the build records what is wrong

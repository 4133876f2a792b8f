"""Opening shards: path -> a shard that lists its members and reads them by position. Open shards are shared and few."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final

from orchdata.loaders.errors import StaleIndexError
from orchdata.loaders.functions import UserFunction
from orchdata.loaders.limits import Limits
from orchdata.loaders.recent import Recent
from orchdata.loaders.shards.arrow.shard import ArrowShard
from orchdata.loaders.shards.compressed import compression, open_decompressed
from orchdata.loaders.shards.field_rules import NO_RULES, FieldRules
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.parquet.shard import ParquetShard
from orchdata.loaders.shards.shard import Shard, ShardInfo
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.counted import CountedFile, ReadBytes
from orchdata.loaders.storage.local import LocalFile
from orchdata.loaders.storage.paths import (
    ARROW_SUFFIXES,
    PARQUET_SUFFIXES,
    RECORD_SUFFIXES,
    is_compressed,
    media_root_of,
    suffix_of,
)
from orchdata.loaders.storage.storage import Storage

_TEXT_BYTES: Final = 64 << 20

_Key = tuple[str, tuple[tuple[str, str], ...], str]
"""A shard's path, its renamed fields, and the id of the function that makes its records."""


def open_shard(
    url: str,
    *,
    limits: Limits,
    cache: CacheFolder,
    media_root: str | None = None,
    rules: FieldRules = NO_RULES,
    reads: ReadBytes | None = None,
) -> Shard:
    """Open a shard by its suffix. A compressed one is first decompressed into the cache, once.

    Args:
        rules: names of fields, and the function that makes records.
        reads: counts all bytes read from it, now and later, and from the files below `media_root` that it names.

    Raises:
        ValueError: unknown suffix.
        ShardError: it cannot be opened, or cannot be decompressed within the limits.
    """
    suffix = suffix_of(url)
    file: Storage = LocalFile(url)
    if reads is not None:
        file = CountedFile(file, reads.storage)
    if suffix in PARQUET_SUFFIXES:
        return ParquetShard(url, file, limits=limits, rules=rules.of_columns)
    if suffix in ARROW_SUFFIXES:
        return ArrowShard(url, file, limits=limits, rules=rules.of_columns)
    # Decide by content whether a tar is compressed: webdataset also reads a gzipped .tar, and a plain .tar.gz.
    are_records = suffix in RECORD_SUFFIXES
    content, stored = file, file
    if (is_compressed(suffix) or not are_records) and compression(file.read(0, 4)) is not None:
        try:
            content = open_decompressed(file, limits=limits, cache=cache)
        finally:
            file.close()
        if reads is not None:
            content = CountedFile(content, reads.cache)
    versions: dict[str, Any] = {"size": stored.size, "version": stored.version}
    if are_records:
        root = media_root_of(url, media_root)
        return JsonLinesShard(url, content, limits=limits, media_root=root, rules=rules, reads=reads, **versions)
    return TarShard(url, content, limits=limits, names=rules.columns, **versions)


def open_indexed(
    url: str,
    indexed: ShardInfo,
    *,
    limits: Limits,
    cache: CacheFolder,
    record: UserFunction | None = None,
    reads: ReadBytes | None = None,
) -> Shard:
    """Open a shard that was indexed before. Raises StaleIndexError if it has changed, and as `open_shard`."""
    rules = FieldRules(indexed.columns, record)
    root = indexed.media_root or None
    shard = open_shard(url, limits=limits, cache=cache, media_root=root, rules=rules, reads=reads)
    try:
        difference = describe_change(shard, indexed)
        if difference is not None:
            raise StaleIndexError(url, f"{difference}: run `orchdata index` again")
    except BaseException:
        shard.close()
        raise
    return shard


class OpenShards:
    """Open shards, shared by threads; the least recently used are dropped.

    A dropped shard closes when the last thread that reads it is done.

    Args:
        limits, cache: for opening.
        capacity: the number of shards that stay open.

    Attributes:
        reads: bytes read from all of them; callers that read members add to its `used`.
        texts: results that callers computed recently from texts that are used several times.
    """

    def __init__(self, *, limits: Limits, cache: CacheFolder, capacity: int = 64) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.reads = ReadBytes()
        self.texts: Recent[Any] = Recent(_TEXT_BYTES)
        self._limits = limits
        self._cache = cache
        self._capacity = capacity
        self._lock = threading.Lock()
        self._shards: OrderedDict[_Key, Shard] = OrderedDict()
        self._opening: dict[_Key, threading.Lock] = {}

    def get(self, url: str, indexed: ShardInfo | None = None, record: UserFunction | None = None) -> Shard:
        """Return the open shard. When it is opened, it is compared with `indexed`, its entry in the index.

        Args:
            record: the recipe's function, which makes the records of files of records.

        Raises:
            StaleIndexError: it has changed since it was indexed.
            ShardError, ValueError: as `open_shard`.
        """
        key = url, () if indexed is None else indexed.columns, "" if record is None else record.id
        if (shard := self._find(key)) is not None:
            return shard
        with self._lock:
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:  # opening may decompress for minutes: only threads that want the same shard wait
            try:
                return self._find(key) or self._open(key, indexed, record)
            finally:
                with self._lock:
                    self._opening.pop(key, None)

    def close(self) -> None:
        """Close all. Shards requested later are opened again."""
        with self._lock:
            shards = list(self._shards.values())
            self._shards.clear()
        for shard in shards:
            shard.close()

    def _open(self, key: _Key, indexed: ShardInfo | None, record: UserFunction | None) -> Shard:
        opening: dict[str, Any] = {"limits": self._limits, "cache": self._cache, "reads": self.reads}
        if indexed is None:
            shard = open_shard(key[0], rules=FieldRules(record=record), **opening)
        else:
            shard = open_indexed(key[0], indexed, record=record, **opening)
        with self._lock:
            self._shards[key] = shard
            while len(self._shards) > self._capacity:
                self._shards.popitem(last=False)  # without close: other threads may be reading it
        return shard

    def _find(self, key: _Key) -> Shard | None:
        with self._lock:
            shard = self._shards.get(key)
            if shard is not None:
                self._shards.move_to_end(key)
            return shard


def describe_change(shard: Shard, indexed: ShardInfo) -> str | None:
    """Describe how the shard differs from the indexed one; None if it is the same. May read all headers."""
    if shard.size != indexed.size:
        return f"has {shard.size} bytes, {indexed.size} when it was indexed"
    # A copy of the same data has another modification time; equal headers show that it is a copy. For Parquet all bytes
    # are compared: a damaged page can crash the library that decodes it.
    if shard.version != indexed.version and shard.checksum() != indexed.checksum:
        return "was rewritten since it was indexed, with the same size and other content"
    return None

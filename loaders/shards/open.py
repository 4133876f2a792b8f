"""Opening shards: path -> a shard that lists its members and reads them by position. Open shards are shared and few."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final

from orchdata.loaders.errors import StaleIndexError
from orchdata.loaders.limits import Limits
from orchdata.loaders.recent import Recent
from orchdata.loaders.shards.arrow.shard import ArrowShard
from orchdata.loaders.shards.compressed import compression, open_decompressed
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.parquet.shard import ParquetShard
from orchdata.loaders.shards.shard import Shard, ShardInfo
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.counted import CountedFile, ReadBytes
from orchdata.loaders.storage.local import LocalFile
from orchdata.loaders.storage.paths import ARROW_SUFFIXES, PARQUET_SUFFIXES, RECORD_SUFFIXES, media_root_of, suffix_of
from orchdata.loaders.storage.storage import Storage

_TEXT_BYTES: Final = 64 << 20


def open_shard(
    url: str, *, limits: Limits, cache: CacheFolder, media_root: str | None = None, reads: ReadBytes | None = None
) -> Shard:
    """Open a shard by its suffix. A compressed tar is first decompressed into the cache, once.

    `reads` counts all bytes read from it, now and later, and from the files below `media_root` that it names.

    Raises:
        ValueError: unknown suffix.
        ShardError: it cannot be opened, or cannot be decompressed within the limits.
    """
    suffix = suffix_of(url)
    file: Storage = LocalFile(url)
    if reads is not None:
        file = CountedFile(file, reads.storage)
    if suffix in PARQUET_SUFFIXES:
        return ParquetShard(url, file, limits=limits)
    if suffix in ARROW_SUFFIXES:
        return ArrowShard(url, file, limits=limits)
    if suffix in RECORD_SUFFIXES:
        return JsonLinesShard(url, file, limits=limits, media_root=media_root_of(url, media_root), reads=reads)
    # Decide by content: webdataset also reads a gzipped .tar, and a plain .tar.gz.
    if compression(file.read(0, 4)) is None:
        return TarShard(url, file, limits=limits)
    try:
        content: Storage = open_decompressed(file, limits=limits, cache=cache)
    finally:
        file.close()
    if reads is not None:
        content = CountedFile(content, reads.cache)
    return TarShard(url, content, limits=limits, size=file.size, version=file.version)


def open_indexed(
    url: str, indexed: ShardInfo, *, limits: Limits, cache: CacheFolder, reads: ReadBytes | None = None
) -> Shard:
    """Open a shard that was indexed before. Raises StaleIndexError if it has changed, and as `open_shard`."""
    shard = open_shard(url, limits=limits, cache=cache, media_root=indexed.media_root or None, reads=reads)
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
        self._shards: OrderedDict[str, Shard] = OrderedDict()
        self._opening: dict[str, threading.Lock] = {}

    def get(self, url: str, indexed: ShardInfo | None = None) -> Shard:
        """Return the open shard. When it is opened, it is compared with `indexed`, its entry in the index.

        Raises:
            StaleIndexError: it has changed since it was indexed.
            ShardError, ValueError: as `open_shard`.
        """
        if (shard := self._find(url)) is not None:
            return shard
        with self._lock:
            opening = self._opening.setdefault(url, threading.Lock())
        with opening:  # opening may decompress for minutes: only threads that want the same shard wait
            try:
                return self._find(url) or self._open(url, indexed)
            finally:
                with self._lock:
                    self._opening.pop(url, None)

    def close(self) -> None:
        """Close all. Shards requested later are opened again."""
        with self._lock:
            shards = list(self._shards.values())
            self._shards.clear()
        for shard in shards:
            shard.close()

    def _open(self, url: str, indexed: ShardInfo | None) -> Shard:
        if indexed is None:
            shard = open_shard(url, limits=self._limits, cache=self._cache, reads=self.reads)
        else:
            shard = open_indexed(url, indexed, limits=self._limits, cache=self._cache, reads=self.reads)
        with self._lock:
            self._shards[url] = shard
            while len(self._shards) > self._capacity:
                self._shards.popitem(last=False)  # without close: other threads may be reading it
        return shard

    def _find(self, url: str) -> Shard | None:
        with self._lock:
            shard = self._shards.get(url)
            if shard is not None:
                self._shards.move_to_end(url)
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

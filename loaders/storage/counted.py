"""Counting bytes: those read, by any thread, and those that samples needed; and requests to object storage."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from orchdata.loaders.storage.storage import Storage

_REQUESTS: Final = ("get", "head", "list", "put", "again")
"""Reads, looks, pages of listings, writes; of these, those that were repeated after an error."""


class ByteCount:
    """A sum of bytes that many threads add to."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.value += num_bytes


class RequestCounts:
    """Requests so far by kind, from many threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] += 1

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add the counts of another process."""
        with self._lock:
            self._counts.update(counts)

    def as_dict(self) -> dict[str, int]:
        """Return the number of each kind that was made."""
        with self._lock:
            return {kind: self._counts[kind] for kind in _REQUESTS if self._counts[kind]}


class ReadBytes:
    """Bytes read so far; all are sums, so those of several ranks can be added.

    Attributes:
        requests: to object storage, by kind.
        storage: from shards as stored: members with the gaps between them, footers and column chunks of Parquet files,
            whole compressed tars, headers when a shard is checked.
        cache: from decompressed copies in the cache folder, and copies of a node, on this machine.
        used: sizes of the requested members, as in the index; decompressed for a compressed shard or column.
    """

    def __init__(self) -> None:
        self.storage = ByteCount()
        self.cache = ByteCount()
        self.used = ByteCount()
        self.requests = RequestCounts()

    def as_dict(self) -> dict[str, Any]:
        """Return the sums; `requests` by kind only if there were any."""
        sums: dict[str, Any] = {
            "storage_bytes": self.storage.value,
            "cache_bytes": self.cache.value,
            "used_bytes": self.used.value,
        }
        requests = self.requests.as_dict()
        return sums | ({"requests": requests} if requests else {})


class CountedFile:
    """A storage with counted reads."""

    def __init__(self, file: Storage, count: ByteCount) -> None:
        self.url = file.url
        self.size = file.size
        self.version = file.version
        self._file = file
        self._count = count

    @property
    def changed_ns(self) -> int:
        return self._file.changed_ns

    def read(self, offset: int, size: int) -> bytes:
        data = self._file.read(offset, size)
        self._count.add(len(data))
        return data

    def read_into(self, offset: int, buffer: memoryview) -> int:
        got = self._file.read_into(offset, buffer)
        self._count.add(got)
        return got

    def expect(self, extents: Sequence[tuple[int, int]]) -> object:
        return self._file.expect(extents)

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def close(self) -> None:
        self._file.close()

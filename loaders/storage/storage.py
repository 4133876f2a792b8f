"""Where shard bytes come from: positional reads, safe from many threads. Remote storage takes the same seam."""

from __future__ import annotations

from typing import Protocol


class Storage(Protocol):
    """Bytes that can be read at any position by many threads at once.

    What cannot be read now is a StorageError, after some tries; no reader of data takes it for bad data.

    Attributes:
        url: the name to show in errors.
        size: bytes in it.
        version: changes when the content does: mtime in ns here, an etag elsewhere.
    """

    @property
    def url(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def version(self) -> str: ...

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer only where the file ends."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; returns the bytes written, fewer only where the file ends."""
        ...

    def check_unchanged(self) -> None:
        """Raise StaleIndexError if the content may have changed since it was opened.

        What was read before the call is then not known to be what was indexed; to be called after reading.
        """
        ...

    def close(self) -> None:
        """Give the resources back, once reads under way have ended."""
        ...

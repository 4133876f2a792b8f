"""The source of shard bytes: positional reads, safe from many threads. Remote storage can use the same interface."""

from __future__ import annotations

from typing import Protocol


class Storage(Protocol):
    """Bytes that many threads can read at any position at the same time.

    A failed read raises StorageError after some attempts; readers never treat it as bad data.

    Attributes:
        url: the name in errors.
        size: bytes in it.
        version: changes with the content: for files the mtime in ns; a remote storage may use an etag.
    """

    @property
    def url(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def version(self) -> str: ...

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes from `offset`; fewer only at the end of the file."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`. Return the number of bytes read, fewer only at the end of the file."""
        ...

    def check_unchanged(self) -> None:
        """Raise StaleIndexError if the content may have changed since it was opened.

        Call it after reading: bytes read before may then differ from the indexed ones.
        """
        ...

    def close(self) -> None:
        """Release the resources after running reads have finished."""
        ...

"""Where shards come from: a file system that names and lists them, and open files with positional reads.

Size, version and name of everything that is kept in the cache come from here. Files of this machine are in `local`,
objects of storage in `remote`, and `remote.files` chooses by the URL.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol


class Storage(Protocol):
    """Bytes that many threads can read at any position at the same time.

    A failed read raises StorageError after some attempts; readers never treat it as bad data.

    Attributes:
        url: the name in errors.
        size: bytes in it.
        version: changes with the content: for files the mtime in ns; a remote storage may use an etag.
        changed_ns: time of the last change, also of one that keeps size and version, in ns; for files the ctime; 0 if
            it is not known.
    """

    @property
    def url(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def version(self) -> str: ...
    @property
    def changed_ns(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes from `offset`; fewer only at the end of the file."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`. Return the number of bytes read, fewer only at the end of the file."""
        ...

    def expect(self, extents: Sequence[tuple[int, int]]) -> object:
        """Begin to read ranges (offset, size) that are read soon, if that saves time. Keep the result until they were
        read.
        """
        ...

    def check_unchanged(self) -> None:
        """Raise StaleIndexError if the content may have changed since it was opened.

        Call it after reading: bytes read before may then differ from the indexed ones.
        """
        ...

    def close(self) -> None:
        """Release the resources after running reads have finished."""
        ...


class FileVersion(NamedTuple):
    """The size and version of a file, without opening it: as `Storage.size` and `Storage.version`."""

    size: int
    version: str


class FileSystem(Protocol):
    """Names, versions and listings of files. Methods are safe from many threads.

    A failed call raises StorageError after some attempts.
    """

    def identity(self, path: str) -> str:
        """Return the name under which what is kept of a file is stored: for local files the absolute path."""
        ...

    def version(self, path: str, *, retries: bool = True) -> FileVersion | None:
        """Return the version of a file, or of all files below a folder; None if it does not exist.

        Args:
            retries: whether to try again after an error.
        """
        ...

    def is_folder(self, path: str) -> bool:
        """Return whether a path is a folder."""
        ...

    def open(self, path: str) -> Storage:
        """Open a file. Raises StorageError, and ShardError if it is not a regular file."""
        ...

    def file_number(self, path: str) -> Hashable | None:
        """Return a number that is equal for two paths of one file or folder, and seldom for two; None for no file."""
        ...

    def why_same(self, path: str, other: str) -> str | None:
        """Return why two paths with one `file_number` are the same file, in words; None if they are not."""
        ...

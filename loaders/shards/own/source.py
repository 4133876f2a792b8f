"""The source of a shard, as a container of the user's gets it: its bytes, or the files below its folder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import BinaryIO

from orchdata.loaders.errors import ShardError
from orchdata.loaders.storage.content_digest import ContentDigest
from orchdata.loaders.storage.counted import CountedFile, ReadBytes
from orchdata.loaders.storage.local import LocalFolder
from orchdata.loaders.storage.remote.file import RemoteFile
from orchdata.loaders.storage.storage import Storage

_BUFFER_BYTES = 1 << 16


class ShardSource:
    """A file, or a folder of files, from which a shard is read. Safe from many threads.

    Attributes:
        url: path of the file or folder.
        size: its bytes; for a folder, of all files below it.
        version: changes with its content.
    """

    def __init__(self, storage: Storage | LocalFolder, reads: ReadBytes | None = None) -> None:
        self.url = storage.url
        self.size = storage.size
        self.version = storage.version
        self._folder = storage if isinstance(storage, LocalFolder) else None
        self._reads = reads
        is_counted = reads is None or self._folder is not None or isinstance(storage, CountedFile | RemoteFile)
        counted = storage if is_counted or reads is None else CountedFile(storage, reads.storage)
        self._storage: Storage = counted

    @property
    def is_folder(self) -> bool:
        return self._folder is not None

    @property
    def changed_ns(self) -> int:
        return self._storage.changed_ns

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer only at the end of the file."""
        return self._storage.read(offset, size)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`. Return the number of bytes read, fewer only at the end of the file."""
        return self._storage.read_into(offset, buffer)

    def file(self) -> BinaryIO:
        """Return a new file object for reading, as `zipfile`, `numpy.load` and `h5py` take it.

        It has a position, so one file object is not for several threads at the same time.
        """
        return io.BufferedReader(_RawFile(self), _BUFFER_BYTES)

    def names(self) -> list[str]:
        """Return the names of all files below a folder, relative to it and sorted. Hidden files are left out."""
        return self._as_folder().names()

    def open(self, name: str) -> ShardSource:
        """Open a file below a folder by its name; close it after use.

        Raises FileNotFoundError, StorageError, or StaleIndexError if it changed after the folder was opened.
        """
        return ShardSource(self._as_folder().open(name), self._reads)

    def read_file(self, name: str) -> bytes:
        """Return the content of a file below a folder. Raises as `open`."""
        source = self.open(name)
        try:
            return source.read(0, source.size)
        finally:
            source.close()

    def checksum(self) -> str:
        """Return the checksum of its whole content."""
        if self._folder is None:
            return ContentDigest(self._storage).hexdigest()
        return self._folder.checksum()

    def expect(self, extents: Sequence[tuple[int, int]]) -> object:
        """Begin to read ranges (offset, size) that are read soon. Keep the result until they were read."""
        return self._storage.expect(extents)

    def check_unchanged(self) -> None:
        """Raise StaleIndexError if the content may have changed since it was opened."""
        self._storage.check_unchanged()

    def close(self) -> None:
        """Release the resources after running reads have finished."""
        self._storage.close()

    def _as_folder(self) -> LocalFolder:
        if self._folder is None:
            raise ShardError(self.url, "is a file: only a folder has names of files")
        return self._folder


class _RawFile(io.RawIOBase):
    """A source as a file with a position."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self._at = 0
        self.name = source.url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        got = self._source.read_into(self._at, memoryview(buffer).cast("B"))
        self._at += got
        return got

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        if start + offset < 0:
            raise ValueError(f"position {start + offset} is before the start of {self._source.url}")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

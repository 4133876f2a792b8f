"""Where shard bytes come from: positional reads, safe from many threads. Local files; remote storage takes the seam."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from pathlib import Path
from typing import Protocol

from orchdata.loaders.errors import ShardError


class Storage(Protocol):
    """Bytes that can be read at any position by many threads at once.

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

    def close(self) -> None:
        """Give the resources back, once reads under way have ended."""
        ...


class LocalFile:
    """A local file. No mmap: a file truncated under a mapping kills the process (SIGBUS).

    Reads under way in other threads keep the descriptor open, so `close` can never let them read a file that got its
    number next. Without `close` the descriptor goes with the object.
    """

    def __init__(self, path: str | Path, *, url: str | None = None) -> None:
        self.url = os.fspath(path) if url is None else url
        try:
            # Not blocking: the open of a named pipe would wait for its writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ShardError(self.url, f"cannot be opened: {error.strerror}") from error
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self._finalizer()
            raise ShardError(self.url, "cannot be opened: not a regular file")
        self.size = status.st_size
        self.version = str(status.st_mtime_ns)
        self._lock = threading.Lock()
        self._readers = 0
        self._closing = False

    def read(self, offset: int, size: int) -> bytes:
        fd = self._enter()
        try:
            data = os.pread(fd, size, offset)
            if len(data) == size or not data:
                return data
            pieces = [data]  # one pread gives at most 2 GiB, and may be interrupted
            got = len(data)
            while got < size and (data := os.pread(fd, size - got, offset + got)):
                pieces.append(data)
                got += len(data)
            return b"".join(pieces)
        except OSError as error:
            raise ShardError(self.url, f"cannot be read at {offset}: {error.strerror}") from error
        finally:
            self._leave()

    def read_into(self, offset: int, buffer: memoryview) -> int:
        fd = self._enter()
        try:
            got = os.preadv(fd, [buffer], offset)
            while 0 < got < len(buffer):
                more = os.preadv(fd, [buffer[got:]], offset + got)
                if more == 0:
                    break
                got += more
            return got
        except OSError as error:
            raise ShardError(self.url, f"cannot be read at {offset}: {error.strerror}") from error
        finally:
            self._leave()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            if self._readers == 0:
                self._finalizer()

    def _enter(self) -> int:
        with self._lock:
            if self._closing:
                raise ValueError(f"{self.url}: read after close")
            self._readers += 1
            return self._fd

    def _leave(self) -> None:
        with self._lock:
            self._readers -= 1
            if self._closing and self._readers == 0:
                self._finalizer()

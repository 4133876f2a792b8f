"""Local files as storage."""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from orchdata.loaders.errors import ShardError, StaleIndexError
from orchdata.loaders.storage.retries import retry, tried

T = TypeVar("T")


class LocalFile:
    """A local file. It is not mapped: truncating a mapped file kills the process (SIGBUS).

    Running reads of other threads keep the descriptor open, so that after `close` they never read another file that got
    the same descriptor number. Without `close` the descriptor is closed with the object.

    Args:
        path: of the file.
        url: its name in errors; default: the path.
        follow: whether the path may be a link.

    Raises:
        StorageError: it cannot be opened now.
        ShardError: it is not a regular file.
    """

    def __init__(self, path: str | Path, *, url: str | None = None, follow: bool = True) -> None:
        self.url = os.fspath(path) if url is None else url
        self._path = path
        self._follow = follow
        self._fd = tried(self.url, "cannot be opened", self._open)
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        status = tried(self.url, "cannot be opened", lambda: os.fstat(self._fd))
        if not stat.S_ISREG(status.st_mode):
            self._finalizer()
            raise ShardError(self.url, "cannot be opened: not a regular file")
        self.size = status.st_size
        self.version = str(status.st_mtime_ns)
        self._opened = status
        self._lock = threading.Lock()
        self._readers = 0
        self._closing = False

    def read(self, offset: int, size: int) -> bytes:
        fd = self._enter()
        try:
            try:
                return read_at(fd, offset, size)
            except OSError as error:
                return self._retry(offset, lambda: read_at(fd, offset, size), error)
        finally:
            self._leave()

    def read_into(self, offset: int, buffer: memoryview) -> int:
        fd = self._enter()
        try:
            try:
                return read_into_at(fd, offset, buffer)
            except OSError as error:
                return self._retry(offset, lambda: read_into_at(fd, offset, buffer), error)
        finally:
            self._leave()

    def check_unchanged(self) -> None:
        fd = self._enter()
        try:
            now = os.fstat(fd)
        except OSError as error:
            now = retry(self.url, "cannot be looked at", lambda: os.fstat(fd), error)
        finally:
            self._leave()
        then = self._opened
        same = now.st_size == then.st_size and now.st_mtime_ns == then.st_mtime_ns
        # Removing a file changes its ctime too, but its content stays readable through open descriptors.
        if not same or (now.st_ctime_ns != then.st_ctime_ns and now.st_nlink):
            raise StaleIndexError(
                self.url,
                f"was changed while it was open (size {then.st_size} to {now.st_size}, modification time "
                f"{_seconds(then)} to {_seconds(now)}): run `orchdata index` again, or, if it is still the same file, "
                "restart from the last checkpoint",
            )

    def close(self) -> None:
        with self._lock:
            self._closing = True
            if self._readers == 0:
                self._finalizer()

    def _open(self) -> int:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        links = 0 if self._follow else os.O_NOFOLLOW
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | links)

    def _retry(self, offset: int, read: Callable[[], T], error: OSError) -> T:
        def reopened() -> T:
            try:
                return read()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
            self._reopen()
            return read()

        return retry(self.url, f"cannot be read at {offset}", reopened, error)

    def _reopen(self) -> None:
        """Open the file again under the same descriptor, after a network file system dropped its handle."""
        fresh = self._open()
        try:
            status = os.fstat(fresh)
            if (status.st_size, status.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
                raise StaleIndexError(self.url, "was replaced while it was open: run `orchdata index` again")
            os.dup2(fresh, self._fd, inheritable=False)
            self._opened = status
        finally:
            os.close(fresh)

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


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Read bytes of a file, fewer at its end. Raises OSError."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    pieces = [data]  # one pread returns at most 2 GiB, and may be interrupted
    got = len(data)
    while got < size and (data := os.pread(fd, size - got, offset + got)):
        pieces.append(data)
        got += len(data)
    return b"".join(pieces)


def read_into_at(fd: int, offset: int, buffer: memoryview) -> int:
    """Fill a buffer from a file. Return the number of bytes read, fewer at the end of the file. Raises OSError."""
    got = os.preadv(fd, [buffer], offset)
    while 0 < got < len(buffer):
        more = os.preadv(fd, [buffer[got:]], offset + got)
        if more == 0:
            break
        got += more
    return got


def _seconds(status: os.stat_result) -> str:
    return f"{max(status.st_mtime_ns, status.st_ctime_ns) / 1e9:.3f}"

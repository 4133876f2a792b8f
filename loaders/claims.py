"""Divides work among processes: locks on bytes of one file, which end with their process.

Each name is one byte of the file. The file stays empty, so any number of names takes no space.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

from orchdata.loaders.storage.atomic import open_lock

_POLL_SECONDS = 0.02
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux, with a pid of 0, as F_OFD_SETLK requires
_BUSY = (errno.EACCES, errno.EAGAIN)


class Claims:
    """The claims of one piece of work, at a path; its threads never claim the same name. Where the file system has no
    locks, or the file cannot be opened, every claim succeeds: work may then be done twice. Raises StorageError.
    """

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = open_lock(path)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it is closed even if this fails
                os.close(file)

    @contextlib.contextmanager
    def claim(self, name: str, go_on: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Yield whether the name is ours for the block; while another process has it, `go_on` says whether to keep
        waiting.
        """
        offset = int.from_bytes(blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big") >> 2
        ours = self._take(offset)
        while not ours and go_on():
            time.sleep(_POLL_SECONDS)
            ours = self._take(offset)
        try:
            yield ours
        finally:
            if ours:
                with contextlib.suppress(OSError):  # it ends with the file
                    self._set(fcntl.F_UNLCK, offset)

    def _take(self, offset: int) -> bool:
        try:
            self._set(fcntl.F_WRLCK, offset)
        except OSError as error:
            return error.errno not in _BUSY
        return True

    def _set(self, kind: int, offset: int) -> None:
        if self._file is not None:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))

"""Who of several processes does what: locks on bytes of one file, which end with their process.

Each name is one byte of the file, which stays empty, so that nothing is left of however many names.
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

from orchdata.loaders.storage.shared.files import open_lock

_POLL_SECONDS = 0.02
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux, with a pid of 0, as F_OFD_SETLK wants it
_BUSY = (errno.EACCES, errno.EAGAIN)


class Claims:
    """The claims of one piece of work, whose threads never claim the same name. Where the file system has no locks, or
    the file is not to be had, nothing is ever another's: work may then be done twice.

    Args:
        path: of the file; made where it is missing. Raises StorageError where something else has its name.
    """

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = open_lock(path)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it is closed whatever is said of it
                os.close(file)

    @contextlib.contextmanager
    def claim(self, name: str, go_on: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Whether the name is ours, for as long as the block runs.

        Args:
            go_on: asked while it is another's: whether to wait for him.
        """
        place = int.from_bytes(blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big") >> 2
        ours = self._take(place)
        while not ours and go_on():
            time.sleep(_POLL_SECONDS)
            ours = self._take(place)
        try:
            yield ours
        finally:
            if ours:
                with contextlib.suppress(OSError):  # it ends with the file
                    self._set(fcntl.F_UNLCK, place)

    def _take(self, place: int) -> bool:
        try:
            self._set(fcntl.F_WRLCK, place)
        except OSError as error:
            return error.errno not in _BUSY
        return True

    def _set(self, kind: int, place: int) -> None:
        if self._file is not None:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))

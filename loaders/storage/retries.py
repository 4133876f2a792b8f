"""Trouble that may pass: a call that the system refused is made again, a shard that could not be read is read again.

A call is made again after each of PAUSES_SECONDS. A build bears trouble for BUILD_SECONDS in all. What lasts longer is
a StorageError: it is never taken for bad data.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from orchdata.loaders.errors import OF_THE_FILE, StorageError

T = TypeVar("T")

PAUSES_SECONDS: Final = (0.05, 0.2, 0.8)
BUILD_SECONDS: Final = 60.0
_LONGEST_PAUSE_SECONDS: Final = 8.0
# What minutes of waiting do not mend either: the cache folder is taken, read-only or too small, or work takes too long.
_LASTING: Final = OF_THE_FILE | {errno.EEXIST, errno.EROFS, errno.EFBIG, errno.ETIME}


def tried(url: str, doing: str, call: Callable[[], T]) -> T:
    """What `call` returns, called again after each of PAUSES_SECONDS while the system refuses it (OSError).

    Args:
        url, doing: of the error: which file, and what could not be done ("cannot be opened").

    Raises:
        StorageError: it was refused every time, or for a reason that does not pass.
    """
    try:
        return call()
    except OSError as error:
        return again(url, doing, call, error)


def again(url: str, doing: str, call: Callable[[], T], error: OSError) -> T:
    """`tried`, where the first call was refused with `error`."""
    for pause in PAUSES_SECONDS:
        if error.errno in OF_THE_FILE:
            break
        time.sleep(pause)
        try:
            return call()
        except OSError as refused:
            error = refused
    raise storage_error(url, doing, error) from error


def storage_error(url: str, doing: str, error: OSError) -> StorageError:
    """The error with the file it is about: a write to a full disk does not say, and a temporary file means nothing."""
    return StorageError(url, f"{doing}: {error.strerror or error}", error.errno)


class Patience:
    """How long a build bears trouble: the seconds in which at least one of its shards waits to be tried again.

    Args:
        seconds: in all, over the whole build.
        on_trouble: called with the first error, before the first wait.
    """

    def __init__(self, seconds: float, on_trouble: Callable[[Exception], None]) -> None:
        if not seconds >= 0:
            raise ValueError(f"retry_seconds must be at least 0, got {seconds}")
        self._left = seconds
        self._on_trouble = on_trouble
        self._told = False
        self._waiting = 0
        self._since = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def keep_trying(self, call: Callable[[], T], *errors: type[Exception], failed: Exception | None = None) -> T:
        """What `call` returns, called again while it raises one of `errors` and patience lasts.

        `failed` is what it raised already, if it was called before.
        """
        pause = 0.25
        while True:
            if failed is not None:
                if not self._wait(failed, pause):
                    raise failed
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            try:
                return call()
            except errors as error:
                failed = error

    def end(self) -> None:
        """Let nobody wait any longer."""
        self._over.set()

    def _wait(self, error: Exception, pause: float) -> bool:
        """Pause; False where there is no patience left, or the error is one that lasts."""
        if isinstance(error, StorageError) and error.errno in _LASTING:
            return False
        with self._lock:
            if self._waiting == 0:
                self._since = time.monotonic()
            left = self._left - (time.monotonic() - self._since)
            if left <= 0 or self._over.is_set():
                return False
            told, self._told = self._told, True
            self._waiting += 1
        try:
            if not told:
                self._on_trouble(error)
            return not self._over.wait(min(pause, left))
        finally:
            with self._lock:
                self._waiting -= 1
                if self._waiting == 0:
                    self._left -= time.monotonic() - self._since

"""Retries after temporary errors: of a system call that failed, and of a shard that could not be read.

A call is repeated after each of PAUSES_SECONDS. A build waits up to BUILD_SECONDS in total, and some seconds for a file
that this user may not read. An error that lasts longer is a StorageError, and is never taken for bad data.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from orchdata.loaders.errors import OF_THE_FILE, StorageError
from orchdata.loaders.storage.remote.urls import is_remote

T = TypeVar("T")

PAUSES_SECONDS: Final = (0.05, 0.2, 0.8)
BUILD_SECONDS: Final = 60.0
_LONGEST_PAUSE_SECONDS: Final = 8.0
_REFUSED_PAUSE_SECONDS: Final = 1.0
"""The last pause after a file that may not be read: on a network file system, a ticket may be renewed in seconds."""
_MAY_NOT: Final = (
    " (this user may not: change its permissions, or, if it is in the cache folder, set ORCHDATA_CACHE to a folder of "
    "this user's)"
)
# Waiting does not help against these: the cache folder's name is taken, it is read-only or too small, or slow work.
_LASTING: Final = OF_THE_FILE | {errno.EEXIST, errno.EROFS, errno.EFBIG, errno.EILSEQ, errno.ETIME}


def tried(url: str, doing: str, call: Callable[[], T]) -> T:
    """Return `call()`; after an OSError call it again after each of PAUSES_SECONDS. Raises StorageError (of `url`, with
    the failed action) if it failed every time, or for a permanent reason.
    """
    try:
        return call()
    except OSError as error:
        return retry(url, doing, call, error)


def retry(url: str, doing: str, call: Callable[[], T], error: OSError) -> T:
    """Continue as `tried` does after the first call failed with `error`."""
    for pause in PAUSES_SECONDS:
        if error.errno in OF_THE_FILE:
            break
        time.sleep(pause)
        try:
            return call()
        except OSError as latest:
            error = latest
    raise storage_error(url, doing, error) from error


def storage_error(url: str, doing: str, error: OSError) -> StorageError:
    """Build the error for a file: a write to a full disk does not name it, or names a temporary file."""
    hint = _MAY_NOT if error.errno in (errno.EACCES, errno.EPERM) else ""
    return StorageError(url, f"{doing}: {error.strerror or error}{hint}", error.errno)


class Patience:
    """The time that a build may wait, in total: the seconds in which at least one of its shards waits for a retry.
    `on_trouble` gets the first error, before the first wait.
    """

    def __init__(self, seconds: float, on_trouble: Callable[[Exception], None]) -> None:
        if not seconds >= 0:
            raise ValueError(f"retry_seconds must be at least 0, got {seconds}")
        self._left = seconds
        self._on_trouble = on_trouble
        self._is_reported = False
        self._waiting = 0
        self._since = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def keep_trying(self, call: Callable[[], T], *errors: type[Exception], failed: Exception | None = None) -> T:
        """Return `call()`; call it again while it raises one of `errors` and time is left; `failed` is the error of an
        earlier call.
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
        """End all waits."""
        self._over.set()

    def _wait(self, error: Exception, pause: float) -> bool:
        """Pause. Return False if no time is left, or the error is permanent, as permissions are after some seconds."""
        if isinstance(error, StorageError) and (error.errno in _LASTING or (error.is_refused and is_remote(error.url))):
            return False  # a server that refuses has been asked twice, with credentials that are fresh
        if isinstance(error, StorageError) and error.is_refused and pause > _REFUSED_PAUSE_SECONDS:
            return False
        with self._lock:
            if self._waiting == 0:
                self._since = time.monotonic()
            left = self._left - (time.monotonic() - self._since)
            if left <= 0 or self._over.is_set():
                return False
            is_reported, self._is_reported = self._is_reported, True
            self._waiting += 1
        try:
            if not is_reported:
                self._on_trouble(error)
            return not self._over.wait(min(pause, left))
        finally:
            with self._lock:
                self._waiting -= 1
                if self._waiting == 0:
                    self._left -= time.monotonic() - self._since

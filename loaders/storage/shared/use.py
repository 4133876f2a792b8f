"""Who uses a kept file, and when it was last used: so that pruning removes nothing that a process needs.

A process that keeps a file open, or that others will open later by its path, holds a shared lock (flock) on it. The
kernel releases the lock when the process ends, so nothing is left of a killed one. Before a file is removed, it is
locked alone, which fails while anyone holds it.

The last use is a time of change: of the file itself if it is only read and belongs to this user, else of an empty
mark next to it, which any user who can write to the folder may replace. Times of access are of no use: many file
systems do not record them, and each backup changes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from orchdata.loaders.storage.atomic import write_once
from orchdata.loaders.storage.shared.files import status_of

USED_SUFFIX: Final = ".used"
MARK_SECONDS: Final = 3600.0
"""A use is recorded if the last one was recorded so long ago."""
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF})
"""Errors of file systems that have no such locks, or, over a network, none on files that cannot be written."""
_TRIES: Final = 100
_POLL_SECONDS: Final = 0.02
_refreshed: dict[str, float] = {}


class NoLocks(OSError):
    """The file system has no locks."""


def hold(fd: int, path: str | Path) -> None:
    """Hold an open file until its descriptor, and all copies of it, are closed; and record its use.

    Where the file system has no locks, it is not held.

    Raises:
        FileNotFoundError: it was removed since it was opened.
        OSError: it cannot be looked at now.
    """
    lock_shared(fd)
    if status_of(path) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    mark_used(path)


def lock_shared(fd: int) -> None:
    """Lock an open file, together with others, until its descriptor and all copies of it are closed; best effort."""
    for _ in range(_TRIES):  # whoever removes a file has it locked for a moment
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
        except OSError:
            break


def lock_alone(fd: int) -> bool:
    """Lock an open file until its descriptor is closed. Return False if a process holds it.

    Raises NoLocks, or OSError if that cannot be known now.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocks(error.errno, error.strerror) from error
        raise
    return True


def last_used(path: str | Path, status: os.stat_result) -> float:
    """Return when a file with this status was last used, as it was recorded. Raises OSError."""
    mark = status_of(mark_of(path))
    return status.st_mtime if mark is None else max(status.st_mtime, mark.st_mtime)


def mark_used(path: str | Path) -> None:
    """Record the use of a file that must not be touched, by a mark next to it; best effort."""
    with suppress(OSError):
        status = status_of(path)
        if status is not None and time.time() - last_used(path, status) > MARK_SECONDS:
            write_once(mark_of(path), b"")


def still_used(path: str | Path) -> None:
    """Record that a file is still used, as `mark_used`; often called, so it looks at the file once in a while."""
    now = time.monotonic()
    if now - _refreshed.setdefault(str(path), now) > MARK_SECONDS:
        _refreshed[str(path)] = now
        mark_used(path)


def touch(fd: int, status: os.stat_result) -> None:
    """Record the use of an open file with this status, if it is this user's; best effort."""
    is_own = status.st_uid == os.geteuid() and status.st_nlink == 1
    if is_own and time.time() - status.st_mtime > MARK_SECONDS:
        with suppress(OSError):
            os.utime(fd)


def mark_of(path: str | Path) -> Path:
    """Return the path of the mark next to a file."""
    return Path(path).with_suffix(USED_SUFFIX)

"""When a kept file was last used, so that pruning removes what was not used for longest.

The last use is a time of change: of the file itself if it is only read and belongs to this user, else of an empty
mark next to it: a change of the time of a large file would tell its readers that it was changed. Times of access are
of no use: many file systems do not record them, and each backup changes them.
"""

from __future__ import annotations

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
STILL_SECONDS: Final = 24 * 3600.0
_refreshed: dict[str, float] = {}


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
    """Record that a running job uses a file, once a day; best effort."""
    now = time.monotonic()
    if now - _refreshed.setdefault(str(path), now) > STILL_SECONDS:
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

"""Builds that are under way: a locked file for each, as old as the build.

What a build has used since it began is not removed by others: it reads its costs again when it merges them. The file
is removed at the end of the build. That of a killed build is not locked, and is removed by the next prune.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from orchdata.loaders.errors import StorageError
from orchdata.loaders.kept.kinds import LOCKS
from orchdata.loaders.storage.atomic import remove
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.shared.files import names_in, open_lock, opened_to_lock, status_of
from orchdata.loaders.storage.shared.use import NoLocks, lock_alone, lock_shared

_PREFIX: Final = "build-"
_TRIES: Final = 3
_LONGEST_SECONDS: Final = 7 * 24 * 3600.0
"""Where there are no locks, a build is taken to be under way for so long."""


class Build(NamedTuple):
    """A build that is under way: its file, and when it began, in seconds as of `time.time`."""

    path: Path
    began: float


@contextmanager
def building(cache: CacheFolder) -> Iterator[Build]:
    """Show other processes, for the duration of the block, that what this build uses must stay; best effort."""
    path = cache.root / LOCKS / f"{_PREFIX}{secrets.token_hex(8)}"
    fd, began = _locked(cache, path)
    try:
        yield Build(path, began)
    finally:
        if fd is not None:
            remove(path)
            with suppress(OSError):
                os.close(fd)


def _locked(cache: CacheFolder, path: Path) -> tuple[int | None, float]:
    """Create a locked file; return its descriptor, None if that is not possible now, and when it was created."""
    for _ in range(_TRIES):
        fd = None
        with suppress(OSError, StorageError):
            cache.make(LOCKS)
            fd = open_lock(path)
            lock_shared(fd)
            if (status := status_of(path)) is not None:  # no prune has removed it before it was locked
                return fd, status.st_mtime
        if fd is not None:
            with suppress(OSError):
                os.close(fd)
    return None, time.time()


def builds(cache: CacheFolder, *, cleans: bool = False) -> list[Build]:
    """Return the builds that are under way. Raises OSError.

    Args:
        cleans: whether to remove what killed builds have left.
    """
    begun = []
    for name in names_in(cache.root / LOCKS):
        path = cache.root / LOCKS / name
        if not name.startswith(_PREFIX) or (status := status_of(path)) is None:
            continue
        with suppress(FileNotFoundError), opened_to_lock(path) as fd:
            try:
                is_alive = not lock_alone(fd)
            except NoLocks:
                is_alive = time.time() - status.st_mtime < _LONGEST_SECONDS
            if is_alive:
                begun.append(Build(path, status.st_mtime))
            elif cleans:
                remove(path)
    return begun

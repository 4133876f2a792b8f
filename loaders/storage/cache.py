"""The cache folder: decompressed shards within a size cap, and files of other kinds. Safe for concurrent processes.

Every file appears by renaming, so a reader sees a whole file or none. Processes that write the same entry wait for one
another on a file lock, which the kernel releases when a process ends: no old lock can block a later run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from orchdata.loaders.storage.node.entries import (
    TOUCH_SECONDS,
    complete,
    entries,
    is_whole,
    mark_used,
    new_partial,
    remove_entry,
    remove_partials,
)
from orchdata.loaders.storage.opening import open_lock
from orchdata.loaders.storage.retries import tried

CACHE_VARIABLE = "ORCHDATA_CACHE"
_ENTRY_SUFFIX = ".tar"


class CacheFolder:
    """A folder for files that can be created again.

    Args:
        root: the folder; default: $ORCHDATA_CACHE, else ~/.cache/orchdata. It is created at the first write, for this
            user alone. A folder that exists keeps its mode: so the users of one group share it, by their umask.
        max_bytes: cap on all decompressed shards in it together. The least recently opened are removed first.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int = 256 << 30,
    ) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self.root = Path(root or os.environ.get(CACHE_VARIABLE) or "~/.cache/orchdata")
        try:
            self.root = self.root.expanduser().absolute()
        except RuntimeError as error:  # no $HOME, and the user has no entry in the system's list
            raise OSError(f"no cache folder: {self.root} needs a home directory; set {CACHE_VARIABLE}") from error
        self.max_bytes = max_bytes

    def make(self, kind: str) -> Path:
        """Create the folder for files of one kind, and return it.

        Raises StorageError if it cannot be created.
        """
        folder = self.make_root() / kind
        tried(str(folder), "cannot be created", lambda: folder.mkdir(exist_ok=True))
        return folder

    def make_root(self) -> Path:
        """Create the folder itself, and return it. Raises as `make`."""
        if not tried(str(self.root), "cannot be looked at", self.root.is_dir):
            make = partial(self.root.mkdir, 0o700, parents=True, exist_ok=True)
            tried(str(self.root), "cannot be created", make)
        return self.root

    def file(self, kind: str, name: str) -> Path:
        """Return the path of a file of one kind, and create its folder. Raises as `make`."""
        return self.make(kind) / name

    def entry(
        self,
        name: str,
        make: Callable[[IO[bytes], int], None],
        *,
        changed_ns: int = 0,
    ) -> Path:
        """Return the path of a decompressed shard; `make(file, limit)` writes it if it is missing.

        Another process may evict the entry before it is opened: then call again. An existing entry is only read, so a
        complete cache may be read-only, and belong to another user.

        Errors of `make` are passed on, and nothing stays in the cache; after a failed system call it is called again
        from the start. `limit` is the cap on the size.
        An entry that is older than `changed_ns`, as `Storage.changed_ns`, is made again.

        Raises StorageError if the cache cannot be written.
        """
        path = self.root / "shards" / (name + _ENTRY_SUFFIX)
        if not tried(str(path), "cannot be read", lambda: is_whole(path, changed_ns)):
            self.make("shards")
            tried(str(path), "cannot be written", lambda: self._make(name, path, make, changed_ns))
        mark_used(path)
        return path

    def remove_entry(self, name: str) -> None:
        """Remove a decompressed shard; best effort. Processes that have it open can still read it."""
        remove_entry(self.root / "shards" / (name + _ENTRY_SUFFIX))

    def _make(self, name: str, path: Path, make: Callable[[IO[bytes], int], None], changed_ns: int) -> None:
        with self.lock(name):
            if is_whole(path, changed_ns):  # written while this process waited
                return
            # Younger ones may be between creation and lock.
            remove_partials(path.parent, TOUCH_SECONDS)
            descriptor, partial = new_partial(path)
            complete(
                path,
                descriptor,
                partial,
                lambda file: make(file, self.max_bytes),
                changed_ns=changed_ns,
                make_room=lambda needed: self._evict(path.parent, needed),
            )

    @contextlib.contextmanager
    def lock(self, name: str, *, waits: bool = True) -> Iterator[bool]:
        """Hold a lock of this folder; without waiting it may be another's: yields whether it is held. Raises as `make`,
        and OSError.
        """
        descriptor = open_lock(self.file("locks", name))
        try:
            is_held = True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                is_held = False
            yield is_held
        finally:
            os.close(descriptor)

    def _evict(self, folder: Path, needed: int) -> None:
        """Make room for `needed` bytes below the cap; files of other users that cannot be removed stay."""
        there = entries(folder, _ENTRY_SUFFIX)
        total = sum(entry.size for entry in there)
        for entry in there:
            if total + needed <= self.max_bytes:
                break
            if remove_entry(entry.path):
                total -= entry.size

"""The copies of shards that a node keeps: found by the readers of all its processes, added by one process at a time.

add --room below the cap, reserved under a lock--> partial file of the full size --fetched whole--> entry --> find
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Literal

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LocalFile
from orchdata.loaders.storage.node.cache import Cache
from orchdata.loaders.storage.node.entries import (
    Entry,
    complete,
    entries,
    is_whole,
    last_used,
    mark_used,
    new_partial,
    remove_entry,
    remove_partials,
)
from orchdata.loaders.storage.opening import names_in, opened, status_of
from orchdata.loaders.storage.remote.urls import identity
from orchdata.loaders.storage.storage import FileVersion

FOLDER: Final = "copies"
SUFFIX: Final = ".copy"
_NEXT_TO_IT_BYTES: Final = 1 << 10
"""Most bytes of what lies next to a copy: its checksum, a note that it was verified."""

Added = Literal["added", "there", "busy", "full", "too large"]
"""What became of a copy: another process is making it ("busy"), there is no room for it now below the cap ("full"), or
never ("too large")."""


class Copies:
    """Whole copies of shards in the folder of a `Cache`. Safe from many threads and processes.

    A copy is named by the identity of the URL, the size and the version of the object. An object without a version is
    not copied: nothing would tell the copy from its successor.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = CacheFolder(cache.path, max_bytes=cache.max_bytes)
        self._folder = self._cache.root / FOLDER
        self._paths: dict[tuple[str, FileVersion], Path] = {}
        self._verified: dict[Path, tuple[int, ...]] = {}
        self._refused: dict[Path, tuple[int, ...]] = {}
        self._sizes: dict[str, int] = {}
        self._oldest: list[Entry] = []

    @property
    def max_bytes(self) -> int:
        return self._cache.max_bytes

    def find(self, url: str, file: FileVersion) -> LocalFile | None:
        """Return the copy of an object, open; None if there is none that is whole. Never raises."""
        path = self._path(url, file)
        try:
            status = status_of(path)
            if status is None or not file.version or self._refused.get(path) == _mark(status):
                return None
            if self._verified.get(path) != _mark(status):
                if not is_whole(path):
                    self._remove_damaged(name_of(url, file), path)
                    self.refuse(url, file)
                    return None
                self._verified[path] = _mark(status)
            copy = LocalFile(path, url=url, follow=False)
        except (OSError, StorageError):
            return None
        if copy.size != file.size:
            copy.close()
            return None
        mark_used(path)
        return copy

    def refuse(self, url: str, file: FileVersion) -> None:
        """Do not use a copy in this process as long as it is the same file: it cannot be read."""
        path = self._path(url, file)
        with suppress(OSError):
            if (status := status_of(path)) is not None:
                self._refused[path] = _mark(status)

    def has(self, url: str, file: FileVersion) -> bool:
        """Return whether there is a whole copy. Raises OSError."""
        path = self._path(url, file)
        return os.path.exists(path) and is_whole(path)

    def add(self, url: str, file: FileVersion, make: Callable[[IO[bytes]], None], stay: Container[str] = ()) -> Added:
        """Make a copy of an object, if no other process is doing that.

        Args:
            make: writes its bytes, from start to end; called once its room is reserved. What it raises is passed on,
                and nothing of the copy stays.
            stay: names of copies that are not removed to make room, as of `name_of`.

        Raises:
            StorageError: the folder cannot be created.
            OSError: it cannot be written, or the disk is full.
        """
        name = name_of(url, file)
        path = self._path(url, file)
        needed = file.size + _NEXT_TO_IT_BYTES
        if needed > self.max_bytes:
            return "too large"
        self._cache.make_root()
        self._cache.make(FOLDER)
        with self._cache.lock(name, waits=False) as is_mine:
            if not is_mine:
                return "busy"
            if self.has(url, file):
                return "there"
            with self._cache.lock(FOLDER):
                if not self._make_room(needed, stay):
                    return "full"
                free = os.statvfs(self._folder)
                if free.f_bavail * free.f_frsize < file.size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
                remove_entry(path)  # a damaged one
                descriptor, partial = new_partial(path)
                with suppress(OSError):  # where files have no holes, it grows as it is written
                    os.ftruncate(descriptor, file.size)
            complete(path, descriptor, partial, make)
        return "added"

    def _path(self, url: str, file: FileVersion) -> Path:
        path = self._paths.get((url, file))
        if path is None:
            path = self._paths[url, file] = self._folder / (name_of(url, file) + SUFFIX)
        return path

    def _remove_damaged(self, name: str, path: Path) -> None:
        """Remove a copy that is not whole, unless another process does, or makes it again; best effort."""
        with suppress(OSError, StorageError), self._cache.lock(name, waits=False) as is_mine:
            if is_mine and not is_whole(path):
                remove_entry(path)

    def _make_room(self, needed: int, stay: Container[str]) -> bool:
        """Remove copies, the least recently used first, until so many bytes are free below the cap. Return whether they
        are. The lock of the folder is held: no other process makes room, or begins to write.
        """
        remove_partials(self._folder, 0)
        used, is_new = self._used(), False
        while used + needed > self.max_bytes:
            if not self._oldest:
                if is_new:
                    return False
                # Looking at all of them takes long where there are many: the list serves several times.
                self._oldest, is_new = entries(self._folder, SUFFIX, stay)[::-1], True
                continue
            entry = self._oldest.pop()
            if entry.path.name in self._sizes and entry.path.stem not in stay and _is_unused(entry):
                used -= entry.size if remove_entry(entry.path) else 0
        return True

    def _used(self) -> int:
        """Return the bytes of all files in the folder. A file keeps its size, so that each is looked at once."""
        sizes: dict[str, int] = {}
        for name in names_in(self._folder):
            size = self._sizes.get(name)
            if size is None:
                status = status_of(self._folder / name)
                size = 0 if status is None else status.st_size
            sizes[name] = size
        self._sizes = sizes
        return sum(sizes.values())


def name_of(url: str, file: FileVersion) -> str:
    """Return the name of the copy of an object."""
    words = "\0".join((identity(url), str(file.size), file.version))
    return hashlib.blake2b(words.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _is_unused(entry: Entry) -> bool:
    """Return whether no process reads a copy, or has used it since it was listed: its bytes would stay on the disk."""
    try:
        with opened(entry.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return last_used(entry.path, os.fstat(file)) <= entry.last_used
    except (BlockingIOError, FileNotFoundError):
        return False


def _mark(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

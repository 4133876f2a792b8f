"""Whole copies of shards of object storage that a node keeps, below a cap: found by the readers of all its processes,
added by one process at a time.

add --room below the cap, reserved under a lock--> partial file of the full size --fetched whole--> entry --> find
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import IO, Final, Literal

from orchdata.loaders.amounts import bytes_of
from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.atomic import names_in, opened, status_of
from orchdata.loaders.storage.cache import (
    CacheFolder,
    Entry,
    complete,
    copy_name,
    entries,
    is_whole,
    last_used,
    mark_used,
    new_partial,
    remove_entry,
    remove_partials,
)
from orchdata.loaders.storage.local import LocalFile
from orchdata.loaders.storage.remote.objects import Ahead, Objects, RemoteFile
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import Extent, FileVersion, ReadBytes


class CopiedFile(RemoteFile):
    """An object of storage, read from the node's copy as soon as that is whole, and from the store without one. A copy
    that is removed or changed is read no more.
    """

    def __init__(self, objects: Objects, url: str, file: FileVersion, reads: ReadBytes | None, copies: Copies) -> None:
        super().__init__(objects, url, file, reads)
        self._copies = copies
        self._copy: LocalFile | None = None  # closed with the last reference

    def read(self, offset: int, size: int) -> bytes:
        copy = self._found()
        if copy is not None:
            try:
                data = copy.read(offset, size)
                if len(data) == max(0, min(offset + size, self.size) - offset) and copy.is_as_opened():
                    if self._reads is not None:
                        self._reads.cache.add(len(data))
                    return data
            except (OSError, StorageError):
                self._copies.refuse(self.url, self._file)
            self._copy = None  # it is no longer what it was when it was opened
        return super().read(offset, size)

    def expect(self, extents: Sequence[Extent]) -> Ahead:
        return super().expect(extents if self._found() is None else ())

    def close(self) -> None:
        self._copy = None

    def _found(self) -> LocalFile | None:
        """Return the copy; one that has just been made too."""
        if (copy := self._copy) is None:
            copy = self._copy = self._copies.find(self.url, self._file)
        return copy


FOLDER: Final = "copies"
SUFFIX: Final = ".copy"
_NEXT_TO_IT_BYTES: Final = 1 << 10
"""Most bytes of what lies next to a copy: its checksum, a note that it was verified."""

Added = Literal["added", "there", "busy", "full", "too large"]
"""What became of a copy: another process is making it ("busy"), there is no room for it now below the cap ("full"), or
never ("too large")."""


class Copies:
    """Whole copies of shards in the folder of a `Cache`, named by URL, size and version of the object. One without a
    version is not copied: nothing would tell the copy from its successor. Safe from many threads and processes.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = CacheFolder(cache.path, max_bytes=cache.max_bytes)
        self._folder = self._cache.root / FOLDER
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
                    self._remove_damaged(copy_name(url, file), path)
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
        """Make a copy of an object, if no other process is doing that. `make` writes its bytes, from start to end, once
        its room is reserved; what it raises passes, and nothing stays. Copies with names in `stay` are not removed to
        make room. Raises StorageError: the folder cannot be created; OSError: it cannot be written, or the disk is
        full.
        """
        name = copy_name(url, file)
        path = self._path(url, file)
        needed = file.size + _NEXT_TO_IT_BYTES
        if self.has(url, file):
            return "there"
        if needed > self.max_bytes:
            return "too large"
        self._cache.make(FOLDER)
        with self._cache.lock(FOLDER, name, waits=False) as is_mine:
            if not is_mine:
                return "busy"
            if self.has(url, file):
                return "there"
            with self._cache.lock(FOLDER, ""):
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
        return self._folder / (copy_name(url, file) + SUFFIX)

    def _remove_damaged(self, name: str, path: Path) -> None:
        """Remove a copy that is not whole, unless another process does, or makes it again; best effort."""
        with suppress(OSError, StorageError), self._cache.lock(FOLDER, name, waits=False) as is_mine:
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


FOLDER_VARIABLE: Final = "ORCHDATA_SHARD_CACHE"
BYTES_VARIABLE: Final = "ORCHDATA_SHARD_CACHE_BYTES"


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder for whole copies of shards of object storage, as `DataLoader(cache=)` takes it: one on each node, shared
    by its ranks and workers.

    Copies are fetched in the background where a node has shards of its own: on a single node, and with
    `balance="grouped"` and `shuffle=od.Shuffle(streams=<groups>)`. Compressed tars have decompressed copies in
    ORCHDATA_CACHE instead.

    Attributes:
        path: the folder, on a disk of the node. It is created when the first copy is made.
        max_bytes: cap on all files of copies in it. A run removes copies of other data only.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    max_bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise ValueError(f"Cache.path must be a folder, got {self.path!r}")
        path = os.fsdecode(self.path)
        if is_remote(path):
            raise ValueError("Cache.path must be a folder on a disk of the node, got a URL")
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int) or self.max_bytes < 1:
            raise ValueError(f"Cache.max_bytes must be a number of bytes, at least 1, got {self.max_bytes!r}")
        object.__setattr__(self, "path", os.path.abspath(os.path.expanduser(path)))


def cache_of_environment() -> Cache | None:
    """Return the cache that the environment names; None if it names none. Raises ValueError for one variable without
    the other, and for one that is no number of bytes.
    """
    folder, most = os.environ.get(FOLDER_VARIABLE), os.environ.get(BYTES_VARIABLE)
    if not folder and not most:
        return None
    if not folder:
        raise ValueError(f"{BYTES_VARIABLE} is given without {FOLDER_VARIABLE}, the folder of the copies of shards")
    if not most:
        raise ValueError(f"{FOLDER_VARIABLE} is given without {BYTES_VARIABLE}, the most bytes in it, such as 2TiB")
    return Cache(folder, max_bytes=bytes_of(most, BYTES_VARIABLE))

"""Files: every file of a data set, on this machine or in object storage, by its path or URL. A value that pickles.

path or URL --scheme--> a local file, or objects of a store --> identity, version, names, open files

Whole copies of shards of object storage that a node keeps, below a cap: found by the readers of all its processes,
added by one process at a time.

add --room below the cap, reserved under a lock--> partial file of the full size --fetched whole--> entry --> find
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from orchdata.loaders.amounts import bytes_of
from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage import local
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
from orchdata.loaders.storage.local import LocalFile, names_in, opened, status_of
from orchdata.loaders.storage.remote.objects import Ahead, Looks, Objects, RemoteFile, matches
from orchdata.loaders.storage.remote.requests import RETRY_SECONDS
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import Extent, FileVersion, ReadBytes, Storage


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


_OF_TIMEOUT: Final = 0.6
"""The part of a loader's timeout that an outage may last."""
_LISTED_SECONDS: Final = 60.0
"""How long a listing is taken for the present."""


class Files:
    """Names, versions, listings and bytes of files. Two are equal if they read the same way. What is open is kept with
    the object, in each process. Safe from many threads; a failed call raises StorageError after some attempts.

    Args:
        options: `storage_options` of object storage.
        store: of the user's for all URLs: of obstore, or a filesystem of fsspec. None: one for each bucket.
        given: URL without secrets -> the URL as it was given, if it has a query or a password.

    Attributes:
        others: URL -> the files that have it, of data sets with other options in one mixture.
        cache: where a node keeps whole copies; None: nowhere.
    """

    def __init__(
        self, options: Mapping[str, Any] | None = None, store: Any = None, given: Mapping[str, str] | None = None
    ) -> None:
        self.options: Final = dict(options or {})
        self.store: Final = store
        self.given: Final = dict(given or {})
        self.others: Mapping[str, Files] = {}
        self._known: dict[str, FileVersion] = {}
        self._known_at = 0.0
        self._objects: Objects | None = None
        self.cache: Cache | None = None
        self._copies: Copies | None = None
        self._lock = threading.Lock()

    def read_by(self, *, timeout: float = 0, cache: Cache | None = None, **_: Any) -> Files:
        """Return files as a loader with these arguments, of which others say nothing of files, reads them.

        Args:
            timeout: seconds of a step: an outage gets less; 0: as much as by default.
            cache: where this node has copies, which are read in place of objects.
        """
        if not timeout and cache is None:
            return self
        given, most = float(self.options.get("retry_seconds", RETRY_SECONDS)), _OF_TIMEOUT * float(timeout)
        options = self.options | {"retry_seconds": most} if timeout and given > most else self.options
        files = Files(options, self.store, self.given)
        # The URLs of a data set share one, and so its clients.
        others = {id(other): other for other in self.others.values()}
        changed = {key: other.read_by(timeout=timeout, cache=cache) for key, other in others.items()}
        files.others = {url: changed[id(other)] for url, other in self.others.items()}
        files.cache, files._objects = cache, None if timeout else self.objects
        return files

    @property
    def copies(self) -> Copies | None:
        """The copies of this node; None without a cache."""
        if self.cache is None:
            return None
        with self._lock:
            if self._copies is None:
                self._copies = Copies(self.cache)
            return self._copies

    def of(self, shard: str) -> Files:
        """Return the files of the data set that has a shard, for the media that it names."""
        return self.others.get(shard, self)

    def version(self, path: str, *, retries: bool = True) -> FileVersion | None:
        if not is_remote(path):
            return local.version(path, retries=retries)
        if (other := self.others.get(path)) is not None:
            return other.version(path)
        return self._known.get(path) or self.objects.version(path)

    def size_of(self, path: str, *, retries: bool = True) -> int:
        """Return the bytes of a file, or of the files of a folder; 0 if it does not exist. Raises as `version`."""
        version = self.version(path, retries=retries)
        return 0 if version is None else version.size

    def open(self, path: str, known: FileVersion | None = None, reads: ReadBytes | None = None) -> Storage:
        """Open a file; an object with a `known` size and version takes no request. Raises StorageError, and ShardError
        if it is not a regular file.
        """
        if not is_remote(path):
            return local.LocalFile(path, count=None if reads is None else reads.storage)
        if (other := self.others.get(path)) is not None:
            return other.open(path, known, reads)
        if known is None:
            known = self.version(path)
        if known is None:
            raise StorageError(path, "cannot be opened: no such object", errno.ENOENT)
        if (copies := self.copies) is not None:
            return CopiedFile(self.objects, path, known, reads, copies)
        return RemoteFile(self.objects, path, known, reads)

    def file_number(self, path: str) -> Hashable | None:
        return None if is_remote(path) else local.file_number(path)

    def why_same(self, path: str, other: str) -> str | None:
        return None if is_remote(path) or is_remote(other) else local.why_same(path, other)

    @property
    def objects(self) -> Objects:
        """What this process has open of object storage."""
        with self._lock:
            if self._objects is None:
                self._objects = Objects(self.options, self.store, self.given)
            return self._objects

    def knowing(self, versions: Mapping[str, FileVersion]) -> Files:
        """Return files that take sizes and versions of objects from a listing that was just made."""
        files = Files(self.options, self.store, self.given)
        files._known, files._objects, files._known_at = dict(versions), self.objects, time.monotonic()
        return files

    def matches(self, pattern: str) -> dict[str, FileVersion]:
        """Return the objects that a pattern matches, as `listing.matches`."""
        return matches(self.objects, pattern)

    def looked_up(self, paths: Sequence[str]) -> Files:
        """Return files that know sizes and versions of these objects, from few requests. Raises StorageError."""
        if time.monotonic() - self._known_at < _LISTED_SECONDS and self._known.keys() >= set(paths):
            return self
        looks = Looks(self.objects)
        looks.find(paths)
        return self.knowing({path: file for path in paths if (file := looks.known[path]) is not None})

    @property
    def listed(self) -> Mapping[str, FileVersion]:
        """Size and version of the objects of a listing that was just made, by URL."""
        is_new = time.monotonic() - self._known_at < _LISTED_SECONDS
        return self._known if is_new else {}

    def forget(self, path: str) -> None:
        """Look at an object again, in place of what a listing said."""
        self._known.pop(path, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Files):
            return NotImplemented
        mine, others = (self.options, self.given, self.cache), (other.options, other.given, other.cache)
        return mine == others and self.store is other.store

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.options)), id(self.store)))

    def __repr__(self) -> str:
        """Options and URLs as given are secret."""
        return "Files()"

    def __reduce__(self) -> tuple[Callable[..., Files], tuple[Any, ...]]:
        return _restored, (self.options, self.store, self.given, dict(self.others), self.cache)


def _restored(
    options: Mapping[str, Any], store: Any, given: Mapping[str, str], others: Mapping[str, Files], cache: Cache | None
) -> Files:
    files = Files(options, store, given)
    files.others, files.cache = others, cache
    return files


def joined_files(parts: Sequence[tuple[Sequence[str], Files]]) -> Files:
    """Return the files of several data sets: a shard, and its media, by those of the first that has it."""
    if all(files == parts[0][1] for _, files in parts):
        return parts[0][1]
    joined = Files()
    joined.others = {url: files for paths, files in reversed(parts) for url in paths}
    return joined


PLAIN_FILES: Final = Files()
"""Files with the credentials of the environment."""

"""The cache folder: decompressed shards within a size cap, and files of other kinds. Safe for concurrent processes.

Every file appears by renaming, so a reader sees a whole file or none. Processes that write the same entry wait for one
another on a lock, which the kernel releases when a process ends: no old lock can block a later run. Each kind of
files has a folder of its own. All of them can be made again, and a process that has one open can still read it: what a
prune removes costs time, and nothing else. Only files of this user go, with names as orchdata gives them: a folder of
the user's own may have the name of a kind, such as `shards`.

    partial file, locked by its writer --checksum next to it--> renamed --note that it was verified--> entry
    MappedArray --pickled--> file named by its digest --unpickled--> the same bytes, checked and mapped read-only
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import struct
import threading
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.local import (
    TEMPORARY_SUFFIX,
    Lent,
    create_temporary,
    lend,
    move,
    names_in,
    opened,
    opened_lent,
    read_small,
    record_use,
    remove,
    status_of,
    write_once,
    write_whole,
)
from orchdata.loaders.storage.remote.urls import identity
from orchdata.loaders.storage.sealed import NOTE_SUFFIX, forget, is_noted, note
from orchdata.loaders.storage.storage import BLOCK_BYTES, FileVersion, tried

CACHE_VARIABLE = "ORCHDATA_CACHE"
PARTIAL_SUFFIX: Final = ".part"
SUM_SUFFIX: Final = ".sum"
_ENTRY_SUFFIX: Final = ".tar"
_USED_SECONDS: Final = 60.0
_SUM_BYTES: Final = 256
_POLL_SECONDS: Final = 0.02
_LOCK: Final = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux, with a pid of 0, as F_OFD_SETLK requires


class Claims:
    """Divides work among processes: each name is one byte of a file, locked by who works on it; the file stays empty.
    The threads that share this object never claim the same name. Where the file system has no locks, or the file
    cannot be opened, every claim succeeds: work may then be done twice.
    """

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # it is closed even if this fails
                os.close(file)

    @contextlib.contextmanager
    def claim(self, name: str, go_on: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Yield whether the name is ours for the block; while another process has it, `go_on` says whether to keep
        waiting.
        """
        offset = (
            int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big") >> 2
        )
        while not (ours := self._set(fcntl.F_WRLCK, offset)) and go_on():
            time.sleep(_POLL_SECONDS)
        try:
            yield ours
        finally:
            if ours:
                self._set(fcntl.F_UNLCK, offset)  # if this fails, it ends with the file

    def _set(self, kind: int, offset: int) -> bool:
        """Return False if another process has the lock."""
        try:
            if self._file is not None:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, offset, 1, 0))
        except OSError as error:
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True


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
        """Create the folder for files of one kind, and return it. Raises StorageError."""
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

    @contextlib.contextmanager
    def lock(self, group: str, name: str, *, waits: bool = True) -> Iterator[bool]:
        """Hold the lock of a name in a group; without waiting it may be another's: yields whether it is held. Raises as
        `make`.
        """
        claims = Claims(self.file("locks", group))
        try:
            with claims.claim(name, lambda: waits) as is_held:
                yield is_held
        finally:
            claims.close()

    def entry(self, name: str, make: Callable[[IO[bytes], int], None], *, changed_ns: int = 0) -> Path:
        """Return the path of a decompressed shard; `make(file, limit)` writes it if it is missing, or older than
        `changed_ns`. An existing entry is only read, so a complete cache may be read-only. Another process may evict it
        before it is opened: then call again. Errors of `make` pass, and nothing stays; after a failed system call it is
        called again from the start. Raises StorageError if the cache cannot be written.
        """
        path = self._entry_path(name)

        def make_once() -> None:
            with self.lock("shards", name):
                if is_whole(path, changed_ns):  # written while this process waited
                    return
                remove_partials(path.parent, _USED_SECONDS)  # younger ones may be between creation and lock
                how: dict[str, Any] = {"changed_ns": changed_ns, "make_room": self._make_room}
                complete(path, *new_partial(path), lambda file: make(file, self.max_bytes), **how)

        if not tried(str(path), "cannot be read", lambda: is_whole(path, changed_ns)):
            self.make("shards")
            tried(str(path), "cannot be written", make_once)
        mark_used(path)
        return path

    def remove_entry(self, name: str) -> None:
        """Remove a decompressed shard; best effort. Processes that have it open can still read it."""
        remove_entry(self._entry_path(name))

    def _entry_path(self, name: str) -> Path:
        return self.root / "shards" / (name + _ENTRY_SUFFIX)

    def _make_room(self, needed: int) -> None:
        """Make room for `needed` bytes below the cap; files of other users that cannot be removed stay."""
        there = entries(self.root / "shards", _ENTRY_SUFFIX)
        total = sum(entry.size for entry in there)
        for entry in there:
            if total + needed <= self.max_bytes:
                break
            if remove_entry(entry.path):
                total -= entry.size


class Sum(NamedTuple):
    """Size, checksum and mtime of an entry when it was written, and `changed_ns` of its source; stored next to it."""

    size: int
    crc32: int
    mtime_ns: int
    changed_ns: int = 0


class Entry(NamedTuple):
    """An entry of a folder; its last use in seconds as of `time.time`."""

    last_used: float
    size: int
    path: Path


class _Summed:
    """Writes a file from start to end, and computes its checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self.crc32 = 0
        self._file = file

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


def copy_name(url: str, file: FileVersion) -> str:
    """Return the name of a copy of a shard: whole, or decompressed."""
    words = "\0".join((identity(url), str(file.size), file.version))
    return hashlib.blake2b(words.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def new_partial(path: Path) -> tuple[int, str]:
    """Create the partial file of an entry, locked until its descriptor is closed: this shows other processes that its
    writer is alive. Return descriptor and name. Raises OSError.
    """
    descriptor, partial = create_temporary(path, PARTIAL_SUFFIX)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        remove(partial)
        raise
    return descriptor, partial


def complete(
    path: Path,
    descriptor: int,
    partial: str,
    make: Callable[[IO[bytes]], None],
    *,
    changed_ns: int = 0,
    make_room: Callable[[int], None] = lambda _: None,
) -> None:
    """Have `make` write a partial file from start to end, and make it the entry; after an error nothing of it stays.
    Closes the descriptor. `make_room` gets its size before it appears. Raises OSError, and what `make` raises.
    """
    try:
        with os.fdopen(descriptor, "wb") as file:
            summed = _Summed(file)
            make(cast("IO[bytes]", summed))
            file.flush()
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
            make_room(status.st_size)
            kept = Sum(status.st_size, summed.crc32, status.st_mtime_ns, changed_ns)
            write_once(path.with_suffix(SUM_SUFFIX), " ".join(map(str, kept)).encode())
            move(partial, path)
            note(path, os.fstat(file.fileno()))
    except BaseException:
        remove(partial)
        if not os.path.lexists(path):
            remove(path.with_suffix(SUM_SUFFIX))
        raise


def sum_of(path: Path) -> Sum | None:
    """Return what is stored next to an entry; None next to any other file. Raises OSError."""
    try:
        return Sum(*map(int, read_small(path.with_suffix(SUM_SUFFIX), _SUM_BYTES).split()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def is_whole(path: Path, changed_ns: int = 0) -> bool:
    """Return whether an entry exists, has not changed, and is not older than its source. Its bytes are read once per
    machine. Raises OSError.
    """
    try:
        kept = sum_of(path)
        if kept is None:
            return False
        # A file system may have another clock: then the entry is not newer than its source even when it was just made.
        if changed_ns > max(kept.mtime_ns, kept.changed_ns) and os.access(path.parent, os.W_OK):
            return False
        with opened(path) as file:
            status = os.fstat(file)
            if status.st_size != kept.size or is_noted(path, status):
                return status.st_size == kept.size
            if status.st_mtime_ns == kept.mtime_ns and not os.access(path.parent, os.W_OK):
                return True  # no note can be written here, and reading all of it at each opening would be slow
            crc32 = 0
            while data := os.read(file, BLOCK_BYTES):
                crc32 = zlib.crc32(data, crc32)
        if crc32 != kept.crc32:
            return False
        note(path, status)
        return True
    except FileNotFoundError:
        return False


def mark_used(path: Path) -> None:
    """Record the use of an entry as the time of its checksum; best effort."""
    record_use(path.with_suffix(SUM_SUFFIX), _USED_SECONDS)


def entries(folder: Path, suffix: str, stay: Container[str] = ()) -> list[Entry]:
    """Return the entries of a folder, the least recently used one first, without those whose stems `stay`."""
    found: list[Entry] = []
    for path in (folder / name for name in names_in(folder) if name.endswith(suffix)):
        status = status_of(path) if path.stem not in stay else None
        # A folder of this name may have shards of the user's own, without sums.
        with suppress(OSError):
            if status is not None and sum_of(path) is not None:
                found.append(Entry(last_used(path, status), status.st_size, path))
    return sorted(found)


def remove_entry(path: Path) -> bool:
    """Remove an entry, and return whether it is gone. Processes that have it open can still read it."""
    for each in (path, path.with_suffix(SUM_SUFFIX)):
        remove(each)
    forget(path)
    return not os.path.lexists(path)


def remove_partials(folder: Path, older_than_seconds: float) -> None:
    """Remove the partial files of killed writers: these are not locked."""
    for path in (folder / name for name in names_in(folder) if name.endswith(PARTIAL_SUFFIX) and name[0] == "."):
        with suppress(OSError), opened(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file).st_mtime > older_than_seconds:
                path.unlink(missing_ok=True)


def last_used(path: Path, status: os.stat_result) -> float:
    """Return when an entry was last used, as it was recorded. Raises OSError."""
    kept = status_of(path.with_suffix(SUM_SUFFIX))
    return status.st_mtime if kept is None else kept.st_mtime


KIND = "arrays"
_held: dict[int, int] = {}
"""Descriptors of held files, by the id of the array that they are of."""
_lock = threading.Lock()


class MappedArray:
    """A one-dimensional int64 array, not to be written to; pickles as the path of a file with its content, which is
    then written. This process has it open as long as the array: another may map it later, also after a prune. Raises
    StorageError if the folder cannot be written, or the file is gone or changed.
    """

    def __init__(self, array: NDArray[np.int64]) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.array.size:
            return MappedArray, (np.zeros(0, np.int64),)
        data = np.ascontiguousarray(self.array).data.cast("B")
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        path = CacheFolder().file(KIND, f"{digest}.int64")
        if not _is_held(path, digest, self.array):
            write_whole(path, data)
            if not _is_held(path, digest, self.array):
                raise StorageError(str(path), "is not what was just written to it, or was removed: try again")
        return _mapped, (str(path), digest, lend(_held[id(self.array)]))


def _mapped(path: str, digest: str, lent: Lent | None = None) -> MappedArray:
    array = tried(path, "cannot be read", lambda: _map_verified(Path(path), digest, lent=lent))
    if array is None:
        raise StorageError(path, "is gone, or its content has changed: create the loader again")
    return MappedArray(array)


def _map_verified(
    path: Path, digest: str, array: NDArray[np.int64] | None = None, lent: Lent | None = None
) -> NDArray[np.int64] | None:
    """Map the file; None if it does not exist with the content of this digest. It is held for `array`, default: for
    what is returned.
    """
    try:
        with opened_lent(path, lent) as fd:
            with open(fd, "rb", closefd=False) as file:
                actual = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            if actual != digest:
                return None
            mapped = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ), np.int64)
            _keep_open(fd, mapped if array is None else array)
            return mapped
    except FileNotFoundError:
        return None


def _is_held(path: Path, digest: str, array: NDArray[np.int64]) -> bool:
    """Return whether there is a file with this content, which is held for the array from now on."""
    return tried(str(path), "cannot be read", lambda: _map_verified(path, digest, array)) is not None


def _keep_open(fd: int, array: NDArray[np.int64]) -> None:
    with _lock:
        if id(array) in _held:
            os.dup2(fd, _held[id(array)], inheritable=False)  # the earlier file may be gone
        else:
            _held[id(array)] = os.dup(fd)
            weakref.finalize(array, _close, id(array))


def _close(array_id: int) -> None:
    os.close(_held.pop(array_id))


_DIGEST: Final = re.compile("[0-9a-f]{32,64}$")
_DAY_SECONDS: Final = 24 * 3600.0
_NOTES_SECONDS: Final = 30 * _DAY_SECONDS


class Kind(NamedTuple):
    """A kind of kept files: what they have, for people, and the suffixes of their names, after a digest."""

    content: str
    suffixes: tuple[str, ...]


KINDS: Final = {
    "facts": Kind("places and headers of members", (".facts", ".headers")),
    "texts": Kind("counts of texts", (".texts",)),
    "sizes": Kind("sizes of parts that are counted from their bytes", (".sizes",)),
    "costs": Kind("costs of a shard under a recipe", (".costs",)),
    "index": Kind("indexes", (".index",)),
    "item_costs": Kind("costs of map-style items", (".costs",)),
    "arrays": Kind("arrays of loaders with workers", (".int64",)),
    "shards": Kind("decompressed shards", (".tar",)),
    "copies": Kind("copies of shards of object storage", (".copy",)),
    "packing": Kind("which models keep packed samples apart", (".json",)),
}
"""By the name of the folder. What `CacheFolder.make` is called with, and is not here, is neither listed nor pruned."""


class KeptFile(NamedTuple):
    """A file of this user, of the kind with this name: its last use (as of `time.time`), its bytes and paths with those
    of its companions, a checksum and notes that it was verified, whose times are times of use too.
    """

    last_used: float
    size: int
    kind: str
    paths: tuple[Path, ...]


@dataclass(slots=True)
class Amount:
    """A number of files, and their bytes."""

    files: int = 0
    bytes: int = 0

    def add(self, file: KeptFile) -> None:
        self.files += 1
        self.bytes += file.size


@dataclass(slots=True)
class Pruned:
    """What a prune has removed, by the name of the kind, and all that is left of this user's."""

    removed: dict[str, Amount] = field(default_factory=dict)
    left: Amount = field(default_factory=Amount)


def kept_files(cache: CacheFolder) -> list[KeptFile]:
    """Return what is kept, the least recently used first; a missing folder keeps nothing. Raises StorageError."""
    return sorted(file for name in KINDS for file in _files(cache.root / name))


def prune(
    cache: CacheFolder,
    *,
    older_than_seconds: float | None = None,
    most_bytes: int | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Remove what was not used for a time, then the least recently used files until the rest is within a bound; None:
    no bound. `dry_run` removes nothing, and returns what would go. Raises StorageError if something cannot be removed,
    or looked at.
    """
    pruned, now = Pruned(), time.time()
    found = kept_files(cache)
    left = sum(file.size for file in found)
    for file in found:
        is_old = older_than_seconds is not None and file.last_used <= now - older_than_seconds
        if is_old or (most_bytes is not None and left > most_bytes):
            if not dry_run:
                tried(str(file.paths[0]), "cannot be removed", partial(file.paths[0].unlink, missing_ok=True))
                for companion in file.paths[1:]:
                    remove(companion)
            pruned.removed.setdefault(file.kind, Amount()).add(file)
            left -= file.size
        else:
            pruned.left.add(file)
    if not dry_run:
        remove_leftovers(cache)
    return pruned


def remove_leftovers(cache: CacheFolder) -> None:
    """Remove old temporary files of killed writers, and old notes of verified files. Best effort."""
    for kind in KINDS:
        with suppress(OSError):
            for name in names_in(cache.root / kind):
                path = cache.root / kind / name
                is_leftover = name.startswith(".") and name.endswith((TEMPORARY_SUFFIX, PARTIAL_SUFFIX, NOTE_SUFFIX))
                status = status_of(path) if is_leftover else None
                if status is not None and status.st_uid == os.geteuid():
                    kept_seconds = _NOTES_SECONDS if name.endswith(NOTE_SUFFIX) else _DAY_SECONDS
                    if time.time() - status.st_mtime > kept_seconds:
                        remove(path)


def _files(folder: Path) -> Iterator[KeptFile]:
    """Yield the files of this user with names as orchdata gives them, with their companions."""
    statuses: dict[str, os.stat_result] = {}
    for name in tried(str(folder), "cannot be listed", partial(names_in, folder)):
        path = folder / name
        status = tried(str(path), "cannot be looked at", partial(status_of, path))
        if status is not None and status.st_uid == os.geteuid():
            statuses[name] = status
    companions: dict[str, list[str]] = defaultdict(list)
    for name in statuses:
        if name.endswith(SUM_SUFFIX):
            companions[name.partition(".")[0]].append(name)
        elif name.startswith(".") and name.endswith(NOTE_SUFFIX):
            companions[name[1:].partition(".")[0]].append(name)
    for name, status in statuses.items():
        mine = companions[name.partition(".")[0]]
        used = max((statuses[each].st_mtime for each in mine), default=0.0)
        size = status.st_size + sum(statuses[each].st_size for each in mine)
        paths = (folder / name, *(folder / each for each in mine))
        if name.endswith(KINDS[folder.name].suffixes) and _DIGEST.search(name.partition(".")[0]):
            yield KeptFile(max(status.st_mtime, used), size, folder.name, paths)

"""The cache folder: decompressed shards within a size cap, and files of other kinds. Safe for concurrent processes.

Every file appears by renaming, so a reader sees a whole file or none. Processes that write the same entry wait for one
another on a file lock, which the kernel releases when a process ends: no old lock can block a later run.

Other users may write to the folder too: `shared.files` defines which files are used, and `shared.access` who may read a
copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, cast

from orchdata.loaders.amounts import bytes_of
from orchdata.loaders.storage.atomic import create_temporary, move, remove, write_once
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.shared.access import Access, restrict
from orchdata.loaders.storage.shared.files import make_folder, names_in, open_lock, opened, read_small, status_of
from orchdata.loaders.storage.shared.use import USED_SUFFIX, mark_of
from orchdata.loaders.storage.verified import forget, is_noted, note

CACHE_VARIABLE = "ORCHDATA_CACHE"
BYTES_VARIABLE = "ORCHDATA_CACHE_BYTES"
_TOUCH_SECONDS = 60.0
_ENTRY_SUFFIX = ".tar"
PARTIAL_SUFFIX = ".part"
SUM_SUFFIX = ".sum"
_SUM_BYTES = 256
_BLOCK_BYTES = 1 << 20


class CacheFolder:
    """A folder for files that can be created again.

    Args:
        root: the folder; default: $ORCHDATA_CACHE, else ~/.cache/orchdata, which only this user can access. It is
            created at the first write; a given folder gets the permissions of the umask, so that users can share it.
        max_bytes: cap on all decompressed shards in it together. The least recently opened are removed first.
        max_kept_bytes: bound on the whole folder, which each build of an index enforces at its end, see `kept.prune`;
            default: $ORCHDATA_CACHE_BYTES, else none.

    Raises ValueError for a variable that is no number of bytes.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int = 256 << 30,
        max_kept_bytes: int | None = None,
    ) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        if max_kept_bytes is not None and max_kept_bytes < 0:
            raise ValueError(f"max_kept_bytes must be at least 0, got {max_kept_bytes}")
        if max_kept_bytes is None and (bound := os.environ.get(BYTES_VARIABLE)):
            max_kept_bytes = bytes_of(bound, BYTES_VARIABLE)
        named = root or os.environ.get(CACHE_VARIABLE)
        self._mode = 0o777 if named else 0o700
        self.root = Path(named or "~/.cache/orchdata")
        try:
            self.root = self.root.expanduser().absolute()
        except RuntimeError as error:  # no $HOME, and the user has no entry in the system's list
            raise OSError(f"no cache folder: {self.root} needs a home directory; set {CACHE_VARIABLE}") from error
        self.max_bytes = max_bytes
        self.max_kept_bytes = max_kept_bytes

    def make(self, kind: str) -> Path:
        """Create the folder for files of one kind, and return it.

        Raises StorageError if it cannot be created.
        """
        folder = self.make_root() / kind
        tried(str(folder), "cannot be created", lambda: make_folder(folder))
        return folder

    def make_root(self) -> Path:
        """Create the folder itself, and return it. Raises as `make`."""
        if not tried(str(self.root), "cannot be looked at", self.root.is_dir):
            make = partial(self.root.mkdir, self._mode, parents=True, exist_ok=True)
            tried(str(self.root), "cannot be created", make)
        return self.root

    def file(self, kind: str, name: str) -> Path:
        """Return the path of a file of one kind, and create its folder. Raises as `make`."""
        return self.make(kind) / name

    def entry(
        self,
        name: str,
        make: Callable[[IO[bytes], int], None],
        access: Access | None = None,
        *,
        changed_ns: int = 0,
    ) -> Path:
        """Return the path of a decompressed shard; `make(file, limit)` writes it if it is missing. It is never a link.

        Another process may evict the entry before it is opened: then call again. An existing entry is only read, so a
        complete cache may be read-only, and belong to another user.

        Errors of `make` are passed on, and nothing stays in the cache; after a failed system call it is called again
        from the start. `limit` is the cap on the size, `access` the most that the permissions may allow: the shard's.
        An entry that is older than `changed_ns`, as `Storage.changed_ns`, is made again.

        Raises StorageError if the cache cannot be written.
        """
        path = self.root / "shards" / (name + _ENTRY_SUFFIX)
        if not tried(str(path), "cannot be read", lambda: _is_whole(path, changed_ns)):
            self.make("shards")
            tried(str(path), "cannot be written", lambda: self._make(name, path, make, access, changed_ns))
        elif access is not None:
            restrict(path, access)
        self._mark_used(path)
        return path

    def remove_entry(self, name: str) -> None:
        """Remove a decompressed shard; best effort. Processes that have it open can still read it."""
        for suffix in (_ENTRY_SUFFIX, USED_SUFFIX, SUM_SUFFIX):
            remove(self.root / "shards" / (name + suffix))

    def _make(
        self, name: str, path: Path, make: Callable[[IO[bytes], int], None], access: Access | None, changed_ns: int
    ) -> None:
        with self._lock(name):
            if _is_whole(path, changed_ns):  # written while this process waited
                return
            self._remove_partials(path.parent)
            descriptor, partial = create_temporary(path, PARTIAL_SUFFIX, access)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # shows other processes that its writer is alive
                    summed = _Summed(file)
                    make(cast("IO[bytes]", summed), self.max_bytes)
                    file.flush()
                    os.fsync(file.fileno())
                    status = os.fstat(file.fileno())
                    self._evict(path.parent, status.st_size)
                    kept = _Sum(status.st_size, summed.crc32, status.st_mtime_ns, changed_ns)
                    write_once(path.with_suffix(SUM_SUFFIX), kept.encoded())
                    move(partial, path)
                    note(path, os.fstat(file.fileno()))
            except BaseException:
                remove(partial)
                if not os.path.lexists(path):
                    remove(path.with_suffix(SUM_SUFFIX))
                raise

    def _mark_used(self, path: Path) -> None:
        """Record the time of use as the mtime of a file next to the entry; best effort.

        That file is written again each time: changing its times in place could change another user's file.
        """
        mark = mark_of(path)
        with contextlib.suppress(OSError):
            status = status_of(mark)
            if status is None or time.time() - status.st_mtime > _TOUCH_SECONDS:
                write_once(mark, b"")

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        descriptor = open_lock(self.file("locks", name))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _evict(self, folder: Path, needed: int) -> None:
        """Make room for `needed` bytes below the cap; files of other users that cannot be removed stay."""
        entries: list[tuple[float, int, Path]] = []
        for path in _files_in(folder, _ENTRY_SUFFIX):
            status = status_of(path)
            if status is not None and _is_entry(path):
                entries.append((_last_used(path, status), status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total + needed <= self.max_bytes:
                break
            remove(path)  # processes that have it open can still read it
            for suffix in (USED_SUFFIX, SUM_SUFFIX):
                remove(path.with_suffix(suffix))
            forget(path)
            if not os.path.lexists(path):
                total -= size

    def _remove_partials(self, folder: Path) -> None:
        """Remove the partial files of killed writers: these are not locked."""
        for path in _files_in(folder, PARTIAL_SUFFIX):
            if not path.name.startswith("."):  # not ours
                continue
            with contextlib.suppress(OSError), opened(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Younger ones may be between creation and flock.
                if time.time() - os.fstat(file).st_mtime > _TOUCH_SECONDS:
                    path.unlink(missing_ok=True)


class _Sum(NamedTuple):
    """Size, checksum and mtime of an entry when it was written, and `changed_ns` of its source; stored next to it."""

    size: int
    crc32: int
    mtime_ns: int
    changed_ns: int = 0

    def encoded(self) -> bytes:
        return " ".join(map(str, self)).encode()


class _Summed:
    """Writes a file from start to end, and computes its checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self.crc32 = 0
        self._file = file

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


def _sum_of(path: Path) -> _Sum | None:
    """Return what is stored next to an entry; None next to any other file. Raises OSError."""
    try:
        return _Sum(*map(int, read_small(path.with_suffix(SUM_SUFFIX), _SUM_BYTES).split()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _is_entry(path: Path) -> bool:
    """Return whether a file is an entry: a folder of this name may have shards of the user's own."""
    try:
        return _sum_of(path) is not None
    except OSError:
        return False


def _is_whole(path: Path, changed_ns: int) -> bool:
    """Return whether an entry exists, has not changed, and is not older than its source.

    Its bytes are read once per machine, see `verified`.
    """
    try:
        kept = _sum_of(path)
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
            while data := os.read(file, _BLOCK_BYTES):
                crc32 = zlib.crc32(data, crc32)
        if crc32 != kept.crc32:
            return False
        note(path, status)
        return True
    except FileNotFoundError:
        return False


def _last_used(path: Path, status: os.stat_result) -> float:
    mark = status_of(mark_of(path))
    return status.st_mtime if mark is None else mark.st_mtime


def _files_in(folder: Path, suffix: str) -> list[Path]:
    return [folder / name for name in names_in(folder) if name.endswith(suffix)]

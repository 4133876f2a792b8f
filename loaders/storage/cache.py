"""The cache folder: decompressed shards within a size cap, and files of other kinds. Safe for concurrent processes.

Everything appears by rename, so a reader sees a whole file or none. Makers of the same entry wait for one another on a
file lock that the kernel drops with its process: nothing left behind can block a later run.

Other users may write to the folder too: `shared.files` says what counts as a file of it, and `shared.access` who may
read a copy.
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

from orchdata.loaders.storage.atomic import create_beside, move, remove, write_once
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.shared.access import Access, restrict
from orchdata.loaders.storage.shared.files import make_folder, names_in, open_lock, opened, read_small, status_of
from orchdata.loaders.storage.verified import forget, is_noted, note

CACHE_VARIABLE = "ORCHDATA_CACHE"
_TOUCH_SECONDS = 60.0
_ENTRY_SUFFIX = ".tar"
_PARTIAL_SUFFIX = ".part"
_USED_SUFFIX = ".used"
_SUM_SUFFIX = ".sum"
_SUM_BYTES = 256
_BLOCK_BYTES = 1 << 20


class CacheFolder:
    """A folder for what can be made again.

    Args:
        root: the folder; default: $ORCHDATA_CACHE, else ~/.cache/orchdata, which is made for this user alone. Made when
            first written to; permissions of one that is named follow the umask, so that several users can share it.
        max_bytes: cap on the decompressed shards in it, all together. The least recently opened go first.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, max_bytes: int = 256 << 30) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        named = root or os.environ.get(CACHE_VARIABLE)
        self._mode = 0o777 if named else 0o700
        self.root = Path(named or "~/.cache/orchdata")
        try:
            self.root = self.root.expanduser().absolute()
        except RuntimeError as error:  # no $HOME, and the user has no entry in the system's list
            raise OSError(f"no cache folder: {self.root} needs a home directory; set {CACHE_VARIABLE}") from error
        self.max_bytes = max_bytes

    def make(self, kind: str) -> Path:
        """The folder of files of some kind, made. Nothing evicts them.

        Raises StorageError where it cannot be made.
        """
        folder = self.make_root() / kind
        tried(str(folder), "cannot be made", lambda: make_folder(folder))
        return folder

    def make_root(self) -> Path:
        """The folder itself, made. Raises as `make`."""
        if not tried(str(self.root), "cannot be looked at", self.root.is_dir):
            make = partial(self.root.mkdir, self._mode, parents=True, exist_ok=True)
            tried(str(self.root), "cannot be made", make)
        return self.root

    def file(self, kind: str, name: str) -> Path:
        """Path of a file of some kind, its folder made. Raises as `make`."""
        return self.make(kind) / name

    def entry(self, name: str, make: Callable[[IO[bytes], int], None], access: Access | None = None) -> Path:
        """Path of a decompressed shard, made by `make(file, limit)` if it is not there. The path is never a link's.

        `access` is what its permissions may allow at most: those of the shard.
        `limit` is the cap on its size. What `make` raises is passed on, and leaves nothing; what the system refuses is
        tried again, from the start.
        Another process may evict the entry before it is opened: then ask again. One that is there is only looked at: a
        complete cache may be read-only, and another user's.

        Raises StorageError where the cache cannot be written.
        """
        path = self.root / "shards" / (name + _ENTRY_SUFFIX)
        if not tried(str(path), "cannot be read", lambda: _is_whole(path)):
            self.make("shards")
            tried(str(path), "cannot be written", lambda: self._make(name, path, make, access))
        elif access is not None:
            restrict(path, access)
        self._mark_used(path)
        return path

    def _make(self, name: str, path: Path, make: Callable[[IO[bytes], int], None], access: Access | None) -> None:
        with self._lock(name):
            if _is_whole(path):  # made while we waited
                return
            self._remove_partials(path.parent)
            descriptor, partial = create_beside(path, _PARTIAL_SUFFIX, access)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # tells others that its maker lives
                    summed = _Summed(file)
                    make(cast("IO[bytes]", summed), self.max_bytes)
                    file.flush()
                    os.fsync(file.fileno())
                    status = os.fstat(file.fileno())
                    self._evict(path.parent, status.st_size)
                    kept = _Sum(status.st_size, summed.crc32, status.st_mtime_ns)
                    write_once(path.with_suffix(_SUM_SUFFIX), kept.encoded())
                    move(partial, path)
                    note(path, os.fstat(file.fileno()))
            except BaseException:
                remove(partial)
                if not os.path.lexists(path):
                    remove(path.with_suffix(_SUM_SUFFIX))
                raise

    def _mark_used(self, path: Path) -> None:
        """Best effort. A file beside the entry, whose own times tell that it is what was opened.

        It is made anew each time: to change the times of one that is there could change those of another's file.
        """
        mark = path.with_suffix(_USED_SUFFIX)
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
        """Make room for `needed` bytes below the cap; what may not be removed, being another user's, stays."""
        entries: list[tuple[float, int, Path]] = []
        for path in _files_in(folder, _ENTRY_SUFFIX):
            status = status_of(path)
            if status is not None:
                entries.append((_last_used(path, status), status.st_size, path))
        held = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if held + needed <= self.max_bytes:
                break
            remove(path)  # whoever has it open keeps it until closed
            for suffix in (_USED_SUFFIX, _SUM_SUFFIX):
                remove(path.with_suffix(suffix))
            forget(path)
            if not os.path.lexists(path):
                held -= size

    def _remove_partials(self, folder: Path) -> None:
        """Remove what makers that were killed left behind: nobody holds a lock on it."""
        for path in _files_in(folder, _PARTIAL_SUFFIX):
            with contextlib.suppress(OSError), opened(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Younger ones may be between creation and flock.
                if time.time() - os.fstat(file).st_mtime > _TOUCH_SECONDS:
                    path.unlink(missing_ok=True)


class _Sum(NamedTuple):
    """What an entry was when it was made; kept beside it."""

    size: int
    crc32: int
    mtime_ns: int

    def encoded(self) -> bytes:
        return " ".join(map(str, self)).encode()


class _Summed:
    """A file that is written once, from start to end, and summed up on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self.crc32 = 0
        self._file = file

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


def _is_whole(path: Path) -> bool:
    """Whether an entry is there, and is what was made. Its bytes are read once a machine, see `verified`."""
    try:
        kept = _Sum(*map(int, read_small(path.with_suffix(_SUM_SUFFIX), _SUM_BYTES).split()))
        with opened(path) as file:
            status = os.fstat(file)
            if status.st_size != kept.size or is_noted(path, status):
                return status.st_size == kept.size
            if status.st_mtime_ns == kept.mtime_ns and not os.access(path.parent, os.W_OK):
                return True  # no note can be kept here, and to read all of it at each opening would be dear
            crc32 = 0
            while data := os.read(file, _BLOCK_BYTES):
                crc32 = zlib.crc32(data, crc32)
        if crc32 != kept.crc32:
            return False
        note(path, status)
        return True
    except (FileNotFoundError, ValueError, TypeError):
        return False


def _last_used(path: Path, status: os.stat_result) -> float:
    mark = status_of(path.with_suffix(_USED_SUFFIX))
    return status.st_mtime if mark is None else mark.st_mtime


def _files_in(folder: Path, suffix: str) -> list[Path]:
    return [folder / name for name in names_in(folder) if name.endswith(suffix)]

"""The cache folder: decompressed shards within a size cap, and files of other kinds. Safe for concurrent processes.

Everything appears by rename, so a reader sees a whole file or none. Makers of the same entry wait for one another on a
file lock that the kernel drops with its process: nothing left behind can block a later run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

from orchdata.loaders.storage.atomic import create_beside, remove, write_once
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.verified import forget, is_noted, note

CACHE_VARIABLE = "ORCHDATA_CACHE"
_TOUCH_SECONDS = 60.0
_ENTRY_SUFFIX = ".tar"
_PARTIAL_SUFFIX = ".part"
_USED_SUFFIX = ".used"
_SUM_SUFFIX = ".sum"
_BLOCK_BYTES = 1 << 20


class CacheFolder:
    """A folder for what can be made again.

    Args:
        root: the folder; default: $ORCHDATA_CACHE, else ~/.cache/orchdata. Made when first written to.
        max_bytes: cap on the decompressed shards in it, all together. The least recently opened go first.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, max_bytes: int = 256 << 30) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self.root = Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/orchdata") if root is None else Path(root)
        try:
            self.root = self.root.expanduser().absolute()
        except RuntimeError as error:  # no $HOME, and the user has no entry in the system's list
            raise OSError(f"no cache folder: {self.root} needs a home directory; set {CACHE_VARIABLE}") from error
        self.max_bytes = max_bytes

    def make(self, kind: str) -> Path:
        """The folder of files of some kind, made. Nothing evicts them.

        Raises StorageError where it cannot be made.
        """
        folder = self.root / kind
        if not tried(str(folder), "cannot be looked at", folder.is_dir):
            tried(str(folder), "cannot be made", lambda: folder.mkdir(parents=True, exist_ok=True))
        return folder

    def file(self, kind: str, name: str) -> Path:
        """Path of a file of some kind, its folder made. Raises as `make`."""
        return self.make(kind) / name

    def entry(self, name: str, make: Callable[[IO[bytes], int], None]) -> Path:
        """Path of a decompressed shard, made by `make(file, limit)` if it is not there.

        `limit` is the cap on its size. What `make` raises is passed on, and leaves nothing; what the system refuses is
        tried again, from the start.
        Another process may evict the entry before it is opened: then ask again. One that is there is only looked at: a
        complete cache may be read-only, and another user's.

        Raises StorageError where the cache cannot be written.
        """
        path = self.root / "shards" / (name + _ENTRY_SUFFIX)
        if not tried(str(path), "cannot be read", lambda: _is_whole(path)):
            self.make("shards")
            tried(str(path), "cannot be written", lambda: self._make(name, path, make))
        self._mark_used(path)
        return path

    def _make(self, name: str, path: Path, make: Callable[[IO[bytes], int], None]) -> None:
        with self._lock(name):
            if _is_whole(path):  # made while we waited
                return
            self._remove_partials(path.parent)
            descriptor, partial = create_beside(path, _PARTIAL_SUFFIX)
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
                    os.replace(partial, path)
                    note(path, os.fstat(file.fileno()))
            except BaseException:
                remove(partial)
                if not path.exists():
                    remove(path.with_suffix(_SUM_SUFFIX))
                raise

    def _mark_used(self, path: Path) -> None:
        """Best effort. A file beside the entry, whose own times tell that it is what was opened."""
        mark = path.with_suffix(_USED_SUFFIX)
        with contextlib.suppress(OSError):
            try:
                fresh = time.time() - mark.stat().st_mtime <= _TOUCH_SECONDS
            except FileNotFoundError:
                fresh = False
            if not fresh:
                mark.touch()

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        path = self.file("locks", name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:
            if not path.exists():
                raise
            # Another user's: to lock it, reading is enough.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _evict(self, folder: Path, needed: int) -> None:
        """Make room for `needed` bytes below the cap; what may not be removed, being another user's, stays."""
        entries: list[tuple[float, int, Path]] = []
        for path in folder.glob("*" + _ENTRY_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((_last_used(path, status), status.st_size, path))
        held = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if held + needed <= self.max_bytes:
                break
            remove(path)  # whoever has it open keeps it until closed
            for suffix in (_USED_SUFFIX, _SUM_SUFFIX):
                remove(path.with_suffix(suffix))
            forget(path)
            if not path.exists():
                held -= size

    def _remove_partials(self, folder: Path) -> None:
        """Remove what makers that were killed left behind: nobody holds a lock on it."""
        for path in folder.glob("*" + _PARTIAL_SUFFIX):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Younger ones may be between creation and flock.
                if time.time() - os.fstat(file.fileno()).st_mtime > _TOUCH_SECONDS:
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
        kept = _Sum(*map(int, path.with_suffix(_SUM_SUFFIX).read_bytes().split()))
        status = path.stat()
        if status.st_size != kept.size or is_noted(path, status):
            return status.st_size == kept.size
        if status.st_mtime_ns == kept.mtime_ns and not os.access(path.parent, os.W_OK):
            return True  # no note can be kept here, and to read all of it at each opening would be dear
        crc32 = 0
        with open(path, "rb") as file:
            while data := file.read(_BLOCK_BYTES):
                crc32 = zlib.crc32(data, crc32)
        if crc32 != kept.crc32:
            return False
        note(path, status)
        return True
    except (FileNotFoundError, ValueError, TypeError):
        return False


def _last_used(path: Path, status: os.stat_result) -> float:
    with contextlib.suppress(OSError):
        return path.with_suffix(_USED_SUFFIX).stat().st_mtime
    return status.st_mtime

"""The cache folder: decompressed shards within a size cap, and files of other kinds. Safe for concurrent processes.

Everything appears by rename, so a reader sees a whole file or none. Makers of the same entry wait for one another on a
file lock that the kernel drops with its process: nothing left behind can block a later run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

CACHE_VARIABLE = "ORCHDATA_CACHE"
_TOUCH_SECONDS = 60.0
_ENTRY_SUFFIX = ".tar"
_PARTIAL_SUFFIX = ".part"


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

    def file(self, kind: str, name: str) -> Path:
        """Path of a file of some kind, its folder made. Nothing evicts it; write it with `write_atomically`."""
        folder = self.root / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def entry(self, name: str, make: Callable[[IO[bytes], int], None]) -> Path:
        """Path of a decompressed shard, made by `make(file, limit)` if it is not there.

        `limit` is the cap on its size. What `make` raises is passed on, and leaves nothing.
        Another process may evict the entry before it is opened: then ask again.
        """
        path = self.file("shards", name + _ENTRY_SUFFIX)
        if self._touch(path):
            return path
        with self._lock(name):
            if self._touch(path):  # made while we waited
                return path
            self._remove_partials(path.parent)
            descriptor, partial = tempfile.mkstemp(prefix=f"{name}.", suffix=_PARTIAL_SUFFIX, dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # tells others that its maker lives
                    make(file, self.max_bytes)
                    file.flush()
                    os.fsync(file.fileno())
                    self._evict(path.parent, os.fstat(file.fileno()).st_size)
                    Path(partial).rename(path)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
        return path

    def _touch(self, path: Path) -> bool:
        """Whether an entry is there; marks it as used."""
        try:
            # Modification time is the time of last use: access times are often not kept (noatime).
            if time.time() - path.stat().st_mtime > _TOUCH_SECONDS:
                os.utime(path)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        with open(self.file("locks", name), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _evict(self, folder: Path, needed: int) -> None:
        """Make room for `needed` bytes below the cap."""
        entries: list[tuple[float, int, Path]] = []
        for path in folder.glob("*" + _ENTRY_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime, status.st_size, path))
        held = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if held + needed <= self.max_bytes:
                break
            path.unlink(missing_ok=True)  # whoever has it open keeps it until closed
            held -= size

    def _remove_partials(self, folder: Path) -> None:
        """Remove what makers that were killed left behind: nobody holds a lock on it."""
        for path in folder.glob("*" + _PARTIAL_SUFFIX):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Younger ones may be between mkstemp and flock.
                if time.time() - os.fstat(file.fileno()).st_mtime > _TOUCH_SECONDS:
                    path.unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file so that it is there whole or not at all, even after a crash: temporary file, fsync, rename."""
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_PARTIAL_SUFFIX, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).chmod(0o666 & ~_umask())
        Path(partial).replace(path)
    except OSError as error:
        Path(partial).unlink(missing_ok=True)
        raise named(error, path) from error
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def named(error: OSError, path: Path) -> OSError:
    """The error with the file it is about: a write to a full disk does not say."""
    return OSError(error.errno, os.strerror(error.errno), str(path)) if error.errno and not error.filename else error


def _umask() -> int:
    # There is no way to ask without setting it, and setting it concerns all threads: Linux shows it here.
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022

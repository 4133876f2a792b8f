"""Entries of a folder: large files that are written once, with their checksums, and can be made again.

partial file, locked by its writer --checksum next to it--> renamed --note that it was verified--> entry
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
import zlib
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple, cast

from orchdata.loaders.storage.atomic import (
    create_temporary,
    move,
    names_in,
    opened,
    read_small,
    record_use,
    remove,
    status_of,
    write_once,
)
from orchdata.loaders.storage.remote.urls import identity
from orchdata.loaders.storage.sealed import forget, is_noted, note
from orchdata.loaders.storage.storage import FileVersion

PARTIAL_SUFFIX: Final = ".part"
SUM_SUFFIX: Final = ".sum"
TOUCH_SECONDS: Final = 60.0
_SUM_BYTES: Final = 256
_BLOCK_BYTES: Final = 1 << 20


class Sum(NamedTuple):
    """Size, checksum and mtime of an entry when it was written, and `changed_ns` of its source; stored next to it."""

    size: int
    crc32: int
    mtime_ns: int
    changed_ns: int = 0

    def encoded(self) -> bytes:
        return " ".join(map(str, self)).encode()


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
            write_once(path.with_suffix(SUM_SUFFIX), kept.encoded())
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


def is_entry(path: Path) -> bool:
    """Return whether a file is an entry: a folder of this name may have shards of the user's own."""
    try:
        return sum_of(path) is not None
    except OSError:
        return False


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
            while data := os.read(file, _BLOCK_BYTES):
                crc32 = zlib.crc32(data, crc32)
        if crc32 != kept.crc32:
            return False
        note(path, status)
        return True
    except FileNotFoundError:
        return False


def mark_used(path: Path) -> None:
    """Record the use of an entry as the time of its checksum; best effort."""
    record_use(path.with_suffix(SUM_SUFFIX), TOUCH_SECONDS)


def entries(folder: Path, suffix: str, stay: Container[str] = ()) -> list[Entry]:
    """Return the entries of a folder, the least recently used one first, without those whose stems `stay`."""
    found: list[Entry] = []
    for path in _files_in(folder, suffix):
        status = status_of(path) if path.stem not in stay else None
        if status is not None and is_entry(path):
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
    for path in _files_in(folder, PARTIAL_SUFFIX):
        if not path.name.startswith("."):  # not ours
            continue
        with contextlib.suppress(OSError), opened(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file).st_mtime > older_than_seconds:
                path.unlink(missing_ok=True)


def last_used(path: Path, status: os.stat_result) -> float:
    """Return when an entry was last used, as it was recorded. Raises OSError."""
    kept = status_of(path.with_suffix(SUM_SUFFIX))
    return status.st_mtime if kept is None else kept.st_mtime


def _files_in(folder: Path, suffix: str) -> Iterator[Path]:
    return (folder / name for name in names_in(folder) if name.endswith(suffix))

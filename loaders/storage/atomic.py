"""Files that appear completely or not at all: written under a temporary name in the same folder, then renamed.

Writers of the same path do not disturb each other: the last one wins. A link with the name is replaced, and never
followed. Permissions follow the umask. So a reader sees a whole file or none. A job whose file is removed still has it
open, and lends it to its workers.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from orchdata.loaders.errors import OF_THE_FILE
from orchdata.loaders.storage.storage import storage_error, tried

Buffer = bytes | bytearray | memoryview

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def new_file(path: str | Path, *, sync: bool = False) -> Iterator[int]:
    """Open a new file that replaces `path` when the block ends without an error, if wanted synced before; yields its
    descriptor. Raises OSError.
    """
    fd, temporary = create_temporary(path, TEMPORARY_SUFFIX)
    try:
        try:
            yield fd
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)  # network file systems may raise here that the disk is full
        move(temporary, path)
    except BaseException:
        remove(temporary)
        raise


@contextmanager
def replaced(path: str | Path) -> Iterator[int]:
    """Open a large file as `new_file` does, synced before it appears. Raises StorageError if it cannot be written."""
    try:
        with new_file(path, sync=True) as fd:
            yield fd
    except OSError as error:
        raise storage_error(str(path), "cannot be written", error) from error


def write_whole(path: str | Path, data: Buffer, *, head: bytes = b"") -> None:
    """Write a small file, `head` first, with some attempts. Raises StorageError if all of them fail."""
    tried(str(path), "cannot be written", lambda: write_once(path, data, head=head))


def write_once(path: str | Path, data: Buffer, *, head: bytes = b"") -> None:
    """Write a small file. Raises OSError."""
    with new_file(path) as fd:
        write_at(fd, head, 0)
        write_at(fd, data, len(head))


def write_at(fd: int, data: Buffer, offset: int) -> None:
    """Write all of `data`. Raises OSError."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, offset = view[written:], offset + written


def create_temporary(path: str | Path, suffix: str) -> tuple[int, str]:
    """Create a hidden file in the folder of `path`; return its descriptor (read, write) and name. Raises OSError."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}{suffix}")
    return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), temporary


def move(temporary: str | Path, path: str | Path) -> None:
    """Rename a file, replacing any file with that name. Raises OSError."""
    while True:
        try:
            os.replace(temporary, path)
        except InterruptedError:  # of a network file system: Python repeats other calls itself, and not this one
            continue
        except IsADirectoryError:
            raise OSError(errno.EISDIR, f"a folder has the name {path}: remove it") from None
        return


def remove(path: str | Path) -> None:
    """Remove a file if it exists; best effort."""
    with suppress(OSError):
        os.unlink(path)


USE_SECONDS: Final = 3600.0
"""A use is recorded if the last one was recorded so long ago."""
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # without it, opening a named pipe waits for a writer


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a file for reading; yields its descriptor. Raises OSError, FileNotFoundError if it is missing."""
    fd = os.open(path, _FLAGS)
    try:
        yield fd
    finally:
        os.close(fd)


class Lent(NamedTuple):
    """A file that another process of this machine has open: where the system shows its descriptor; and device, inode,
    size and mtime, which a file of another process or machine does not share.
    """

    path: str
    identity: tuple[int, ...]


def lend(fd: int) -> Lent:
    """Return what another process opens the file of a descriptor with, as long as this process has it open. Raises
    StorageError.
    """
    path = f"/proc/{os.getpid()}/fd/{fd}"
    return Lent(path, _identity(tried(path, "cannot be looked at", lambda: os.fstat(fd))))


@contextmanager
def opened_lent(path: str | Path, lent: Lent | None) -> Iterator[int]:
    """Open a file that another process lends; if it does not any more, or elsewhere, by its path as `opened`."""
    fd = None
    if lent is not None:
        with suppress(OSError):
            fd = os.open(lent.path, _FLAGS)
            if _identity(os.fstat(fd)) != lent.identity:
                os.close(fd)
                fd = None
    if fd is None:
        fd = os.open(path, _FLAGS)
    try:
        yield fd
    finally:
        os.close(fd)


def read_small(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the content of a small file, which may be a link. Raises FileNotFoundError; ValueError if it is no regular
    file, or larger; OSError if it cannot be read now.
    """
    with opened(path) as fd:
        _check_regular(path, os.fstat(fd))
        content = b""
        while piece := os.read(fd, most_bytes + 1 - len(content)):
            content += piece
    if len(content) > most_bytes:
        raise ValueError(f"{os.fspath(path)} has more than {most_bytes:,} bytes: no such file needs that many")
    return content


def check_given(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a path from a user is not a regular file, OSError if it does not exist."""
    _check_regular(path, os.stat(path))


def status_of(path: str | Path) -> os.stat_result | None:
    """Return the status of a regular file; None if there is none with this name. Raises OSError."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def names_in(folder: str | Path) -> list[str]:
    """Return the names in a folder; none if it is missing. Raises OSError."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def record_use(path: str | Path, seconds: float = USE_SECONDS) -> None:
    """Record a use as the time of a small file next to the used one, if the last was so long ago; best effort. A change
    of the time of the file itself would tell its readers that it was changed.
    """
    with suppress(OSError):
        if time.time() - os.stat(path).st_mtime > seconds:
            os.utime(path)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{os.fspath(path)} is not a regular file, but a folder, pipe or device: name a file")


def is_there(path: str) -> bool:
    """Return whether a path exists. Raises StorageError if the system cannot tell."""
    return status_at(path) is not None


def is_folder(path: str) -> bool:
    """Return whether a path is a folder. Raises StorageError if the system cannot tell."""
    status = status_at(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def status_at(path: str) -> os.stat_result | None:
    """Return the status of a path, or None if it does not exist. Raises StorageError if the system cannot tell."""

    def status() -> os.stat_result | None:
        try:
            return os.stat(path)
        except OSError as error:
            if error.errno in OF_THE_FILE:
                return None
            raise

    return tried(path, "cannot be looked at", status)

"""Files in a folder that other users may write to, such as the cache folder. All its files are opened here, and small
files that a user names, which may be links (`read_given`).

Only regular files are used. A link, a named pipe, a socket, a device or a folder with the name of a file is treated as
missing: it is not followed, not waited for and not written to. The folder itself must not be a link either.

Files are written by renaming (`storage.atomic`), which replaces any file with that name, and does not touch the target
of a link or other names of the file. So no file of another user is ever written to. Only locks are opened in place, and
nothing is written to them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from orchdata.loaders.errors import StorageError

_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # without it, opening a named pipe waits for a writer
_NO_FILE: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.ENOTDIR})
"""Errors when opening a link, a socket, a folder, a missing device, or a path below a file."""
_WAY_OUT: Final = "remove it, or set ORCHDATA_CACHE to a folder that only people you trust can write to"


@contextmanager
def opened(path: str | Path) -> Iterator[int]:
    """Open a regular file for reading; yields its descriptor.

    Raises:
        FileNotFoundError: there is no regular file with this name.
        OSError: it cannot be opened now.
    """
    fd = _open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


class Lent(NamedTuple):
    """A file that another process of this machine has open, with a name in the cache folder or without one.

    Attributes:
        path: where the system shows the other process's descriptor.
        identity: device, inode, size and mtime, which a file of another process or machine does not share.
    """

    path: str
    identity: tuple[int, ...]


def lend(fd: int) -> Lent:
    """Return what another process opens the file of a descriptor with, as long as this process has it open."""
    return Lent(f"/proc/{os.getpid()}/fd/{fd}", _identity(os.fstat(fd)))


@contextmanager
def opened_lent(path: str | Path, lent: Lent | None) -> Iterator[int]:
    """Open a file that another process lends; if it does not any more, or elsewhere, by its path as `opened`."""
    fd = None if lent is None else _open_lent(lent)
    if fd is None:
        fd = _open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def read_small(path: str | Path, most_bytes: int) -> bytes:
    """Return the content of a small file. Raises as `opened`, and ValueError for a larger file."""
    with opened(path) as fd:
        pieces, size = [], 0
        while piece := os.read(fd, most_bytes + 1 - size):
            pieces.append(piece)
            size += len(piece)
    if size > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes} bytes")
    return b"".join(pieces)


def read_given(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the content of a file that a user names, which may be a link.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a regular file, or has more bytes.
        OSError: it cannot be read now.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_regular(path, os.fstat(fd))
        with open(fd, "rb", closefd=False) as file:
            content = file.read(most_bytes + 1)
    finally:
        os.close(fd)
    if len(content) > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes:,} bytes: no such file needs that many")
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
    """Return the names in a folder; none if it is not a folder, or a link to one. Raises OSError."""
    if _is_link(folder):
        return []
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def open_lock(path: str | Path) -> int:
    """Open a lock file, only to lock it; create it if it is missing. Return its descriptor.

    Raises:
        StorageError: something other than a file has its name, or the file has other names, which would be locked too.
        OSError: it cannot be opened now.
    """
    try:
        try:
            fd = _open(path, os.O_RDWR | os.O_CREAT)
        except PermissionError:
            if not os.path.lexists(path):
                raise
            fd = _open(path, os.O_RDONLY)  # another user's lock: permission to read is enough to lock it
    except FileNotFoundError:
        if os.path.lexists(path):
            raise _refused(path, "is not a regular file, and cannot be a lock") from None
        raise
    if os.fstat(fd).st_nlink > 1:
        os.close(fd)
        raise _refused(path, "has other names (hard links), and cannot be a lock")
    return fd


def make_folder(folder: Path) -> None:
    """Create a folder inside an existing folder, unless it exists.

    Raises:
        StorageError: a link or a file has its name.
        OSError: it cannot be created now.
    """
    try:
        if not os.path.lexists(folder):
            folder.mkdir()
    except FileExistsError:
        if not os.path.lexists(folder):  # it was removed again, or the system was wrong: it can be created later
            raise
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise _refused(folder, "is a link or a file, not a folder")


def _open(path: str | Path, flags: int) -> int:
    """Open a file. Raises FileNotFoundError if it is not a regular file."""
    if _is_link(os.path.dirname(path) or "."):
        raise _not_there(path)
    try:
        fd = os.open(path, flags | _FLAGS, 0o666)
    except OSError as error:
        # Failing storage may give the same errors for a regular file, and for one that is to be created.
        may_be_missing = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        if error.errno in _NO_FILE and not may_be_missing and status_of(path) is None:
            raise _not_there(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _not_there(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_lent(lent: Lent) -> int | None:
    fd = None
    try:
        fd = os.open(lent.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if _identity(os.fstat(fd)) == lent.identity:
            return fd
    except OSError:
        pass
    if fd is not None:
        os.close(fd)
    return None


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{os.fspath(path)} is not a regular file, but a folder, pipe or device: name a file")


def _is_link(folder: str | Path) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(folder).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _not_there(path: str | Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))


def _refused(path: str | Path, what: str) -> StorageError:
    return StorageError(os.fspath(path), f"{what}: {_WAY_OUT}", errno.ELOOP)

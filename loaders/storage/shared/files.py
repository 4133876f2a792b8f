"""Files of a folder that other users may write to, as the cache folder is. Every file in it is opened here; small files
that a user names too, which may be links (`read_given`).

Only a regular file counts. A link, a named pipe, a socket, a device or a folder in the place of a file is as good as
not there: it is not followed, not waited for and not written to. The folder itself may be no link either.

Files are written by renaming (`storage.atomic`), which replaces whatever has the name and leaves alone what a link
points to, and what other names a file has. So no file of another user is ever written to or touched. Locks alone are
opened in place, and nothing is written to them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from orchdata.loaders.errors import StorageError

_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # the open of a named pipe would wait for its writer
_NO_FILE: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.ENOTDIR})
"""What the open of a link, a socket, a folder, a device that is not there, or below a file, says."""
_WAY_OUT: Final = "remove it, or set ORCHDATA_CACHE to a folder that only people you trust can write to"


@contextmanager
def opened(path: str | Path) -> Iterator[int]:
    """A descriptor to read a regular file.

    Raises:
        FileNotFoundError: there is no regular file of this name.
        OSError: it cannot be opened now.
    """
    fd = _open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def read_small(path: str | Path, most_bytes: int) -> bytes:
    """The content of a small file. Raises as `opened`, and ValueError for a larger file."""
    with opened(path) as fd:
        pieces, size = [], 0
        while piece := os.read(fd, most_bytes + 1 - size):
            pieces.append(piece)
            size += len(piece)
    if size > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes} bytes")
    return b"".join(pieces)


def read_given(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The content of a file that a user names, which may be a link.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no regular file, or has more bytes.
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
        raise ValueError(f"{path} has more than {most_bytes:,} bytes, which no such file needs")
    return content


def check_given(path: str | os.PathLike[str]) -> None:
    """Raise ValueError where a name that a user gives is not that of a regular file, OSError where there is none."""
    _check_regular(path, os.stat(path))


def status_of(path: str | Path) -> os.stat_result | None:
    """The status of a regular file; None where there is none of this name. Raises OSError."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def names_in(folder: str | Path) -> list[str]:
    """The names in a folder; none where it is no folder, or a link to one. Raises OSError."""
    if _is_link(folder):
        return []
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def open_lock(path: str | Path) -> int:
    """A descriptor of a lock file, made where it is missing; to lock it, and for nothing else.

    Raises:
        StorageError: something else has its name, or the file has other names too, whose locks it would take.
        OSError: it cannot be opened now.
    """
    try:
        try:
            fd = _open(path, os.O_RDWR | os.O_CREAT)
        except PermissionError:
            if not os.path.lexists(path):
                raise
            fd = _open(path, os.O_RDONLY)  # of another user: to lock it, reading is enough
    except FileNotFoundError:
        if os.path.lexists(path):
            raise _refused(path, "is no regular file, which a lock has to be") from None
        raise
    if os.fstat(fd).st_nlink > 1:
        os.close(fd)
        raise _refused(path, "has other names (hard links), and cannot be a lock")
    return fd


def make_folder(folder: Path) -> None:
    """Make a folder inside of a folder that is there; it may be there already.

    Raises:
        StorageError: a link or a file has its name.
        OSError: it cannot be made now.
    """
    with suppress(FileExistsError):
        if not os.path.lexists(folder):
            folder.mkdir()
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise _refused(folder, "is a link or a file in the place of a folder")


def _open(path: str | Path, flags: int) -> int:
    """Raises FileNotFoundError for what is no regular file."""
    if _is_link(os.path.dirname(path) or "."):
        raise _not_there(path)
    try:
        fd = os.open(path, flags | _FLAGS, 0o666)
    except OSError as error:
        # Storage in trouble may say the same of a regular file.
        if error.errno in _NO_FILE and status_of(path) is None:
            raise _not_there(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _not_there(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{os.fspath(path)} is no regular file, but a folder, pipe or device: name a file")


def _is_link(folder: str | Path) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(folder).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _not_there(path: str | Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))


def _refused(path: str | Path, what: str) -> StorageError:
    return StorageError(os.fspath(path), f"{what}: {_WAY_OUT}", errno.ELOOP)

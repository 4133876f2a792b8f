"""Files that appear whole or not at all: written beside their place, then moved into it.

Writers of the same path do not disturb each other: the last one wins. A link in that place is replaced and never
followed. Permissions follow the umask, and for a copy those of its source too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchdata.loaders.storage.retries import storage_error, tried
from orchdata.loaders.storage.shared.access import Access, create

Buffer = bytes | bytearray | memoryview

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def new_file(path: str | Path, *, sync: bool = False, access: Access | None = None) -> Iterator[int]:
    """A descriptor of a new file that takes the place of `path` when the block ends without an error.

    Args:
        path: where; its folder is there.
        sync: have it on the disk before it takes its place.
        access: what its permissions may allow at most.

    Raises OSError.
    """
    fd, temporary = create_beside(path, TEMPORARY_SUFFIX, access)
    try:
        try:
            yield fd
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)  # where network file systems say that the disk is full
        move(temporary, path)
    except BaseException:
        remove(temporary)
        raise


@contextmanager
def replaced(path: str | Path, access: Access | None = None) -> Iterator[int]:
    """`new_file` for a large file, on the disk when it appears. Raises StorageError where it cannot be written."""
    try:
        with new_file(path, sync=True, access=access) as fd:
            yield fd
    except OSError as error:
        raise storage_error(str(path), "cannot be written", error) from error


def write_whole(path: str | Path, data: Buffer, access: Access | None = None) -> None:
    """Write a small file, again where the system refuses. Raises StorageError where it goes on refusing."""
    tried(str(path), "cannot be written", lambda: write_once(path, data, access))


def write_once(path: str | Path, data: Buffer, access: Access | None = None) -> None:
    """Write a small file. Raises OSError."""
    with new_file(path, access=access) as fd:
        write_at(fd, data, 0)


def write_at(fd: int, data: Buffer, offset: int) -> None:
    """Write all of `data`. Raises OSError."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, offset = view[written:], offset + written


def create_beside(path: str | Path, suffix: str, access: Access | None = None) -> tuple[int, str]:
    """A new hidden file in the folder of `path`: its descriptor, to read and write, and its name. Raises OSError."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}{suffix}")
    return create(temporary, access), temporary


def move(temporary: str | Path, path: str | Path) -> None:
    """Give a file its name, in place of what has it. Raises OSError."""
    try:
        os.replace(temporary, path)
    except IsADirectoryError:
        raise OSError(errno.EISDIR, f"a folder is in the place of {path}: remove it") from None


def remove(path: str | Path) -> None:
    """Remove a file, if it is there and may be removed."""
    with suppress(OSError):
        os.unlink(path)

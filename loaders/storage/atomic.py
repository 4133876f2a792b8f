"""Files that appear completely or not at all: written under a temporary name in the same folder, then renamed.

Writers of the same path do not disturb each other: the last one wins. A link with the name is replaced, and never
followed. Permissions follow the umask.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchdata.loaders.storage.retries import storage_error, tried

Buffer = bytes | bytearray | memoryview

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def new_file(path: str | Path, *, sync: bool = False) -> Iterator[int]:
    """Open a new file that replaces `path` when the block ends without an error; yields its descriptor.

    Args:
        path: of the file; its folder exists.
        sync: write it to the disk before the renaming.

    Raises OSError.
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
    """Write a small file, with some attempts. Raises StorageError if all of them fail.

    Args:
        head: comes before the data.
    """
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

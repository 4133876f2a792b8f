"""Local files as storage, and files that appear completely or not at all.

The latter are written under a temporary name in the same folder, then renamed. Writers of the same path do not disturb
each other: the last one wins. A link with the name is replaced, and never followed. Permissions follow the umask. So a
reader sees a whole file or none. A job whose file is removed still has it open, and lends it to its workers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from orchdata.loaders.errors import OF_THE_FILE, ShardError, StaleIndexError
from orchdata.loaders.storage.storage import ByteCount, ContentDigest, FileVersion, Storage, retry, storage_error, tried

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


T = TypeVar("T")


class _Descriptor:
    """An open descriptor, which is closed with the last reference to it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)


class LocalFile(Storage):
    """A local file. It is not mapped: truncating a mapped file kills the process (SIGBUS). Running reads of other
    threads keep the descriptor open, so that after `close` they never read another file with the same number. Without
    `close` it is closed with the object. Raises StorageError if it cannot be opened now; ShardError if it is no regular
    file.

    Args:
        url: its name in errors; default: the path.
        follow: whether the path may be a link.
        count: adds up the bytes that are read.
    """

    def __init__(
        self, path: str | Path, *, url: str | None = None, follow: bool = True, count: ByteCount | None = None
    ) -> None:
        self.url = os.fspath(path) if url is None else url
        self._path = path
        self._follow = follow
        self.count = count
        fd = tried(self.url, "cannot be opened", self._open)
        self._descriptor: _Descriptor | None = _Descriptor(fd)
        status = tried(self.url, "cannot be opened", lambda: os.fstat(fd))
        if not stat.S_ISREG(status.st_mode):
            self._descriptor = None
            raise ShardError(self.url, "cannot be opened: not a regular file")
        self.size = status.st_size
        self.version = str(status.st_mtime_ns)
        self.changed_ns = status.st_ctime_ns
        self._opened = status

    def read(self, offset: int, size: int) -> bytes:
        data = self._reading(read_at, offset, size)
        if self.count is not None:
            self.count.add(len(data))
        return data

    def read_into(self, offset: int, buffer: memoryview) -> int:
        got = self._reading(read_into_at, offset, buffer)
        if self.count is not None:
            self.count.add(got)
        return got

    def _reading(self, read: Callable[[int, int, Any], T], offset: int, what: Any) -> T:
        held = self._held()
        try:
            return read(held.number, offset, what)
        except OSError as error:

            def reopened() -> T:
                try:
                    return read(held.number, offset, what)
                except OSError as error:
                    if error.errno != errno.ESTALE:
                        raise
                self._reopen(held.number)
                return read(held.number, offset, what)

            return retry(self.url, f"cannot be read at {offset}", reopened, error)

    def _held(self) -> _Descriptor:
        """Return the descriptor, which is open as long as it is held. Raises ValueError after `close`."""
        if (held := self._descriptor) is None:
            raise ValueError(f"{self.url}: read after close")
        return held

    def check_unchanged(self) -> None:
        held, then = self._held(), self._opened
        now = tried(self.url, "cannot be looked at", lambda: os.fstat(held.number))
        same = now.st_size == then.st_size and now.st_mtime_ns == then.st_mtime_ns
        # Removing a file changes its ctime too, but its content stays readable through open descriptors.
        if not same or (now.st_ctime_ns != then.st_ctime_ns and now.st_nlink):
            raise StaleIndexError(
                self.url,
                f"was changed while it was open (size {then.st_size} to {now.st_size}, modification time "
                f"{_seconds(then)} to {_seconds(now)}): run `orchdata index` again, or, if it is still the same file, "
                "restart from the last checkpoint",
            )

    def is_as_opened(self) -> bool:
        """Return whether it was neither written to, nor moved or removed, since it was opened. Raises OSError."""
        held = self._held()
        now, then = os.fstat(held.number), self._opened
        return now.st_nlink > 0 and (now.st_size, now.st_mtime_ns, now.st_ctime_ns) == (
            then.st_size,
            then.st_mtime_ns,
            then.st_ctime_ns,
        )

    def close(self) -> None:
        self._descriptor = None

    def _open(self) -> int:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        links = 0 if self._follow else os.O_NOFOLLOW
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | links)
        if not self._follow:  # a copy, whose bytes would stay on the disk while it is open: none is made in its place
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return fd

    def _reopen(self, fd: int) -> None:
        """Open the file again under the same descriptor, after a network file system dropped its handle."""
        fresh = self._open()
        try:
            status = os.fstat(fresh)
            if (status.st_size, status.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
                raise StaleIndexError(self.url, "was replaced while it was open: run `orchdata index` again")
            os.dup2(fresh, fd, inheritable=False)
            self._opened = status
        finally:
            os.close(fresh)


class LocalFolder(Storage):
    """A folder as one shard: the files below it, as they were when it was opened. Its version changes with the name,
    size or modification time of any of them.
    """

    def __init__(self, path: str) -> None:
        self.url = path
        self._files = dict(_below(path))
        self.size, self.version = _joined(self._files)

    def checksum(self) -> str:
        """Return the checksum of the names and contents of all files. Raises StaleIndexError if one was changed."""
        digest = blake2b(digest_size=16)
        for name, then in self._files.items():
            file = LocalFile(f"{self.url}/{name}")
            try:
                if (file.size, file.version) != then:
                    raise StaleIndexError(
                        self.url, f"its file {name} was changed while it was open: run `orchdata index` again"
                    )
                content = ContentDigest(file).hexdigest()
            finally:
                file.close()
            digest.update(f"{name}\0{content}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def read(self, offset: int, size: int) -> bytes:
        raise ShardError(self.url, "is a folder, which has no bytes of its own: open one of its files")


def version(path: str, *, retries: bool = True) -> FileVersion | None:
    """Return the version of a file, or of all files below a folder; None if it does not exist. Raises StorageError."""
    if retries:
        status = status_at(path)
    else:
        try:
            status = os.stat(path)
        except OSError as error:
            if error.errno not in OF_THE_FILE:
                raise storage_error(path, "cannot be looked at", error) from error
            status = None
    if status is None:
        return None
    if stat.S_ISDIR(status.st_mode):
        return _joined(dict(_below(path)))
    return _version_of(status)


def file_number(path: str) -> Hashable | None:
    """Return a number that is equal for two paths of one file or folder, and seldom for two; None for no file."""
    # Network file systems reuse inodes, so an equal device and inode is not enough.
    status = status_at(path)
    is_file = status is not None and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))
    return (status.st_dev, status.st_ino) if status is not None and is_file else None


def why_same(path: str, other: str) -> str | None:
    """Return why two paths with one `file_number` are the same file, in words; None if they are not: their real paths
    must be equal, or the file has several links, and size and modification time are equal.
    """
    # Strict: otherwise a link that cannot be read for a moment would be taken for a plain folder.
    real, of_other = (
        tried(each, "cannot be looked at", partial(os.path.realpath, each, strict=True)) for each in (path, other)
    )
    if real == of_other:
        return f"both are {real}"
    first, second = status_at(path), status_at(other)
    if first is None or second is None or min(first.st_nlink, second.st_nlink) < 2 or stat.S_ISDIR(first.st_mode):
        return None
    return "hard links to it" if _version_of(first) == _version_of(second) else None


def _version_of(status: os.stat_result) -> FileVersion:
    return FileVersion(status.st_size, str(status.st_mtime_ns))


def _below(folder: str) -> Iterator[tuple[str, FileVersion]]:
    """Yield (name, version) of all files below a folder, by name. Hidden files and folders are left out."""

    def fail(error: OSError) -> None:
        raise error

    def listed() -> list[str]:
        names = []
        for path, folders, files in os.walk(folder, onerror=fail):
            folders[:] = [name for name in folders if not name.startswith(".")]
            shown = os.path.relpath(path, folder)
            names += [os.path.normpath(f"{shown}/{name}") for name in files if not name.startswith(".")]
        return sorted(names)

    for name in tried(folder, "cannot be listed", listed):
        status = status_at(f"{folder}/{name}")
        if status is not None and stat.S_ISREG(status.st_mode):
            yield name, _version_of(status)


def _joined(files: dict[str, FileVersion]) -> FileVersion:
    digest = blake2b(digest_size=16)
    for name, version in files.items():
        digest.update(f"{name}\0{version.size} {version.version}\0".encode("utf-8", "surrogateescape"))
    return FileVersion(sum(version.size for version in files.values()), digest.hexdigest())


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Read bytes of a file, fewer at its end. Raises OSError."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    pieces = [data]  # one pread returns at most 2 GiB, and may be interrupted
    got = len(data)
    while got < size and (data := os.pread(fd, size - got, offset + got)):
        pieces.append(data)
        got += len(data)
    return b"".join(pieces)


def read_into_at(fd: int, offset: int, buffer: memoryview) -> int:
    """Fill a buffer from a file. Return the number of bytes read, fewer at the end of the file. Raises OSError."""
    got = os.preadv(fd, [buffer], offset)
    while 0 < got < len(buffer):
        more = os.preadv(fd, [buffer[got:]], offset + got)
        if more == 0:
            break
        got += more
    return got


def _seconds(status: os.stat_result) -> str:
    return f"{max(status.st_mtime_ns, status.st_ctime_ns) / 1e9:.3f}"

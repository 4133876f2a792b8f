"""The folder that indexes are published in: in object storage, or on a file system that machines share.

A file is written whole or not at all, and `create` writes it only if there is none.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from orchdata.loaders.errors import StaleIndexError, StorageError
from orchdata.loaders.storage.atomic import create_temporary, remove, write_at, write_whole
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.remote.clients.client import Buffer
from orchdata.loaders.storage.remote.objects import Ahead, ObjectRange, Objects
from orchdata.loaders.storage.remote.urls import HTTP, is_remote, parsed, scheme_of
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.storage import FileVersion

_WINDOW_BYTES: Final = 64 << 20
"""Bytes of a large file that are asked for together; as many again are on their way."""
_THREADS: Final = 16
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Errors of file systems without hard links."""


class PublishedFolder(Protocol):
    """A folder with files in folders of their own. Names are relative, with "/". Methods raise StorageError.

    Attributes:
        url: the folder, without a final "/".
        can_list: whether names can be listed; HTTP servers cannot.
    """

    url: str
    can_list: bool

    def names(self, folder: str) -> dict[str, FileVersion]:
        """Return the files in a folder, by their names in it; none if there is no such folder."""
        ...

    def version(self, name: str) -> FileVersion | None:
        """Return size and version of a file; None if there is none."""
        ...

    def read(self, name: str, file: FileVersion) -> bytes | None:
        """Return the content of a small file; None if there is no such file of this size and version."""
        ...

    def copy_to(self, name: str, size: int, write: Callable[[Buffer], None]) -> bool:
        """Read a large file from its start to its end. Return False if there is no such file of this size."""
        ...

    def write(self, name: str, data: Buffer, *, create: bool = False) -> bool:
        """Write a file. Return False if `create` is given and there is one."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, those of them that are there."""
        ...


def opened_folder(url: str, files: Files) -> PublishedFolder:
    """Return the folder at a URL or path.

    Args:
        files: how objects of storage are read and written.
    """
    return _Stored(url, files.objects) if is_remote(url) else _Local(url)


class _Stored:
    """A folder in object storage."""

    def __init__(self, url: str, objects: Objects) -> None:
        self.url = url.rstrip("/")
        self.can_list = scheme_of(url) not in HTTP
        self._objects = objects

    def names(self, folder: str) -> dict[str, FileVersion]:
        root = f"{self.url}/{folder}/"
        start = len(parsed(root).key)
        return {each.key[start:]: each.file for page in self._objects.pages(root) for each in page}

    def version(self, name: str) -> FileVersion | None:
        return self._objects.version(f"{self.url}/{name}")

    def read(self, name: str, file: FileVersion) -> bytes | None:
        if not file.size:
            return b""
        try:
            return bytes(self._objects.read(ObjectRange(f"{self.url}/{name}", file, 0, file.size)))
        except (StorageError, StaleIndexError) as error:
            if _is_gone(error):
                return None
            raise

    def copy_to(self, name: str, size: int, write: Callable[[Buffer], None]) -> bool:
        url, file = f"{self.url}/{name}", FileVersion(size, "")
        windows = [(start, min(size, start + _WINDOW_BYTES)) for start in range(0, size, _WINDOW_BYTES)]
        ahead: list[Ahead] = []
        try:
            for number, (start, stop) in enumerate(windows):
                for begin, end in windows[len(ahead) : number + 2]:
                    ahead.append(self._objects.expect([ObjectRange(url, file, begin, end)]))
                write(self._objects.read(ObjectRange(url, file, start, stop)))
                ahead[number].close()
        except (StorageError, StaleIndexError) as error:
            if _is_gone(error):
                return False
            raise
        finally:
            for each in ahead:
                each.close()
        return True

    def write(self, name: str, data: Buffer, *, create: bool = False) -> bool:
        if not self.can_list:
            raise StorageError(self.url, "cannot be written: an HTTP server takes no files", errno.EROFS)
        return self._objects.put(f"{self.url}/{name}", data, create=create)

    def remove(self, names: Sequence[str]) -> None:
        if not names:
            return
        with ThreadPoolExecutor(min(_THREADS, len(names)), thread_name_prefix="orchdata-remove") as pool:
            list(pool.map(self._objects.delete, [f"{self.url}/{name}" for name in names]))


class _Local:
    """A folder of this machine, which others may share."""

    can_list = True

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def names(self, folder: str) -> dict[str, FileVersion]:
        path = f"{self.url}/{folder}"

        def listed() -> dict[str, FileVersion]:
            found = {}
            with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        with contextlib.suppress(FileNotFoundError):  # it was removed just now
                            found[entry.name] = _version_of(entry.stat())
            return found

        return tried(path, "cannot be listed", listed)

    def version(self, name: str) -> FileVersion | None:
        path = f"{self.url}/{name}"

        def look() -> FileVersion | None:
            try:
                return _version_of(os.stat(path))
            except FileNotFoundError:
                return None

        return tried(path, "cannot be looked at", look)

    def read(self, name: str, file: FileVersion) -> bytes | None:
        parts: list[Buffer] = []
        return b"".join(parts) if self.copy_to(name, file.size, parts.append) else None

    def copy_to(self, name: str, size: int, write: Callable[[Buffer], None]) -> bool:
        path = f"{self.url}/{name}"
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size != size:
                    return False
                while data := file.read(min(size, _WINDOW_BYTES)) if size else b"":
                    write(data)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StorageError(path, f"cannot be read: {error.strerror or error}", error.errno) from error
        return True

    def write(self, name: str, data: Buffer, *, create: bool = False) -> bool:
        path = Path(self.url, name)
        tried(str(path.parent), "cannot be created", lambda: path.parent.mkdir(parents=True, exist_ok=True))
        if not create:
            write_whole(path, data)
            return True
        return tried(str(path), "cannot be written", lambda: _created(path, data))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            remove(f"{self.url}/{name}")


def _created(path: Path, data: Buffer) -> bool:
    """Write a file under a name that no file has; it appears whole. Return False if one has it. Raises OSError."""
    fd, temporary = create_temporary(path, ".tmp")
    try:
        try:
            write_at(fd, data, 0)
        finally:
            os.close(fd)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _written_alone(path, data)
        return True
    finally:
        remove(temporary)


def _written_alone(path: Path, data: Buffer) -> bool:
    """As `_created`, on a file system without hard links: a killed process leaves a part of the file."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        write_at(fd, data, 0)
    finally:
        os.close(fd)
    return True


def _version_of(status: os.stat_result) -> FileVersion:
    return FileVersion(status.st_size, str(status.st_mtime_ns))


def _is_gone(error: StorageError | StaleIndexError) -> bool:
    """Return whether there is no such object, or another one now."""
    return isinstance(error, StaleIndexError) or error.is_absent

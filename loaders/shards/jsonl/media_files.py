"""Files below a folder, by names that data give: opened where they lie inside of it, and nothing else is touched."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.storage.retries import storage_error, tried

STAMP_BITS: Final = 23
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//)?")
_OF_THE_NAME: Final = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "no such file: a part of its path is none",
    errno.ELOOP: "its links go round in a circle",
    errno.ENAMETOOLONG: "too long for the name of a file; base64 is read where its first bytes are those of its media",
}


class MediaFile(NamedTuple):
    """An open file, and what tells it from another.

    Attributes:
        stamp: of its time of change, STAMP_BITS bits.
    """

    fd: int
    name: str
    size: int
    stamp: int

    def read(self, size: int) -> bytes:
        """The first `size` bytes; fewer where the file is shorter now. Raises StorageError."""
        return tried(self.name, "cannot be read", lambda: _read(self.fd, size))


class MediaFolder:
    """A folder that names from data are looked up in. Safe from many threads.

    Links inside of it are followed while they stay in it.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._real: str | None = None

    @contextmanager
    def open(self, name: str) -> Iterator[MediaFile]:
        """The file of that name.

        Raises:
            DecodeError: the name leads nowhere, out of the folder, or to what is no regular file.
            StorageError: it cannot be opened now, or the folder is not there.
        """
        path = f"{self.root}/{checked_name(name)}"
        real = self._real or self._find()
        # A path is looked at before it is opened for reading, and it is what was looked at that is opened: nothing of
        # a pipe or a device is touched, and no link can be put in between.
        place = tried(path, "cannot be opened", lambda: self._placed(path))
        try:
            status = os.fstat(place)
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError(f"{shown_name(name)} is no regular file")
            where = os.readlink(f"/proc/self/fd/{place}")
            if not where.startswith(real):
                raise DecodeError(f"{shown_name(name)} leads out of media_root by a link")
            fd = tried(path, "cannot be opened", lambda: os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC))
        finally:
            os.close(place)
        try:
            yield MediaFile(fd, name, status.st_size, stamp_of(status))
        finally:
            os.close(fd)

    def state(self, name: str) -> str:
        """What of a file tells whether it is the same still; why it cannot be had, where it cannot."""
        try:
            with self.open(name) as file:
                return f"{file.size} {file.stamp}"
        except DecodeError as error:
            return error.reason

    def _placed(self, path: str) -> int:
        try:
            return os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            reason = _OF_THE_NAME.get(error.errno or 0)
            if reason is None:
                raise
            self._find()  # where the folder is gone, nothing is known of the file
            raise DecodeError(f"{shown_name(path[len(self.root) + 1 :])}: {reason}") from None

    def _find(self) -> str:
        try:
            real = os.path.realpath(self.root, strict=True)
            if not os.path.isdir(real):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.root)
        except OSError as error:
            raise storage_error(self.root, "media_root cannot be looked into", error) from error
        self._real = real.rstrip("/") + "/"
        return self._real


def _read(fd: int, size: int) -> bytes:
    data = os.pread(fd, size, 0)
    while 0 < len(data) < size and (more := os.pread(fd, size - len(data), len(data))):  # one gives at most 2 GiB
        data += more
    return data


def checked_name(name: str) -> str:
    """A relative path that stays below where it begins. Raises DecodeError."""
    shown = shown_name(name)
    if name.startswith(("http:", "https:")):
        raise DecodeError(f"{shown} is a URL, and nothing is downloaded: fetch the file, and name it by its path")
    if _SCHEME.match(name) and "://" in name:
        raise DecodeError(f"{shown} is a URL, and none is opened: name the file by its path below media_root")
    if name.startswith(("/", "~", "\\")) or re.match(r"[A-Za-z]:[\\/]", name):
        raise DecodeError(f"{shown} is an absolute path: write it relative to media_root")
    if ".." in name.replace("\\", "/").split("/"):
        raise DecodeError(f"{shown} leads upwards (..): write it relative to media_root")
    if "\0" in name:
        raise DecodeError(f"{shown} holds a NUL")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise DecodeError(f"{shown} is not valid Unicode") from None
    return name


def shown_name(name: str) -> str:
    """A name that data give, for an error: it may be megabytes of what is none."""
    return repr(name if len(name) <= 80 else name[:80] + "...")


def stamp_of(status: os.stat_result) -> int:
    """STAMP_BITS bits of the time of change: another one for all but one in millions of changes."""
    return _digest(str(status.st_mtime_ns))


def joined_stamp(stamps: Sequence[int]) -> int:
    """STAMP_BITS bits of the stamps of files that are listed; of one file its own."""
    return stamps[0] if len(stamps) == 1 else _digest(" ".join(map(str, stamps)))


def _digest(told: str) -> int:
    digest = hashlib.blake2b(told.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> (32 - STAMP_BITS)

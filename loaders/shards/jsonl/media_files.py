"""Files below a folder, by names that data give: opened where they lie inside of it, and nothing else is touched."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

from orchdata.loaders.errors import DecodeError, StorageError
from orchdata.loaders.storage.local import read_at
from orchdata.loaders.storage.retries import tried

STAMP_BITS: Final = 23
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//)?")
MISSING: Final = "no such file"
_OF_THE_NAME: Final = {
    errno.ENOENT: MISSING,
    errno.ENOTDIR: f"{MISSING}: a part of its path is none",
    errno.ELOOP: "its links go round in a circle",
    errno.ENAMETOOLONG: "too long for the name of a file; base64 is read where its first bytes are those of its media",
}
_EMPTY: Final = (
    "media_root is an empty folder, so that no file that records name can be found: mount the file system that belongs "
    "there, or give the folder that the files lie below as media_root="
)
_NOTED: Final = 10
"""Names that are kept of files that are not there."""


class MediaFile:
    """An open file, and what tells it from another.

    Attributes:
        size: bytes, when it was opened.
        stamp: of its time of change, STAMP_BITS bits.
    """

    def __init__(self, folder: MediaFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._path = f"{folder.root}/{name}"
        self._fd, status = tried(self._path, "cannot be opened", lambda: folder.opened(name))
        self.size = status.st_size
        self.stamp = stamp_of(status)

    def read(self, size: int) -> bytes:
        """The first `size` bytes; fewer where the file is shorter now.

        Raises StorageError; DecodeError where another file has taken its place.
        """
        return tried(self._path, "cannot be read", lambda: self._read(size))

    def close(self) -> None:
        os.close(self._fd)

    def _read(self, size: int) -> bytes:
        try:
            return read_at(self._fd, 0, size)
        except OSError as error:
            if error.errno == errno.ESTALE:  # a network file system has forgotten it: it is there to be opened anew
                self._reopen()
            raise

    def _reopen(self) -> None:
        fresh, status = self._folder.opened(self._name)
        try:
            if (status.st_size, stamp_of(status)) != (self.size, self.stamp):
                raise DecodeError(f"{shown_name(self._name)} was replaced while it was read")
            os.dup2(fresh, self._fd, inheritable=False)
        finally:
            os.close(fresh)


class MediaFolder:
    """A folder that names from data are looked up in. Safe from many threads.

    Links inside of it are followed while they stay in it.

    Attributes:
        missing: names that led nowhere, some of them.
        any_found: whether a name led to a file.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.missing: list[str] = []
        self.any_found = False
        self._real: str | None = None

    @contextmanager
    def open(self, name: str) -> Iterator[MediaFile]:
        """The file of that name.

        Raises:
            DecodeError: the name leads nowhere, out of the folder, or to what is no regular file.
            StorageError: it cannot be opened now, or the folder is not there.
        """
        with closing(MediaFile(self, checked_name(name))) as file:
            yield file

    def state(self, name: str) -> str:
        """What of a file tells whether it is the same still; why it cannot be had, where it cannot."""
        try:
            with self.open(name) as file:
                return f"{file.size} {file.stamp}"
        except DecodeError as error:
            return error.reason

    def opened(self, name: str) -> tuple[int, os.stat_result]:
        """A descriptor of a file to read, and its status, in one try. Raises OSError, and DecodeError as `open`."""
        # A path is looked at before it is opened for reading, and it is what was looked at that is opened: nothing of
        # a pipe or a device is touched, and no link can be put in between.
        place = self._placed(name)
        try:
            status = os.fstat(place)
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError(f"{shown_name(name)} is no regular file")
            if not os.readlink(f"/proc/self/fd/{place}").startswith(self._found()):
                raise DecodeError(f"{shown_name(name)} leads out of media_root by a link")
            return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC), status
        finally:
            os.close(place)

    def _placed(self, name: str) -> int:
        try:
            place = os.open(f"{self.root}/{name}", os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            reason = _OF_THE_NAME.get(error.errno or 0)
            if reason is None:
                raise
            self._check_there()
            if len(self.missing) < _NOTED and error.errno != errno.ENAMETOOLONG:
                self.missing.append(name)
            raise DecodeError(f"{shown_name(name)}: {reason}") from None
        self.any_found = True
        return place

    def _found(self) -> str:
        """The folder without links, with a slash behind it."""
        if self._real is None:
            self._real = os.path.realpath(self.root, strict=True).rstrip("/") + "/"
        return self._real

    def _check_there(self) -> None:
        """Raise StorageError where nothing is known of any file: the folder is gone, or is an empty mount point."""
        real = tried(self.root, "media_root cannot be looked into", lambda: os.path.realpath(self.root, strict=True))
        self._real = real.rstrip("/") + "/"
        if not tried(self.root, "media_root cannot be looked into", self._has_entries):
            raise StorageError(self.root, _EMPTY, errno.ENODATA)

    def _has_entries(self) -> bool:
        with os.scandir(self.root) as entries:
            return next(entries, None) is not None


class MissingMedia:
    """Files that the shards of one build name below each media_root. Safe from many threads."""

    def __init__(self) -> None:
        self._missing: dict[str, list[str]] = {}
        self._found: set[str] = set()
        self._lock = threading.Lock()

    def add(self, folder: MediaFolder) -> None:
        """What one shard found of the files that it names."""
        with self._lock:
            self._missing.setdefault(folder.root, []).extend(folder.missing)
            if folder.any_found:
                self._found.add(folder.root)

    def check(self) -> None:
        """Raise StorageError where records name many files below a folder, and none is there."""
        for root, names in self._missing.items():
            if root not in self._found and len(names) >= _NOTED:
                told = ", ".join(map(shown_name, names[:3]))
                reason = (
                    f"media_root holds none of the files that records name ({told}, ...): give the folder that their "
                    "paths begin in as media_root=, or mount what belongs there"
                )
                raise StorageError(root, reason, errno.ENOENT)


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

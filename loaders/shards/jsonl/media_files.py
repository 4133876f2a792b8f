"""Opening files by names that come from data: only files inside one folder are opened, and nothing else is touched."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Protocol
from unicodedata import normalize

from orchdata.loaders.errors import DecodeError, StorageError
from orchdata.loaders.storage.local import read_at
from orchdata.loaders.storage.storage import stamp_of_version, tried

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//)?")
MISSING: Final = "no such file"
# The texts of these errors are part of a scan's `_state`, and of the digest in kept facts: a change measures again.
_NAME_ERRORS: Final = {
    errno.ENOENT: MISSING,
    errno.ENOTDIR: f"{MISSING}: a part of its path is none",
    errno.ELOOP: "its links go round in a circle",
    errno.ENAMETOOLONG: "too long for the name of a file; base64 is read where its first bytes are those of its media",
}
EMPTY_ROOT: Final = (
    "media_root is an empty folder, so none of the files that records name exists: mount the file system that belongs "
    "there, or pass the folder of the files as media_root="
)
MISSING_NAMES: Final = 10
"""Number of names of missing files that are kept for an error."""


class MediaFile:
    """An open file, with its size, and a stamp of its modification time (STAMP_BITS bits), by which a change is
    noticed.
    """

    def __init__(self, folder: MediaFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._path = f"{folder.root}/{name}"
        self.fd, status = tried(self._path, "cannot be opened", lambda: folder.opened(name))
        self.size = status.st_size
        self.stamp = stamp_of(status)

    def read(self, size: int) -> bytes:
        """Read the first `size` bytes; fewer if the file is shorter now. Raises StorageError; DecodeError if it was
        replaced.
        """

        def read() -> bytes:
            try:
                return read_at(self.fd, 0, size)
            except OSError as error:
                if error.errno == errno.ESTALE:  # a network file system dropped the handle: open the file again
                    self._reopen()
                raise

        return tried(self._path, "cannot be read", read)

    def _reopen(self) -> None:
        fresh, status = self._folder.opened(self._name)
        try:
            if (status.st_size, stamp_of(status)) != (self.size, self.stamp):
                raise DecodeError(f"{shown_name(self._name)} was replaced while it was read")
            os.dup2(fresh, self.fd, inheritable=False)
        finally:
            os.close(fresh)


class MediaFolder:
    """A folder in which names from data are looked up; links are followed inside of it. Safe from many threads.

    Attributes:
        missing: some of the names without a file.
        has_files: whether any name had a file.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.missing: list[str] = []
        self.has_files = False
        self._real: str | None = None  # without links, with a slash at its end

    def prepare(self, names: Sequence[str]) -> None:
        """Each file is looked at when it is opened."""

    @contextmanager
    def open(self, name: str) -> Iterator[MediaFile]:
        """Open the file with this name. Raises DecodeError if there is none, it is outside the folder, or no regular
        file; StorageError if it cannot be opened now, or the folder does not exist.
        """
        if name.startswith("/"):  # an absolute path, which may be below the folder
            roots = (root.rstrip("/") for root in (self.root, os.path.realpath(self.root)))
            root = next((root for root in roots if name.startswith(f"{root}/")), None)
            name = name if root is None else name[len(root) :].lstrip("/")
        file = MediaFile(self, checked_name(name))
        try:
            yield file
        finally:
            os.close(file.fd)

    def opened(self, name: str) -> tuple[int, os.stat_result]:
        """Open a file for reading, in one attempt; return its descriptor and status. Raises OSError, and as `open`."""
        # Check the path through an O_PATH descriptor, then open that descriptor for reading: pipes and devices are
        # never touched, and no link can be put in place between the check and the opening.
        path_fd = self._open_path(name)
        try:
            status = os.fstat(path_fd)
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError(f"{shown_name(name)} is no regular file")
            if self._real is None:
                self._real = os.path.realpath(self.root, strict=True).rstrip("/") + "/"
            if not os.readlink(f"/proc/self/fd/{path_fd}").startswith(self._real):
                raise DecodeError(f"{shown_name(name)} leads out of media_root by a link")
            return os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_CLOEXEC), status
        finally:
            os.close(path_fd)

    def _open_path(self, name: str) -> int:
        try:
            try:
                path_fd = os.open(f"{self.root}/{name}", os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                for form in () if name.isascii() else ("NFC", "NFD"):  # macOS writes another than other systems
                    with suppress(FileNotFoundError):
                        path_fd = os.open(f"{self.root}/{normalize(form, name)}", os.O_PATH | os.O_CLOEXEC)
                        break
                else:
                    raise
        except OSError as error:
            reason = _NAME_ERRORS.get(error.errno or 0)
            if reason is None:
                raise
            self._check_root()
            if len(self.missing) < MISSING_NAMES and error.errno != errno.ENAMETOOLONG:
                self.missing.append(name)
            raise DecodeError(f"{shown_name(name)}: {reason}") from None
        self.has_files = True
        return path_fd

    def _check_root(self) -> None:
        """Raise StorageError if the folder is gone or empty (a missing mount): then no file is known to be missing."""

        def is_empty() -> bool:
            self._real = os.path.realpath(self.root, strict=True).rstrip("/") + "/"
            with os.scandir(self.root) as entries:
                return next(entries, None) is None

        if tried(self.root, "media_root cannot be looked into", is_empty):
            raise StorageError(self.root, EMPTY_ROOT, errno.ENODATA)


class Looked(Protocol):
    """What a folder says of the names that were looked for."""

    root: str
    missing: list[str]
    has_files: bool


Found = tuple[dict[str, list[str]], set[str]]
"""Missing files by media_root, and each media_root that has some of its files."""


class MissingMedia:
    """The missing files of all shards of one build, by media_root. Safe from many threads."""

    def __init__(self) -> None:
        self._missing: dict[str, list[str]] = {}
        self._has_files: set[str] = set()
        self._lock = threading.Lock()

    def add(self, folder: Looked) -> None:
        """Add the missing files of one shard."""
        self.add_found(({folder.root: folder.missing}, {folder.root} if folder.has_files else set()))

    def take(self) -> Found:
        """Return what was added, and forget it."""
        with self._lock:
            found = self._missing, self._has_files
            self._missing, self._has_files = {}, set()
            return found

    def add_found(self, found: Found) -> None:
        """Add what another process has found."""
        with self._lock:
            for root, names in found[0].items():
                self._missing.setdefault(root, []).extend(names)
            self._has_files |= found[1]

    def check(self) -> None:
        """Raise StorageError if records name many files below a folder, and none of them exists."""
        for root, names in self._missing.items():
            if root not in self._has_files and len(names) >= MISSING_NAMES:
                shown = ", ".join(map(shown_name, names[:3]))
                reason = (
                    f"media_root has none of the files that records name ({shown}, ...): pass the folder where their "
                    "paths begin as media_root=, or mount the file system that belongs there"
                )
                raise StorageError(root, reason, errno.ENOENT)


def checked_name(name: str) -> str:
    """Return a name that is a relative path without "..". Raises DecodeError for any other."""
    shown = shown_name(name)
    if name.startswith(("http:", "https:")):
        raise DecodeError(f"{shown} is a URL, and nothing is downloaded: fetch the file, and name it by its path")
    if _SCHEME.match(name) and "://" in name:
        raise DecodeError(f"{shown} is a URL, and none is opened: name the file by its path below media_root")
    if name.startswith(("/", "~", "\\")) or re.match(r"[A-Za-z]:[\\/]", name):
        raise DecodeError(f"{shown} is an absolute path that is not below media_root: write it relative to media_root")
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
    """Shorten a name from data for an error message: it may be megabytes of something else."""
    return repr(name if len(name) <= 80 else name[:80] + "...")


def stamp_of(status: os.stat_result) -> int:
    """Return STAMP_BITS bits of the modification time."""
    return stamp_of_version(str(status.st_mtime_ns))


def joined_stamp(stamps: Sequence[int]) -> int:
    """Return the joint stamp of listed files, STAMP_BITS bits; the stamp itself if there is one file."""
    return stamps[0] if len(stamps) == 1 else stamp_of_version(" ".join(map(str, stamps)))

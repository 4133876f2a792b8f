"""Permissions of a copy: only users who can read its source may read it.

The modes of a source and of the folders above it define who can read it. A copy, or an index with keys and texts of it,
is in another folder, so it needs its own mode: readable for the source's group and for others if they can pass the
folders above the source. The umask of the process removes more, as for any file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.shared.files import opened, status_of

_GROUP_READS: Final = 0o040
_OTHERS_READ: Final = 0o004
_READ_BY_ANY: Final = _GROUP_READS | _OTHERS_READ
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Access(NamedTuple):
    """The most that the permissions of a copy may allow.

    Attributes:
        mode: bits for its user, one group, and others.
        group: id of that group.
    """

    mode: int
    group: int

    def for_group(self, group: int) -> int:
        """Return the mode for a file of `group`: another group may only do what the own group and others both may."""
        if group == self.group or self.is_for_all_alike:
            return self.mode
        return self.mode & ~_READ_BY_ANY

    @property
    def is_for_all_alike(self) -> bool:
        """Whether the group of a file does not matter."""
        return bool(self.mode & _GROUP_READS) == bool(self.mode & _OTHERS_READ)

    @staticmethod
    def joined(accesses: Iterable[Access]) -> Access:
        """Return the access to a file made from several sources: only users who can read all of them."""
        mode, group = 0o666, None
        for each in set(accesses):
            if group not in (None, each.group) and not each.is_for_all_alike:
                mode &= each.for_group(-1)
            else:
                mode &= each.mode
                group = group if each.is_for_all_alike else each.group
        return Access(mode, -1 if group is None else group)


class Accesses:
    """Computes the `Access` of many sources; each folder above them is checked once."""

    def __init__(self) -> None:
        self._folders: dict[str, list[os.stat_result]] = {}

    def of(self, path: str) -> Access:
        """Return the access for copies of a file: of an object of storage, of this user alone. Raises StorageError if a
        file is missing, or cannot be checked now.
        """
        if is_remote(path):
            return Access(0o400, os.getegid())
        return tried(path, "cannot be opened", lambda: self._of(path))

    def _of(self, path: str) -> Access:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            path = os.path.realpath(path)
            status = os.stat(path)
        above = self._above(os.path.dirname(path))
        group = others = True
        for one in above:
            others_pass = bool(one.st_mode & 0o001)
            group &= bool(one.st_mode & 0o010) if one.st_gid == status.st_gid else others_pass
            others &= others_pass
        allowed = 0o600 | (_GROUP_READS if group else 0) | (_OTHERS_READ if others else 0)
        return Access(0o400 | (status.st_mode & allowed), status.st_gid)

    def _above(self, folder: str) -> list[os.stat_result]:
        """Return the statuses of the real path of a folder, and of all folders above."""
        if folder not in self._folders:
            real = Path(os.path.realpath(folder))
            self._folders[folder] = [os.stat(each) for each in (real, *real.parents)]
        return self._folders[folder]


def access_of(path: str) -> Access:
    """Return `Accesses.of` one source."""
    return Accesses().of(path)


def create(path: str, access: Access | None) -> int:
    """Create a file, and return its descriptor, to read and write. Raises OSError.

    Args:
        access: the most that its permissions may allow; default: as the umask.
    """
    if access is None:
        return os.open(path, _NEW, 0o666)
    fd = os.open(path, _NEW, access.for_group(-1))
    if access.for_group(-1) != access.mode:
        with suppress(OSError):  # on failure it stays stricter than its source
            if os.fstat(fd).st_gid != access.group:
                os.fchown(fd, -1, access.group)
            os.fchmod(fd, access.mode & ~_umask())
    return fd


def restrict(path: str | Path, access: Access) -> None:
    """Remove permissions of a cached file of this user that its source no longer allows; best effort."""
    with suppress(OSError):
        status = status_of(path)
        if status is None or not status.st_mode & _READ_BY_ANY & ~access.for_group(status.st_gid):
            return
        with opened(path) as fd:
            status = os.fstat(fd)
            # A file with several names may be another user's, or serve another purpose.
            if status.st_uid == os.geteuid() and status.st_nlink == 1:
                os.fchmod(fd, status.st_mode & 0o777 & access.for_group(status.st_gid))


def _umask() -> int:
    """Return the umask of this process. Read from /proc, because `os.umask` would change it for all threads."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    return 0o077

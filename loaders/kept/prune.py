"""Removing kept files that no process uses: old ones, and the least recently used ones above a bound.

    folders --old enough, or above the bound--> claim its path --lock it alone--> looked at again --> removed

A file is removed while its path is claimed, as writers claim it, and while it is locked alone. So a process that has
it open keeps it, one that opens it at this moment finds it or finds it gone, and one that writes it again is waited
for, or waits. All kept files can be made again; what is removed costs time, and nothing else.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import StorageError
from orchdata.loaders.kept.builds import Build, builds
from orchdata.loaders.kept.files import Folder, KeptFile, folders, leftovers_in
from orchdata.loaders.kept.kinds import LOCKS
from orchdata.loaders.storage.atomic import remove
from orchdata.loaders.storage.cache import BYTES_VARIABLE, CacheFolder
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.sealed import kind_and_format
from orchdata.loaders.storage.shared.files import opened_to_lock, status_of
from orchdata.loaders.storage.shared.use import MARK_SECONDS, NoLocks, last_used, lock_alone

SAFE_SECONDS: Final = 90 * 24 * 3600.0
"""Where there are no locks, what processes hold elsewhere is only removed after so long without use."""
REMOVED: Final = "removed"
IN_USE: Final = "in use"
OTHER_USERS: Final = "of other users"
NEWER: Final = "made by a newer orchdata"
FOREIGN: Final = "not made by orchdata"
NO_LOCKS: Final = "perhaps in use: the file system has no locks"
_GONE: Final = "gone"
_BUILDS_SECONDS: Final = 1.0


@dataclass(slots=True)
class Amount:
    """A number of files, and their bytes."""

    files: int = 0
    bytes: int = 0

    def add(self, size: int, files: int = 1) -> None:
        self.files += files
        self.bytes += size


@dataclass(slots=True)
class Pruned:
    """What a prune did.

    Attributes:
        removed: by the name of the kind.
        stays: by the reason: files that would have been removed otherwise.
        left: all files that are still there.
    """

    removed: dict[str, Amount] = field(default_factory=dict)
    stays: dict[str, Amount] = field(default_factory=dict)
    left: Amount = field(default_factory=Amount)


def prune(
    cache: CacheFolder,
    *,
    older_than_seconds: float | None = None,
    most_bytes: int | None = None,
    all_versions: bool = False,
    dry_run: bool = False,
    build: Build | None = None,
    used: Collection[str] = (),
) -> Pruned:
    """Remove what was not used for a time, then the least recently used files until the rest is within a bound.

    Files of other users stay, and what a live process holds, or a build that is under way has used. Costs, facts and
    the like go first, then files that processes may hold.

    Args:
        cache: the folder; it may be missing.
        older_than_seconds: since the last use; default: nothing is removed because of its age.
        most_bytes: of the whole folder; default: no bound.
        all_versions: also remove what a newer release has made.
        dry_run: remove nothing, and return what would be removed.
        build: that this is the end of: what was made or used since it began stays.
        used: paths that stay.

    Raises StorageError if something cannot be removed, or looked at.
    """
    pruning = _Pruning(cache, all_versions=all_versions, dry_run=dry_run, build=build, used=frozenset(used))
    with closing(pruning):
        found = list(folders(cache))
        now = time.time()
        left: list[KeptFile] = []
        for folder in found:
            pruning.remove_leftovers(folder)
            for file in pruning.ours(folder):
                is_old = older_than_seconds is not None and file.last_used <= now - older_than_seconds
                if not is_old or not pruning.remove(file):
                    left.append(file)
        if most_bytes is not None:
            left.sort(key=lambda file: (file.kind.is_held, file.last_used))
            for file in left:
                if pruning.result.left.bytes <= most_bytes:
                    break
                pruning.remove(file)
        return pruning.result


def keep_within(cache: CacheFolder, build: Build, used: Collection[str]) -> None:
    """Enforce `CacheFolder.max_kept_bytes` at the end of a build: what it has made, and used, stays. A problem is a
    warning.
    """
    if cache.max_kept_bytes is None:
        return
    try:
        left = prune(cache, most_bytes=cache.max_kept_bytes, build=build, used=used).left.bytes
    except StorageError as error:
        warnings.warn(f"the cache folder was not brought within its bound: {error}", stacklevel=3)
        return
    if left > cache.max_kept_bytes:
        warnings.warn(
            f"the cache folder {cache.root} has {left:,} bytes, above the bound of {cache.max_kept_bytes:,} "
            f"({BYTES_VARIABLE}): the rest is in use, of this build, or of other users. `orchdata cache` lists it",
            stacklevel=3,
        )


def remove_leftovers(cache: CacheFolder) -> None:
    """Remove old temporary files of killed builders, and old notes of verified files. Best effort."""
    try:
        for path in leftovers_in(cache):
            remove(path)
    except OSError:
        pass


class _Pruning:
    """A prune that is under way."""

    def __init__(
        self, cache: CacheFolder, *, all_versions: bool, dry_run: bool, build: Build | None, used: Collection[str]
    ) -> None:
        self.result = Pruned()
        self._cache = cache
        self._all_versions = all_versions
        self._dry_run = dry_run
        self._claims: dict[str, Claims] = {}
        self._resources = ExitStack()
        self._counted: set[Path] = set()
        self._own_build, self._used = build, used
        self._in_use_since, self._known_until = float("inf"), 0.0

    def close(self) -> None:
        self._resources.close()

    def ours(self, folder: Folder) -> Iterator[KeptFile]:
        """Yield the files that may be removed; count the others, and all."""
        for file in (*folder.files, *folder.others):
            self.result.left.add(file.size)
            if file.is_own:
                yield file
            else:
                self._stays(OTHER_USERS, file)
        if folder.num_foreign:
            self.result.stays.setdefault(FOREIGN, Amount()).add(0, folder.num_foreign)

    def remove_leftovers(self, folder: Folder) -> None:
        for path, size in folder.leftovers:
            if not self._dry_run:
                remove(path)
                if os.path.lexists(path):
                    continue
            self.result.removed.setdefault(folder.kind.folder, Amount()).add(size)

    def remove(self, file: KeptFile) -> bool:
        """Remove a file, unless there is a reason why it stays, which is counted. Return whether it is gone."""
        if file.path in self._counted:  # the reason is known
            return False
        reason = tried(str(file.path), "cannot be removed", lambda: self._removed(file))
        if reason == REMOVED:
            self.result.removed.setdefault(file.kind.folder, Amount()).add(file.size)
        elif reason != _GONE:
            self._stays(reason, file)
            return False
        self.result.left.add(-file.size, -1)
        return True

    def _removed(self, file: KeptFile) -> str:
        kind, path = file.kind, file.path
        if str(path) in self._used or file.last_used >= self._builds_use_since():
            return IN_USE
        with ExitStack() as resources:
            if kind.claims is not None and not self._dry_run:
                is_claimed = resources.enter_context(self._claims_of(kind.claims).claim(str(path)))
                if not is_claimed:
                    return IN_USE
            try:
                fd = resources.enter_context(opened_to_lock(path))
            except FileNotFoundError:
                return _GONE
            if (reason := self._reason(file, fd)) is not None:
                return reason
            # A writer may have replaced the file, or a reader have marked it, before it was locked.
            status, now = os.fstat(fd), status_of(path)
            if now is None:
                return _GONE
            if now.st_ino != status.st_ino or last_used(path, now) > file.last_used:
                return IN_USE
            if not self._dry_run:
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    return _GONE
                for companion in file.companions:
                    remove(companion)
            return REMOVED

    def _reason(self, file: KeptFile, fd: int) -> str | None:
        """Return why an open file stays, None if it does not; then it is locked."""
        said = kind_and_format(fd)
        is_known = file.kind.has(file.path.name)
        if said is None and not file.kind.names(file.path.name):
            return FOREIGN
        if said is not None and not self._all_versions:
            sealed = file.kind.sealed.get(said[0])
            if not is_known or sealed is None or said[1] > sealed.format:
                return NEWER
        try:
            return None if lock_alone(fd) else IN_USE
        except NoLocks:
            is_safe = not file.kind.is_held or time.time() - file.last_used > SAFE_SECONDS
            return None if is_safe else NO_LOCKS

    def _builds_use_since(self) -> float:
        """Return from which time of use on builds that are under way may need files; looked up once in a while."""
        if time.monotonic() >= self._known_until:
            own = self._own_build
            others = [each for each in builds(self._cache, cleans=not self._dry_run) if own is None or each != own]
            # Others may have used what was marked some time before they began; what this one has used is known.
            since = [each.began - MARK_SECONDS for each in others] + ([] if own is None else [own.began])
            self._in_use_since = min(since, default=float("inf"))
            self._known_until = time.monotonic() + _BUILDS_SECONDS
        return self._in_use_since

    def _claims_of(self, name: str) -> Claims:
        if name not in self._claims:
            self._claims[name] = self._resources.enter_context(closing(Claims(self._cache.root / LOCKS / name)))
        return self._claims[name]

    def _stays(self, reason: str, file: KeptFile) -> None:
        self._counted.add(file.path)
        self.result.stays.setdefault(reason, Amount()).add(file.size)

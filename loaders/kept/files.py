"""The files of a kind, as their names and statuses show them: nothing is opened."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchdata.loaders.kept.kinds import KINDS, LOCKS, Kind, is_digest
from orchdata.loaders.storage.atomic import TEMPORARY_SUFFIX
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.node.entries import PARTIAL_SUFFIX
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.shared.files import names_in
from orchdata.loaders.storage.shared.use import USED_SUFFIX
from orchdata.loaders.storage.verified import NOTE_SUFFIX

_KEEP_SECONDS: Final = 24 * 3600
_KEEP_NOTES_SECONDS: Final = 30 * _KEEP_SECONDS


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file, with what lies next to it.

    Attributes:
        kind: its kind.
        path: of the file.
        companions: its mark of use, notes that it was verified, and the like.
        size: bytes of all of them.
        last_used: in seconds as of `time.time`.
        user: id of its owner.
    """

    kind: Kind
    path: Path
    companions: tuple[Path, ...]
    size: int
    last_used: float
    user: int

    @property
    def is_own(self) -> bool:
        return self.user == os.geteuid()


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of one kind.

    Attributes:
        kind: of them; its folder may be one that this release does not know.
        files: those with names of the kind.
        others: all other regular files, which may be of a newer release.
        num_foreign: links, folders, pipes and the like, which are not looked at.
        leftovers: of killed processes, with their sizes: partial files, and notes and marks of files that are gone.
    """

    kind: Kind
    files: list[KeptFile]
    others: list[KeptFile]
    num_foreign: int
    leftovers: list[tuple[Path, int]]


def folders(cache: CacheFolder) -> Iterator[Folder]:
    """Yield the folders of all kinds that exist, then those that this release does not know. Raises StorageError."""
    root = str(cache.root)
    known = {kind.folder: kind for kind in KINDS}
    names = tried(root, "cannot be listed", lambda: _names(cache.root))
    for name in [*(name for name in known if name in names), *(name for name in names if name not in known)]:
        path = cache.root / name
        status = _looked_at(path)
        if name != LOCKS and status is not None and stat.S_ISDIR(status.st_mode):
            yield folder_of(cache, known.get(name) or Kind(folder=name, content="not of this release", suffixes=()))


def num_foreign(cache: CacheFolder) -> int:
    """Return the number of things in the cache folder that are no folders. Raises StorageError."""
    names = tried(str(cache.root), "cannot be listed", lambda: _names(cache.root))
    statuses = [_looked_at(cache.root / name) for name in names]
    return sum(status is not None and not stat.S_ISDIR(status.st_mode) for status in statuses)


def folder_of(cache: CacheFolder, kind: Kind) -> Folder:
    """Return the files of one kind. Raises StorageError."""
    root = cache.root / kind.folder
    names = tried(str(root), "cannot be listed", lambda: names_in(root))
    companions = _companions(kind, names)
    belonging = {name for each in companions.values() for name in each}
    folder = Folder(kind, [], [], 0, [])
    foreign = 0
    for name in names:
        path = root / name
        if name in belonging:
            continue
        is_ours = kind.has(name)
        status = _looked_at(path)
        if status is None:  # another process removed it
            continue
        if not stat.S_ISREG(status.st_mode):
            foreign += 1
        elif is_ours or not kind.suffixes or not _is_companion(kind, name):
            mine = tuple(root / each for each in companions.get(name, ()))
            (folder.files if is_ours else folder.others).append(_kept(kind, path, status, mine))
        elif _is_leftover(name, status):
            folder.leftovers.append((path, status.st_size))
    return Folder(kind, folder.files, folder.others, foreign, folder.leftovers)


def leftovers_in(cache: CacheFolder) -> Iterator[Path]:
    """Yield day-old temporary files of killed writers, and month-old notes of verified files (of other machines), of
    all kinds. Only these files are looked at. Raises OSError.
    """
    for kind in KINDS:
        for name in names_in(cache.root / kind.folder):
            path = cache.root / kind.folder / name
            status = _status(path) if name.endswith((TEMPORARY_SUFFIX, NOTE_SUFFIX)) else None
            if status is not None and stat.S_ISREG(status.st_mode) and _is_leftover(name, status):
                yield path


def _kept(kind: Kind, path: Path, status: os.stat_result, companions: tuple[Path, ...]) -> KeptFile:
    size, last = status.st_size, status.st_mtime
    for each in companions:
        of_it = _looked_at(each)
        if of_it is not None and stat.S_ISREG(of_it.st_mode):
            size += of_it.st_size
            last = max(last, of_it.st_mtime) if each.suffix == USED_SUFFIX else last
    return KeptFile(kind, path, companions, size, last, status.st_uid)


def _companions(kind: Kind, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that belong to each file, of this release or another."""
    of_stem = {name.rpartition(".")[0]: name for name in names if not _is_companion(kind, name)}
    files = set(of_stem.values())
    found: dict[str, list[str]] = {}
    for name in names:
        file = None
        if name.endswith((USED_SUFFIX, *kind.companions)) and is_digest(name):
            file = of_stem.get(name.rpartition(".")[0])
        elif name.startswith(".") and name.endswith(NOTE_SUFFIX):
            file = name.removeprefix(".").rsplit(".", 2)[0]  # `.NAME.MACHINE.verified`
        if file in files:
            found.setdefault(file, []).append(name)
    return found


def _is_companion(kind: Kind, name: str) -> bool:
    """Return whether the name is that of a note, a mark or a partial file."""
    hidden = name.startswith(".") and name.endswith((NOTE_SUFFIX, TEMPORARY_SUFFIX, PARTIAL_SUFFIX))
    return hidden or (name.endswith((USED_SUFFIX, *kind.companions)) and is_digest(name))


def _is_leftover(name: str, status: os.stat_result) -> bool:
    """Return whether a note, a mark or a partial file of this user is so old that no process is about to use it."""
    kept_seconds = _KEEP_NOTES_SECONDS if name.endswith(NOTE_SUFFIX) else _KEEP_SECONDS
    return status.st_uid == os.geteuid() and time.time() - status.st_mtime > kept_seconds


def _names(root: Path) -> list[str]:
    try:
        return sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _looked_at(path: Path) -> os.stat_result | None:
    """Return the status of anything with this path, None if there is nothing. Raises StorageError."""
    return tried(str(path), "cannot be looked at", lambda: _status(path))


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None

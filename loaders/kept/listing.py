"""What the cache folder keeps: by kind, by the folder of the data, and each index."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from orchdata.loaders.kept.builds import builds
from orchdata.loaders.kept.files import Folder, KeptFile, folders, num_foreign
from orchdata.loaders.kept.kinds import Sealed
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.sealed import Damaged, head_of, kind_and_format
from orchdata.loaders.storage.shared.files import opened, opened_to_lock
from orchdata.loaders.storage.shared.use import NoLocks, lock_alone

_MERGED: Final = b"merg"
_INDEX: Final = b"indx"


@dataclass(slots=True)
class KindListed:
    """The files of one kind.

    Attributes:
        content: what they have, for people.
        files, bytes: of all of them.
        last_used: of the one that was used last, in seconds as of `time.time`; None without files.
        in_use: files that processes hold; None if that cannot be known.
        of_other_users, newer, damaged, foreign: files of other users, of a newer release, damaged ones, and those that
            orchdata has not made.
    """

    content: str
    files: int = 0
    bytes: int = 0
    last_used: float | None = None
    in_use: int | None = 0
    of_other_users: int = 0
    newer: int = 0
    damaged: int = 0
    foreign: int = 0


@dataclass(slots=True)
class DataListed:
    """What is kept of the shards of one folder.

    Attributes:
        shards: number of shards that something is kept of.
        bytes: by kind.
        last_used: as in KindListed.
        in_use: whether a process holds any of it.
    """

    shards: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    last_used: float = 0.0
    in_use: bool = False


@dataclass(frozen=True, slots=True)
class IndexListed:
    """An index.

    Attributes:
        path: its file.
        data: the folder of its shards, or the first of several.
        shards, samples: their numbers.
        modalities: of its recipe, text first.
        bytes, last_used: as in KindListed.
        in_use: whether a process holds it; None if that cannot be known.
    """

    path: str
    data: str
    shards: int
    samples: int
    modalities: tuple[str, ...]
    bytes: int
    last_used: float
    in_use: bool | None


@dataclass(frozen=True, slots=True)
class Listing:
    """All that is kept.

    Attributes:
        folder: the cache folder.
        files, bytes: of everything.
        kinds: by the name of their folder.
        data: by the folder of the shards.
        indexes: the last used one first.
        foreign: things in the cache folder itself that are no folders.
        builds: number of builds that are under way.
    """

    folder: str
    files: int
    bytes: int
    kinds: dict[str, KindListed]
    data: dict[str, DataListed]
    indexes: list[IndexListed]
    foreign: int
    builds: int


def listing(cache: CacheFolder) -> Listing:
    """List what is kept; a missing folder keeps nothing. A damaged file is listed as such.

    Raises StorageError if a folder cannot be listed, or a file not be looked at, now.
    """
    lister = _Lister()
    kinds = {folder.kind.folder: lister.kind_of(folder) for folder in folders(cache)}
    lister.give_merged()
    begun = tried(str(cache.root), "cannot be listed", lambda: builds(cache))
    return Listing(
        folder=str(cache.root),
        files=sum(kind.files for kind in kinds.values()),
        bytes=sum(kind.bytes for kind in kinds.values()),
        kinds=kinds,
        data={name: lister.data[name] for name in sorted(lister.data)},
        indexes=sorted(lister.indexes, key=lambda index: -index.last_used),
        foreign=num_foreign(cache),
        builds=len(begun),
    )


class _Lister:
    def __init__(self) -> None:
        self.data: dict[str, DataListed] = {}
        self.indexes: list[IndexListed] = []
        self._shards: dict[str, set[str]] = {}
        self._folder_of_build: dict[str, str] = {}
        self._merged: list[tuple[KeptFile, str, bool | None]] = []

    def kind_of(self, folder: Folder) -> KindListed:
        listed = KindListed(folder.kind.content, foreign=folder.num_foreign)
        for file in (*folder.files, *folder.others):
            listed.files += 1
            listed.bytes += file.size
            listed.last_used = max(file.last_used, listed.last_used or 0.0)
            listed.of_other_users += not file.is_own
            with suppress(FileNotFoundError):
                self._add(file, listed)
        listed.files += len(folder.leftovers)
        listed.bytes += sum(size for _, size in folder.leftovers)
        return listed

    def give_merged(self) -> None:
        """Count the files of whole data sets, which name their index, with its data."""
        for file, build_id, is_held in self._merged:
            if build_id in self._folder_of_build:
                self._give(self._folder_of_build[build_id], [], file, is_held)

    def _add(self, file: KeptFile, listed: KindListed) -> None:
        """Look into a file. Raises FileNotFoundError if it is gone, or StorageError."""
        is_held: bool | None = False
        if file.kind.is_held:
            is_held = tried(str(file.path), "cannot be looked at", lambda: _is_held(file))
            if is_held is None:
                listed.in_use = None
            elif listed.in_use is not None:
                listed.in_use += is_held
        try:
            found = _head_of(file)
        except PermissionError:  # a private file of another user
            return
        except Damaged:
            listed.damaged += 1
            return
        if isinstance(found, str):
            listed.newer += found == "newer"
            listed.foreign += found == "foreign"
            return
        if found is not None:
            try:
                self._see(file, *found, is_held)
            except (LookupError, TypeError, ValueError, AttributeError):
                listed.damaged += 1

    def _see(self, file: KeptFile, code: bytes, sealed: Sealed, head: Mapping[str, Any], is_held: bool | None) -> None:
        shards = list(map(str, sealed.shards(head)))
        if code == _MERGED:
            self._merged.append((file, str(head["build_id"]), is_held))
        elif shards:
            data = os.path.dirname(shards[0])
            if code == _INDEX:
                index = IndexListed(
                    path=str(file.path),
                    data=data,
                    shards=len(shards),
                    samples=int(head["totals"]["samples"]),
                    modalities=tuple(map(str, head["modalities"])),
                    bytes=file.size,
                    last_used=file.last_used,
                    in_use=is_held,
                )
                self.indexes.append(index)
                self._folder_of_build[str(head["build_id"])] = data
            self._give(data, shards, file, is_held)

    def _give(self, data: str, shards: list[str], file: KeptFile, is_held: bool | None) -> None:
        listed = self.data.setdefault(data, DataListed())
        known = self._shards.setdefault(data, set())
        known.update(shard for shard in shards if os.path.dirname(shard) == data)
        listed.shards = len(known)
        kind = file.kind.folder
        listed.bytes[kind] = listed.bytes.get(kind, 0) + file.size
        listed.last_used = max(listed.last_used, file.last_used)
        listed.in_use |= bool(is_held)


def _head_of(file: KeptFile) -> tuple[bytes, Sealed, dict[str, Any]] | str | None:
    """Return what a file says of itself: kind and head; "newer", "foreign" or "earlier"; None for one without a head.

    Raises FileNotFoundError, PermissionError, Damaged, or StorageError.
    """
    is_known = file.kind.has(file.path.name)
    if is_known and not file.kind.sealed:
        return None

    def read() -> tuple[bytes, Sealed, dict[str, Any]] | str | OSError | None:
        try:
            with opened(file.path) as fd:
                said = kind_and_format(fd)
                if said is None:
                    if file.kind.names(file.path.name):
                        raise Damaged("it does not begin like such a file")
                    return "foreign"
                sealed = file.kind.sealed.get(said[0])
                if not is_known or sealed is None or said[1] > sealed.format:
                    return "newer"
                return (said[0], sealed, head_of(fd, *said).values) if said[1] == sealed.format else "earlier"
        except (FileNotFoundError, PermissionError) as error:
            if file.is_own and isinstance(error, PermissionError):
                raise
            return error

    found = tried(str(file.path), "cannot be read", read)
    if isinstance(found, OSError):
        raise found
    return found


def _is_held(file: KeptFile) -> bool | None:
    """Return whether a process holds a file; None if the file system has no locks. Raises OSError."""
    try:
        with opened_to_lock(file.path) as fd:
            return not lock_alone(fd)
    except NoLocks:
        return None
    except PermissionError:
        if file.is_own:
            raise
        return None
    except FileNotFoundError:
        return False

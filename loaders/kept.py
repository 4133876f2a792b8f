"""What the cache folder keeps, and less of it: old files go, and the least recently used ones above a bound.

Each kind of files has a folder of its own below the cache folder. All of them can be made again, and a process that has
one open can still read it: what is removed costs time, and nothing else. Only files of this user go, with names as
orchdata gives them: a folder of the user's own may have the name of a kind, such as `shards`.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from orchdata.loaders.storage.atomic import TEMPORARY_SUFFIX, remove
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.node.entries import PARTIAL_SUFFIX, SUM_SUFFIX
from orchdata.loaders.storage.opening import names_in, status_of
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.verified import NOTE_SUFFIX

_DIGEST: Final = re.compile("[0-9a-f]{32,64}$")
_DAY_SECONDS: Final = 24 * 3600.0
_NOTES_SECONDS: Final = 30 * _DAY_SECONDS


class Kind(NamedTuple):
    """A kind of kept files: what they have, for people, and the suffixes of their names, after a digest."""

    content: str
    suffixes: tuple[str, ...]


KINDS: Final = {
    "facts": Kind("places and headers of members", (".facts", ".headers")),
    "texts": Kind("counts of texts", (".texts",)),
    "sizes": Kind("sizes of parts that are counted from their bytes", (".sizes",)),
    "costs": Kind("costs of a shard under a recipe", (".costs",)),
    "index": Kind("indexes", (".index",)),
    "item_costs": Kind("costs of map-style items", (".costs",)),
    "arrays": Kind("arrays of loaders with workers", (".int64",)),
    "shards": Kind("decompressed shards", (".tar",)),
    "copies": Kind("copies of shards of object storage", (".copy",)),
    "packing": Kind("which models keep packed samples apart", (".json",)),
}
"""By the name of the folder. What `CacheFolder.make` is called with, and is not here, is neither listed nor pruned."""


class KeptFile(NamedTuple):
    """A file of this user.

    Attributes:
        last_used: in seconds as of `time.time`.
        size: bytes of the file and of its companions.
        kind: name of its folder.
        paths: the file, then its companions: its checksum, and notes that it was verified. Their times too are times
            of use.
    """

    last_used: float
    size: int
    kind: str
    paths: tuple[Path, ...]


@dataclass(slots=True)
class Amount:
    """A number of files, and their bytes."""

    files: int = 0
    bytes: int = 0

    def add(self, file: KeptFile) -> None:
        self.files += 1
        self.bytes += file.size


@dataclass(slots=True)
class Pruned:
    """What a prune has removed, by the name of the kind, and all that is left of this user's."""

    removed: dict[str, Amount] = field(default_factory=dict)
    left: Amount = field(default_factory=Amount)


def kept_files(cache: CacheFolder) -> list[KeptFile]:
    """Return what is kept, the least recently used first; a missing folder keeps nothing.

    Raises StorageError if a folder cannot be listed, or a file not be looked at, now.
    """
    return sorted(file for name in KINDS for file in _files(cache.root / name) if _is_ours(name, file.paths[0].name))


def prune(
    cache: CacheFolder,
    *,
    older_than_seconds: float | None = None,
    most_bytes: int | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Remove what was not used for a time, then the least recently used files until the rest is within a bound.

    Args:
        cache: the folder; it may be missing.
        older_than_seconds: since the last use; default: nothing is removed because of its age.
        most_bytes: of all that is kept; default: no bound.
        dry_run: remove nothing, and return what would be removed.

    Raises StorageError if something cannot be removed, or looked at.
    """
    pruned, now = Pruned(), time.time()
    found = kept_files(cache)
    left = sum(file.size for file in found)
    for file in found:
        is_old = older_than_seconds is not None and file.last_used <= now - older_than_seconds
        if is_old or (most_bytes is not None and left > most_bytes):
            if not dry_run:
                tried(str(file.paths[0]), "cannot be removed", partial(_unlink, file))
            pruned.removed.setdefault(file.kind, Amount()).add(file)
            left -= file.size
        else:
            pruned.left.add(file)
    if not dry_run:
        remove_leftovers(cache)
    return pruned


def remove_leftovers(cache: CacheFolder) -> None:
    """Remove old temporary files of killed writers, and old notes of verified files. Best effort."""
    for kind in KINDS:
        with suppress(OSError):
            for name in names_in(cache.root / kind):
                path = cache.root / kind / name
                status = status_of(path) if _is_leftover(name) else None
                if status is not None and status.st_uid == os.geteuid():
                    kept_seconds = _NOTES_SECONDS if name.endswith(NOTE_SUFFIX) else _DAY_SECONDS
                    if time.time() - status.st_mtime > kept_seconds:
                        remove(path)


def _files(folder: Path) -> Iterator[KeptFile]:
    """Yield all regular files of this user with their companions."""
    statuses: dict[str, os.stat_result] = {}
    for name in tried(str(folder), "cannot be listed", partial(names_in, folder)):
        path = folder / name
        status = tried(str(path), "cannot be looked at", partial(status_of, path))
        if status is not None and status.st_uid == os.geteuid():
            statuses[name] = status
    companions: dict[str, list[str]] = defaultdict(list)
    for name in statuses:
        if name.endswith(SUM_SUFFIX):
            companions[name.partition(".")[0]].append(name)
        elif name.startswith(".") and name.endswith(NOTE_SUFFIX):
            companions[name[1:].partition(".")[0]].append(name)
    for name, status in statuses.items():
        mine = companions[name.partition(".")[0]]
        used = max((statuses[each].st_mtime for each in mine), default=0.0)
        size = status.st_size + sum(statuses[each].st_size for each in mine)
        paths = (folder / name, *(folder / each for each in mine))
        yield KeptFile(max(status.st_mtime, used), size, folder.name, paths)


def _is_ours(kind: str, name: str) -> bool:
    return name.endswith(KINDS[kind].suffixes) and _DIGEST.search(name.partition(".")[0]) is not None


def _is_leftover(name: str) -> bool:
    return name.startswith(".") and name.endswith((TEMPORARY_SUFFIX, PARTIAL_SUFFIX, NOTE_SUFFIX))


def _unlink(file: KeptFile) -> None:
    with suppress(FileNotFoundError):
        os.unlink(file.paths[0])
    for companion in file.paths[1:]:
        remove(companion)

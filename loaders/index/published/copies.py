"""Copies of published index files in the cache folder of a node: each is fetched once, whoever of its ranks is first.

manifest --claimed--> fetched in ranges, size and digest verified --renamed--> index/<digest>.index --> Index
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Final

from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import DamagedIndexError
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.published.folder import PublishedFolder, opened_folder
from orchdata.loaders.index.published.manifest import Manifest
from orchdata.loaders.storage.atomic import remove, replaced, write_at
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.opening import opened, status_of
from orchdata.loaders.storage.remote.clients.client import Buffer

_READ_BYTES: Final = 8 << 20
_ATTEMPTS: Final = 3
_OUTAGE_SECONDS: Final = 50.0
"""As `Files.limited` takes it: 0.6 of it."""


def opened_copy(folder: PublishedFolder, manifest: Manifest, *, local: Path | None = None, again: str = "") -> Index:
    """Return the index of a manifest, from the node's copy, which is made if it is missing.

    Args:
        local: an index of this node's, which is copied if it has the same bytes.
        again: how it is published again, for errors.

    Raises:
        DamagedIndexError: the file of the folder is missing, or not what the manifest says.
        StorageError: it cannot be read, or the cache folder cannot be written.
    """
    cache = CacheFolder()
    path = cache.root / "index" / f"{manifest.digest}.index"
    for attempt in range(_ATTEMPTS):
        _make(folder, manifest, cache, path, local, again)
        try:
            return Index(path)
        except FileNotFoundError:  # pruned before it was opened
            continue
        except DamagedIndexError:
            if attempt == _ATTEMPTS - 1:
                raise
            remove(path)  # the node's copy has changed on its disk
    raise DamagedIndexError(str(path), "it is removed again and again")


def fetched(url: str, files: Files, manifest: Manifest, *, again: str = "") -> Index:
    """Return the index of a manifest, as `opened_copy`, of the folder at a URL or path. Raises the same.

    Args:
        files: how objects of storage are read. An outage may last half a minute: there may be another way to the file.
    """
    return opened_copy(opened_folder(url, files.limited(_OUTAGE_SECONDS)), manifest, again=again)


def file_digest(path: Path) -> tuple[int, str]:
    """Return size and digest of a file, as manifests have them. Raises OSError."""
    summed, size = _hasher(), 0
    with opened(path) as fd:
        while data := os.read(fd, _READ_BYTES):
            summed.update(data)
            size += len(data)
    return size, summed.hexdigest()


def _make(
    folder: PublishedFolder, manifest: Manifest, cache: CacheFolder, path: Path, local: Path | None, again: str
) -> None:
    """Make a node's copy, if there is none."""
    if status_of(path) is not None:
        return
    cache.make("index")
    with closing(Claims(cache.file("locks", "index"))) as claims, claims.claim(str(path), go_on=lambda: True):
        if status_of(path) is not None:  # another rank has made it
            return
        if local is not None and _is_same(local, manifest):
            _write(path, manifest, lambda write: _copy(local, write), str(local))
            return
        where = f"{folder.url}/{manifest.file}"

        def fetch(write: Callable[[Buffer], None]) -> None:
            if not folder.copy_to(manifest.file, manifest.size, write):
                raise DamagedIndexError(where, f"there is no such file of {manifest.size} bytes ({again})")

        _write(path, manifest, fetch, where, again=again)


def _write(
    path: Path,
    manifest: Manifest,
    fetch: Callable[[Callable[[Buffer], None]], None],
    where: str,
    again: str = "",
) -> None:
    """Write a file that appears once its size and digest are verified."""
    summed, at = _hasher(), 0
    with replaced(path) as fd:

        def write(data: Buffer) -> None:
            nonlocal at
            summed.update(data)
            write_at(fd, data, at)
            at += len(data)

        fetch(write)
        if (at, summed.hexdigest()) != (manifest.size, manifest.digest):
            raise DamagedIndexError(where, f"its bytes are not those that its manifest names ({again})")


def _copy(path: Path, write: Callable[[Buffer], None]) -> None:
    with opened(path) as fd:
        while data := os.read(fd, _READ_BYTES):
            write(data)


def _is_same(path: Path, manifest: Manifest) -> bool:
    status = status_of(path)
    return status is not None and status.st_size == manifest.size and file_digest(path)[1] == manifest.digest


def _hasher() -> blake2b:
    return blake2b(digest_size=32)

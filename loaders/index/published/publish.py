"""Publishing: an index file of this node -> the folder -> a manifest with the next number, or the one that is there.

The file has the name of its content, so that builders of the same data write the same file. A manifest is created only
if there is none of its number: of two builders one wins, and the other takes the winner's manifest if it is equal.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchdata.loaders.errors import DamagedIndexError
from orchdata.loaders.index.published.copies import file_digest
from orchdata.loaders.index.published.folder import PublishedFolder
from orchdata.loaders.index.published.manifest import Manifest, generations, path_of, read_manifest
from orchdata.loaders.storage.opening import opened
from orchdata.loaders.storage.remote.clients.client import Buffer
from orchdata.loaders.storage.retries import tried


def publish(
    folder: PublishedFolder,
    name: str,
    path: Path,
    *,
    patterns: tuple[str, ...],
    shards: int,
    force: bool = False,
) -> Manifest:
    """Publish an index file, and return its manifest: that of the newest generation if it has the same content.

    Args:
        name: of the data set, see `manifest.name_of`.
        path: of the index file.
        patterns, shards: as in `Manifest`.
        force: write the file also if there is one of its name and size.

    Raises StorageError.
    """
    size, digest = tried(str(path), "cannot be read", lambda: file_digest(path))

    def numbered(generation: int) -> Manifest:
        return Manifest(generation=generation, patterns=patterns, shards=shards, size=size, digest=digest)

    known = generations(folder, name)
    newest = max(known, default=0)
    manifest = numbered(newest + 1)
    there = folder.version(manifest.file)
    if force or there is None or there.size != size:
        with mapped(path) as data:
            folder.write(manifest.file, data)
    if newest and _is_equal(folder, name, numbered(newest)):
        return numbered(newest)
    while not folder.write(path_of(name, manifest.generation), manifest.encoded(), create=True):
        if _is_equal(folder, name, manifest):
            break
        manifest = numbered(manifest.generation + 1)
    return manifest


def _is_equal(folder: PublishedFolder, name: str, manifest: Manifest) -> bool:
    """Return whether the manifest of this number is that of the same index file; a damaged one is not."""
    file = folder.version(path_of(name, manifest.generation))
    if file is None:
        return False
    try:
        return read_manifest(folder, name, manifest.generation, file).digest == manifest.digest
    except DamagedIndexError:
        return False


@contextmanager
def mapped(path: Path) -> Iterator[Buffer]:
    """Yield the content of a file that is not empty. Raises OSError."""
    with opened(path) as fd, mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        yield view

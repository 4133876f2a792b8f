"""The user's own columns of a published index: one file next to it, which nodes fetch like the index.

    fields/<digest of index file and names>.merged

The index and the names decide its content, so that whoever writes it writes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from orchdata.loaders.claims import Claims
from orchdata.loaders.index.fields.layer import FOLDER
from orchdata.loaders.index.fields.merged import fields_path
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.published.folder import PublishedFolder
from orchdata.loaders.index.published.publish import mapped
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.opening import status_of


def fetch_fields(folder: PublishedFolder, index: Index, names: Sequence[str]) -> bool:
    """Have the node's cache folder keep the columns of an index, if they are published. Return whether it has them.

    They are verified when they are opened. Raises StorageError.
    """
    cache = CacheFolder()
    path = fields_path(index, names, cache)
    if status_of(path) is not None:
        return True
    name = f"fields/{path.name}"
    with closing(Claims(cache.file("locks", FOLDER))) as claims, claims.claim(str(path), go_on=lambda: True):
        if status_of(path) is not None:
            return True
        file = folder.version(name)
        if file is None:
            return False
        data = folder.read(name, file)
        if data is None:
            return False
        cache.make(FOLDER)
        write_whole(path, data)
        return True


def publish_fields(folder: PublishedFolder, index: Index, names: Sequence[str], *, force: bool = False) -> None:
    """Publish the columns that the node's cache folder has, if they are not there. Raises StorageError.

    Args:
        force: also if they are.
    """
    path = fields_path(index, names, CacheFolder())
    name = f"fields/{path.name}"
    if not force and folder.version(name) is not None:
        return
    with mapped(path) as data:
        folder.write(name, data)

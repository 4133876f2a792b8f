"""Listings: a pattern -> the objects that match it; many URLs -> their sizes and versions, from few requests."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from itertools import islice

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.remote.objects import Objects
from orchdata.loaders.storage.remote.urls import HTTP, MAGIC, check_key, is_match, parsed, scheme_of
from orchdata.loaders.storage.storage import FileVersion


def matches(objects: Objects, pattern: str) -> dict[str, FileVersion]:
    """Return the objects that a pattern matches, sorted by URL, with sizes and versions.

    It matches as `urls.is_match`. A key that is equal to the pattern is the only match.

    Raises StorageError, and ValueError for a match with a key that cannot be read.
    """
    url = parsed(pattern)
    magic = MAGIC.search(url.key)
    if magic is None:
        raise StorageError(pattern, "a pattern may stand in the keys, not in the name of the bucket", errno.EINVAL)
    folder = url.key[: magic.start()].rpartition("/")[0]
    folder += "/" if folder else ""
    last = url.key[len(folder) :]
    is_deep = "/" in last or last == "**"
    found: dict[str, FileVersion] = {}
    for page in objects.pages(f"{url.root}/{folder}", deep=is_deep):
        for key, file in page:
            if key == url.key:
                return {f"{url.root}/{key}": file}
            if is_match(url.key, key):
                check_key(f"{url.root}/{key}")
                found[f"{url.root}/{key}"] = file
    return dict(sorted(found.items()))


def versions_of(objects: Objects, urls: Sequence[str]) -> dict[str, FileVersion]:
    """Return size and version of each object that exists: from a listing of its folder, if that takes fewer requests
    than to look at each. Raises StorageError.
    """
    found: dict[str, FileVersion] = {}
    folders: dict[str, list[str]] = {}
    for url in urls:
        folders.setdefault(url.rpartition("/")[0] + "/", []).append(url)
    for folder, wanted in folders.items():
        if len(wanted) > 1 and scheme_of(folder) not in HTTP:
            found |= _listed(objects, folder, wanted)
    return found | objects.versions([url for url in urls if url not in found])


def is_unlisted(error: StorageError) -> bool:
    """Return whether objects may be there that no listing gives: these credentials may not list, or a key of another
    object is none that the client can have.
    """
    return error.is_refused or error.errno == errno.EILSEQ


def _listed(objects: Objects, folder: str, wanted: Sequence[str]) -> Mapping[str, FileVersion]:
    """List a folder, for at most as many pages as there are objects that are wanted."""
    root = parsed(folder).root
    left = set(wanted)
    found: dict[str, FileVersion] = {}
    try:
        for page in islice(objects.pages(folder), len(wanted)):
            for key, file in page:
                if (url := f"{root}/{key}") in left:
                    found[url] = file
                    left.discard(url)
            if not left:
                break
    except StorageError as error:
        if not is_unlisted(error):
            raise
    return found

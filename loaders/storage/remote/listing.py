"""Listings: a pattern -> the objects that match it; many URLs -> their sizes and versions, from few requests."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final

from orchdata.loaders.errors import StorageError
from orchdata.loaders.slow import here
from orchdata.loaders.storage.remote.objects import Objects
from orchdata.loaders.storage.remote.patterns import MAGIC, expression
from orchdata.loaders.storage.remote.urls import HTTP, check_key, parsed, scheme_of
from orchdata.loaders.storage.storage import FileVersion

_THREADS: Final = 32


def matches(objects: Objects, pattern: str) -> dict[str, FileVersion]:
    """Return the objects that a pattern matches, sorted by URL, with sizes and versions.

    `*`, `?` and `[...]` match within a folder; `**` matches any number of folders. Names that begin with a dot are left
    out, unless the pattern has the dot. A key that is equal to the pattern is the only match.

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
    fits = re.compile(expression(url.key))
    found: dict[str, FileVersion] = {}
    for page in objects.pages(f"{url.root}/{folder}", deep=is_deep):
        for key, file in page:
            if key == url.key:
                return {f"{url.root}/{key}": file}
            if fits.fullmatch(key):
                check_key(f"{url.root}/{key}")
                found[f"{url.root}/{key}"] = file
    return dict(sorted(found.items()))


def versions_of(objects: Objects, urls: Sequence[str]) -> dict[str, FileVersion]:
    """Return size and version of each object that exists: from a listing of its folder, if that takes fewer requests
    than to look at each. Raises StorageError.
    """
    found: dict[str, FileVersion] = {}
    for folder, wanted in _by_folder(urls).items():
        if len(wanted) > 1 and scheme_of(folder) not in HTTP:
            found |= _listed(objects, folder, wanted)
    return found | looked_at(objects, [url for url in urls if url not in found])


def looked_at(objects: Objects, urls: Sequence[str]) -> dict[str, FileVersion]:
    """Return size and version of each object that exists, with a request for each. Raises StorageError."""
    if not urls:
        return {}
    ended = threading.Event()

    def version(url: str) -> FileVersion | None:
        here().ended = ended.is_set
        return objects.version(url)

    with ThreadPoolExecutor(min(_THREADS, len(urls)), thread_name_prefix="orchdata-heads") as pool:
        try:
            looked = zip(urls, pool.map(version, urls), strict=True)
            return {url: file for url, file in looked if file is not None}
        except BaseException:  # of one of them, or Ctrl-C: the others are not waited for
            ended.set()
            pool.shutdown(cancel_futures=True)
            raise


def _listed(objects: Objects, folder: str, wanted: Sequence[str]) -> Mapping[str, FileVersion]:
    """List a folder, for at most as many pages as there are objects that are wanted."""
    root = parsed(folder).root
    left = set(wanted)
    found: dict[str, FileVersion] = {}
    for deep in (True, False):
        try:
            for page in islice(objects.pages(folder, deep=deep), len(wanted)):
                for key, file in page:
                    if (url := f"{root}/{key}") in left:
                        found[url] = file
                        left.discard(url)
                if not left:
                    break
            break
        except StorageError as error:
            if error.errno == errno.EACCES:  # these credentials may read, perhaps, and not list
                break
            if error.errno != errno.EILSEQ:  # of a key below it, perhaps
                raise
    return found


def _by_folder(urls: Iterable[str]) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for url in urls:
        folders.setdefault(url.rpartition("/")[0] + "/", []).append(url)
    return folders

"""Files: every file of a data set, on this machine or in object storage, by its path or URL. A value that pickles.

path or URL --scheme--> a local file, or objects of a store --> identity, version, names, open files
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage import local
from orchdata.loaders.storage.node import Cache, CopiedFile, Copies
from orchdata.loaders.storage.remote import urls
from orchdata.loaders.storage.remote.objects import Looks, Objects, RemoteFile, matches
from orchdata.loaders.storage.remote.requests import RETRY_SECONDS
from orchdata.loaders.storage.storage import FileVersion, ReadBytes, Storage

_OF_TIMEOUT: Final = 0.6
"""The part of a loader's timeout that an outage may last."""
_LISTED_SECONDS: Final = 60.0
"""How long a listing is taken for the present."""


class Files:
    """Names, versions, listings and bytes of files. Two are equal if they read the same way. What is open is kept with
    the object, in each process. Safe from many threads; a failed call raises StorageError after some attempts.

    Args:
        options: `storage_options` of object storage.
        store: of the user's for all URLs: of obstore, or a filesystem of fsspec. None: one for each bucket.
        given: URL without secrets -> the URL as it was given, if it has a query or a password.

    Attributes:
        others: URL -> the files that have it, of data sets with other options in one mixture.
        cache: where a node keeps whole copies; None: nowhere.
    """

    def __init__(
        self, options: Mapping[str, Any] | None = None, store: Any = None, given: Mapping[str, str] | None = None
    ) -> None:
        self.options: Final = dict(options or {})
        self.store: Final = store
        self.given: Final = dict(given or {})
        self.others: Mapping[str, Files] = {}
        self._known: dict[str, FileVersion] = {}
        self._known_at = 0.0
        self._objects: Objects | None = None
        self.cache: Cache | None = None
        self._copies: Copies | None = None
        self._lock = threading.Lock()

    def read_by(self, *, timeout: float = 0, cache: Cache | None = None, **_: Any) -> Files:
        """Return files as a loader with these arguments, of which others say nothing of files, reads them.

        Args:
            timeout: seconds of a step: an outage gets less; 0: as much as by default.
            cache: where this node has copies, which are read in place of objects.
        """
        if not timeout and cache is None:
            return self
        given, most = float(self.options.get("retry_seconds", RETRY_SECONDS)), _OF_TIMEOUT * float(timeout)
        options = self.options | {"retry_seconds": most} if timeout and given > most else self.options
        files = Files(options, self.store, self.given)
        # The URLs of a data set share one, and so its clients.
        others = {id(other): other for other in self.others.values()}
        changed = {key: other.read_by(timeout=timeout, cache=cache) for key, other in others.items()}
        files.others = {url: changed[id(other)] for url, other in self.others.items()}
        files.cache, files._objects = cache, None if timeout else self.objects
        return files

    @property
    def copies(self) -> Copies | None:
        """The copies of this node; None without a cache."""
        if self.cache is None:
            return None
        with self._lock:
            if self._copies is None:
                self._copies = Copies(self.cache)
            return self._copies

    def of(self, shard: str) -> Files:
        """Return the files of the data set that has a shard, for the media that it names."""
        return self.others.get(shard, self)

    def version(self, path: str, *, retries: bool = True) -> FileVersion | None:
        if not urls.is_remote(path):
            return local.version(path, retries=retries)
        if (other := self.others.get(path)) is not None:
            return other.version(path)
        return self._known.get(path) or self.objects.version(path)

    def size_of(self, path: str, *, retries: bool = True) -> int:
        """Return the bytes of a file, or of the files of a folder; 0 if it does not exist. Raises as `version`."""
        version = self.version(path, retries=retries)
        return 0 if version is None else version.size

    def open(self, path: str, known: FileVersion | None = None, reads: ReadBytes | None = None) -> Storage:
        """Open a file; an object with a `known` size and version takes no request. Raises StorageError, and ShardError
        if it is not a regular file.
        """
        if not urls.is_remote(path):
            return local.LocalFile(path, count=None if reads is None else reads.storage)
        if (other := self.others.get(path)) is not None:
            return other.open(path, known, reads)
        if known is None:
            known = self.version(path)
        if known is None:
            raise StorageError(path, "cannot be opened: no such object", errno.ENOENT)
        if (copies := self.copies) is not None:
            return CopiedFile(self.objects, path, known, reads, copies)
        return RemoteFile(self.objects, path, known, reads)

    def file_number(self, path: str) -> Hashable | None:
        return None if urls.is_remote(path) else local.file_number(path)

    def why_same(self, path: str, other: str) -> str | None:
        return None if urls.is_remote(path) or urls.is_remote(other) else local.why_same(path, other)

    @property
    def objects(self) -> Objects:
        """What this process has open of object storage."""
        with self._lock:
            if self._objects is None:
                self._objects = Objects(self.options, self.store, self.given)
            return self._objects

    def knowing(self, versions: Mapping[str, FileVersion]) -> Files:
        """Return files that take sizes and versions of objects from a listing that was just made."""
        files = Files(self.options, self.store, self.given)
        files._known, files._objects, files._known_at = dict(versions), self.objects, time.monotonic()
        return files

    def matches(self, pattern: str) -> dict[str, FileVersion]:
        """Return the objects that a pattern matches, as `listing.matches`."""
        return matches(self.objects, pattern)

    def looked_up(self, paths: Sequence[str]) -> Files:
        """Return files that know sizes and versions of these objects, from few requests. Raises StorageError."""
        if time.monotonic() - self._known_at < _LISTED_SECONDS and self._known.keys() >= set(paths):
            return self
        looks = Looks(self.objects)
        looks.find(paths)
        return self.knowing({path: file for path in paths if (file := looks.known[path]) is not None})

    @property
    def listed(self) -> Mapping[str, FileVersion]:
        """Size and version of the objects of a listing that was just made, by URL."""
        is_new = time.monotonic() - self._known_at < _LISTED_SECONDS
        return self._known if is_new else {}

    def forget(self, path: str) -> None:
        """Look at an object again, in place of what a listing said."""
        self._known.pop(path, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Files):
            return NotImplemented
        mine, others = (self.options, self.given, self.cache), (other.options, other.given, other.cache)
        return mine == others and self.store is other.store

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.options)), id(self.store)))

    def __repr__(self) -> str:
        """Options and URLs as given are secret."""
        return "Files()"

    def __reduce__(self) -> tuple[Callable[..., Files], tuple[Any, ...]]:
        return _restored, (self.options, self.store, self.given, dict(self.others), self.cache)


def _restored(
    options: Mapping[str, Any], store: Any, given: Mapping[str, str], others: Mapping[str, Files], cache: Cache | None
) -> Files:
    files = Files(options, store, given)
    files.others, files.cache = others, cache
    return files


def joined_files(parts: Sequence[tuple[Sequence[str], Files]]) -> Files:
    """Return the files of several data sets: a shard, and its media, by those of the first that has it."""
    if all(files == parts[0][1] for _, files in parts):
        return parts[0][1]
    joined = Files()
    joined.others = {url: files for paths, files in reversed(parts) for url in paths}
    return joined


PLAIN_FILES: Final = Files()
"""Files with the credentials of the environment."""

"""Objects of storage by names that come from data: only objects below one URL are read.

Sizes and etags come from a listing of the folders that records name, or from a look at each object: whichever takes
fewer requests. The index keeps a few bits of each etag, which are compared with the etag of each answer.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import quote, unquote

from orchdata.loaders.errors import DecodeError, StaleIndexError, StorageError
from orchdata.loaders.shards.jsonl.media_files import (
    EMPTY_ROOT,
    MISSING,
    MISSING_NAMES,
    MediaFolder,
    checked_name,
    shown_name,
)
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.remote.clients.client import Listed
from orchdata.loaders.storage.remote.listing import is_unlisted
from orchdata.loaders.storage.remote.objects import PIECE_BYTES, Ahead, ObjectRange
from orchdata.loaders.storage.remote.stamps import stamp_of_version, stamped
from orchdata.loaders.storage.remote.urls import HTTP, check_key, identity, is_remote, parsed, scheme_of
from orchdata.loaders.storage.storage import FileVersion

_HEAD_BYTES: Final = 32 << 10
"""Bytes that are read to find a header; more if they do not suffice."""
_MOST_LISTED: Final = 2_000_000
"""Objects of listings that are kept; of others each is looked at."""


class MediaObject:
    """An object, with the size and stamp by which a change is noticed.

    Attributes:
        size: bytes.
        stamp: of its etag, STAMP_BITS bits.
    """

    def __init__(self, folder: ObjectFolder, name: str, file: FileVersion) -> None:
        self.size = file.size
        self.stamp = stamp_of_version(file.version)
        self._folder = folder
        self._name = name
        self._file = file
        self._head = b""

    def read(self, size: int) -> bytes:
        """Read the first `size` bytes; fewer if the object is shorter. Raises StorageError, DecodeError."""
        size = min(size, self.size)
        if size > len(self._head):
            stop = min(self.size, max(size, _HEAD_BYTES))
            self._head = self._folder.content(self._name, self._file, stop)
        return self._head[:size]


class ObjectFolder:
    """The objects below one URL. Safe from many threads.

    Args:
        root: the URL.
        files: reads it.
        reads: counts bytes and requests.

    Attributes:
        missing: some of the names without an object.
        has_files: whether any name had an object.
    """

    is_counted: Final = True

    def __init__(self, root: str, files: Files, reads: ReadBytes | None = None) -> None:
        self.root = root.rstrip("/")
        self.missing: list[str] = []
        self.has_files = False
        self._files = files
        self._reads = reads
        self._is_http = scheme_of(root) in HTTP
        self._start = len(parsed(f"{self.root}/").key)
        self._versions: dict[str, FileVersion | None] = {}
        self._pages: dict[str, Iterator[list[Listed]]] = {}
        self._allowed: dict[str, int] = {}
        self._is_checked = False
        self._lock = threading.Lock()

    def prepare(self, names: Sequence[str]) -> None:
        """Find sizes and versions of these names together. Names that cannot be read are left out. Raises
        StorageError.
        """
        wanted: dict[str, dict[str, None]] = {}
        for name in names:
            with suppress(DecodeError):
                name = self._checked(name)
                if name not in self._versions:
                    wanted.setdefault(name.rpartition("/")[0], {})[name] = None
        with self._lock:
            for folder, some in wanted.items():
                self._find(folder, [name for name in some if name not in self._versions])

    def _find(self, folder: str, names: Sequence[str]) -> None:
        """Find versions of names in one folder. Each name allows for one more page of the folder's listing: that is
        what a look at the object would cost.
        """
        url = "/".join(filter(None, (self.root, folder)))
        if folder not in self._pages and not self._is_http and len(names) > 1:
            self._pages[folder] = self._files.objects.pages(f"{url}/")
        self._allowed[folder] = self._allowed.get(folder, 0) + len(names)
        left = set(names)
        while left and self._allowed[folder] > 0 and (page := self._next_page(folder)):
            self._allowed[folder] -= 1
            listed = {key[self._start :]: file for key, file in page}
            self._versions |= listed
            left -= listed.keys()
        urls = {self._url(name): name for name in left}
        found = self._files.objects.versions(list(urls))
        self._versions |= {name: found.get(url) for url, name in urls.items()}

    def _next_page(self, folder: str) -> list[Listed]:
        """Return the next page of a folder's listing; nothing at its end, or where listing is not allowed."""
        if folder not in self._pages or len(self._versions) >= _MOST_LISTED:
            return []
        try:
            return next(self._pages[folder], [])
        except StorageError as error:
            if not is_unlisted(error):
                raise
            self._pages[folder] = iter(())
            return []

    @contextmanager
    def open(self, name: str) -> Iterator[MediaObject]:
        """Open the object with this name, as `MediaFolder.open`."""
        name = self._checked(name)
        if name not in self._versions:
            self.prepare([name])
        file = self._versions[name]
        if file is None:
            self._check_root()
            if len(self.missing) < MISSING_NAMES:
                self.missing.append(name)
            raise DecodeError(f"{shown_name(name)}: {MISSING}")
        self.has_files = True
        yield MediaObject(self, name, file)

    def indexed(self, name: str, size: int, stamp: int | None) -> bytes:
        """Return the content of an object that was indexed with this size and stamp; None: in another place.

        Raises StorageError; DecodeError if it is another one now, or there is none.
        """
        name = self._checked(name)
        return self.content(name, self._version(name, size, stamp), size)

    def _version(self, name: str, size: int, stamp: int | None) -> FileVersion:
        """Return which version of an object to read. One that is read in pieces has the same version in all of them."""
        if stamp is not None:
            return FileVersion(size, stamped(stamp))
        if size <= PIECE_BYTES:
            return FileVersion(size, "")
        if name not in self._versions:
            self._versions[name] = self._files.objects.version(self._url(name))
        return FileVersion(size, "" if (found := self._versions[name]) is None else found.version)

    def content(self, name: str, file: FileVersion, stop: int) -> bytes:
        """Return the first bytes of an object. Raises StorageError, DecodeError."""
        if not stop:
            return b""
        try:
            return bytes(self._files.objects.read(ObjectRange(self._url(name), file, 0, stop), self._reads))
        except StaleIndexError as error:
            raise DecodeError(f"{shown_name(name)} was changed since it was indexed ({error.reason})") from None
        except StorageError as error:
            if not error.is_absent:
                raise
            self._check_root()
            raise DecodeError(f"{shown_name(name)}: {MISSING}") from None

    def expect(self, wanted: Sequence[tuple[str, int, int | None]]) -> Ahead:
        """Begin to read objects (name, size, stamp), as of `indexed`. Keep the result until they were read."""
        ranges = []
        for name, size, stamp in wanted:
            with suppress(DecodeError, StorageError):
                name = self._checked(name)
                if size:
                    ranges.append(ObjectRange(self._url(name), self._version(name, size, stamp), 0, size))
        return self._files.objects.expect(ranges, self._reads)

    def _url(self, name: str) -> str:
        """Return the URL of the object with a name. A name is no URL: in HTTP, "%20", "#" and "?" of it are quoted."""
        return f"{self.root}/{quote(name) if self._is_http else name}"

    def _checked(self, name: str) -> str:
        """Return the key below the root, without "." and empty parts, as a file system reads a path. A full URL below
        the root is allowed. Raises DecodeError for any other.
        """
        if is_remote(name) and (url := identity(name)).startswith(f"{self.root}/"):
            name = url[len(self.root) + 1 :]
            name = unquote(name) if self._is_http else name
        key = "/".join(part for part in checked_name(name).split("/") if part not in ("", "."))
        if not key:
            raise DecodeError(f"{shown_name(name)} names a folder")
        try:
            check_key(self._url(key))
        except ValueError as error:
            raise DecodeError(f"{shown_name(name)}: {error}") from None
        return key

    def _check_root(self) -> None:
        """Raise StorageError if nothing is below the root: then no object is known to be missing."""
        if self._is_checked or self._is_http:
            return
        try:
            is_empty = next(self._files.objects.pages(f"{self.root}/"), None) is None
        except StorageError as error:
            if error.errno != errno.EILSEQ:  # of an object that is there
                raise
            is_empty = False
        if is_empty:
            raise StorageError(self.root, EMPTY_ROOT, errno.ETIME)  # a build does not wait for it
        self._is_checked = True


Folder = MediaFolder | ObjectFolder


def folder_of(root: str | None, files: Files, reads: ReadBytes | None = None) -> Folder | None:
    """Return the folder of files that records name: on this machine, or in object storage."""
    if root is None:
        return None
    return ObjectFolder(root, files, reads) if is_remote(root) else MediaFolder(root)

"""Where shards come from: open files with positional reads; neighbours read with one call; retries; counts of bytes.

Size, version and name of everything that is kept in the cache come from here. Files of this machine are in `local`,
objects of storage in `remote`, and `files` chooses by the URL.
"""

from __future__ import annotations

import errno
import hashlib
import io
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from orchdata.loaders.errors import OF_THE_FILE, StorageError
from orchdata.loaders.storage.remote.urls import is_remote

Bytes = bytes | memoryview
Extent = tuple[int, int]
"""Offset and size."""


class Storage(Protocol):
    """Bytes that many threads can read at any position at the same time.

    A failed read raises StorageError after some attempts; readers never treat it as bad data.

    Attributes:
        url: the name in errors.
        size: bytes in it.
        version: changes with the content: for files the mtime in ns; a remote storage may use an etag.
        changed_ns: time of the last change, also of one that keeps size and version, in ns; for files the ctime; 0 if
            it is not known.
    """

    url: str
    size: int
    version: str
    changed_ns: int = 0

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes from `offset`; fewer only at the end of the file."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`. Return the number of bytes read, fewer only at the end of the file."""
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def expect(self, extents: Sequence[Extent]) -> object:
        """Begin to read ranges that are read soon, if that saves time. Keep the result until they were read."""
        return None

    def check_unchanged(self) -> None:
        """Raise StaleIndexError if the content may have changed since it was opened. Call it after reading."""
        return

    def close(self) -> None:
        """Release the resources after running reads have finished."""
        return


class StorageFile(io.RawIOBase):
    """A storage as a file with a position, for packages that read files. Closing it leaves the storage open."""

    before_start = "position {} is before the start of the file"

    def __init__(self, storage: Storage, position: int = 0) -> None:
        self._storage = storage
        self._position = position
        self.name = storage.url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._storage.size - self._position)
        data = self._storage.read(self._position, left if size < 0 else min(size, left)) if left else b""
        self._position += len(data)
        return data

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        got = self._storage.read_into(self._position, memoryview(buffer).cast("B"))
        self._position += got
        return got

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = (0, self._position, self._storage.size)[whence] + offset
        if position < 0:  # as of a cut file, which has no such end
            raise ValueError(self.before_start.format(position))
        self._position = position
        return position


BLOCK_BYTES: Final = 1 << 20


class ContentDigest:
    """The checksum of a whole file: of blocks that are read anyway, in any order, and of the others at the end."""

    def __init__(self, file: Storage) -> None:
        self._file = file
        self._blocks: dict[int, bytes] = {}

    @property
    def num_blocks(self) -> int:
        return -(-self._file.size // BLOCK_BYTES)

    def note(self, block: int, data: bytes | memoryview) -> None:
        """Add all bytes of a block."""
        if block not in self._blocks:
            self._blocks[block] = hashlib.blake2b(data, digest_size=16).digest()

    def hexdigest(self) -> str:
        """Return the checksum of size and content. Raises the errors of the storage."""
        digest = hashlib.blake2b(str(self._file.size).encode(), digest_size=16)
        for block in range(self.num_blocks):
            if block not in self._blocks:
                self.note(block, self._file.read(block * BLOCK_BYTES, BLOCK_BYTES))
            digest.update(self._blocks[block])
        return digest.hexdigest()


class FileVersion(NamedTuple):
    """The size and version of a file, without opening it: as `Storage.size` and `Storage.version`."""

    size: int
    version: str


STAMP_BITS: Final = 23
"""Bits of a version that an index keeps for each file that records name."""
_STAMPED: Final = "stamp "


def stamp_of_version(version: str) -> int:
    """Return STAMP_BITS bits of a version: one change in 8 million keeps the stamp."""
    digest = hashlib.blake2b(version.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> (32 - STAMP_BITS)


def stamped(stamp: int) -> str:
    """Return the version that stands for all versions with a stamp."""
    return f"{_STAMPED}{stamp}"


def fits(wanted: str, version: str) -> bool:
    """Return whether a version is the one that is wanted, or has its stamp; "" is any."""
    if wanted.startswith(_STAMPED):
        return wanted == stamped(stamp_of_version(version))
    return not wanted or wanted == version


class Run(NamedTuple):
    """Neighbouring members: their indices in order of offset, and the range of the file that they span."""

    members: list[int]
    start: int
    stop: int


def runs_of(extents: Sequence[Extent], *, gap_bytes: int, run_bytes: int | None = None) -> list[Run]:
    """Group members, which may overlap, into runs in order of offset, with gaps and runs of so many bytes at most."""
    runs: list[Run] = []
    for index in sorted(range(len(extents)), key=extents.__getitem__):
        offset, size = extents[index]
        if runs:
            members, start, stop = runs[-1]
            if offset - stop <= gap_bytes and (run_bytes is None or offset + size - start <= run_bytes):
                members.append(index)
                runs[-1] = Run(members, start, max(stop, offset + size))
                continue
        runs.append(Run([index], offset, offset + size))
    return runs


def views_of(content: Bytes, run: Run, extents: Sequence[Extent]) -> list[Bytes]:
    """Return a view of each member in what was read of a run, shorter at the end of the file."""
    view = memoryview(content)
    starts = [extents[index][0] - run.start for index in run.members]
    return [view[start : start + extents[index][1]] for start, index in zip(starts, run.members, strict=True)]


_REQUESTS: Final = ("get", "head", "list", "put", "again")
"""Reads, looks, pages of listings, writes; of these, those that were repeated after an error."""


class ByteCount:
    """A sum of bytes that many threads add to."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.value += num_bytes


class RequestCounts:
    """Requests so far by kind, from many threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] += 1

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add the counts of another process."""
        with self._lock:
            self._counts.update(counts)

    def as_dict(self) -> dict[str, int]:
        """Return the number of each kind that was made."""
        with self._lock:
            return {kind: self._counts[kind] for kind in _REQUESTS if self._counts[kind]}


class ReadBytes:
    """Bytes read so far; all are sums, so those of several ranks can be added.

    Attributes:
        requests: to object storage, by kind.
        storage: from shards as stored: members with the gaps between them, footers and column chunks of Parquet files,
            whole compressed tars, headers when a shard is checked.
        cache: from decompressed copies in the cache folder, and copies of a node, on this machine.
        used: sizes of the requested members, as in the index; decompressed for a compressed shard or column.
    """

    def __init__(self) -> None:
        self.storage = ByteCount()
        self.cache = ByteCount()
        self.used = ByteCount()
        self.requests = RequestCounts()

    def as_dict(self) -> dict[str, Any]:
        """Return the sums; `requests` by kind only if there were any."""
        sums: dict[str, Any] = {
            "storage_bytes": self.storage.value,
            "cache_bytes": self.cache.value,
            "used_bytes": self.used.value,
        }
        requests = self.requests.as_dict()
        return sums | ({"requests": requests} if requests else {})


def basename(url: str) -> str:
    """Return the last component of a path or URL."""
    return url.rstrip("/").rsplit("/", 1)[-1]


T = TypeVar("T")

# Retries after temporary errors: of a system call that failed, and of a shard that could not be read. A call is
# repeated after each of PAUSES_SECONDS. A build waits up to BUILD_SECONDS in total, and some seconds for a file that
# this user may not read. An error that lasts longer is a StorageError, and is never taken for bad data.
PAUSES_SECONDS: Final = (0.05, 0.2, 0.8)
BUILD_SECONDS: Final = 60.0
_LONGEST_PAUSE_SECONDS: Final = 8.0
_REFUSED_PAUSE_SECONDS: Final = 1.0
"""The last pause after a file that may not be read: on a network file system, a ticket may be renewed in seconds."""

_MAY_NOT: Final = (
    " (this user may not: change its permissions, or, if it is in the cache folder, set ORCHDATA_CACHE to a folder of "
    "this user's)"
)
# Waiting does not help against these: the cache folder's name is taken, it is read-only or too small, or slow work.
_LASTING: Final = OF_THE_FILE | {errno.EEXIST, errno.EROFS, errno.EFBIG, errno.EILSEQ, errno.ETIME}


def tried(url: str, doing: str, call: Callable[[], T]) -> T:
    """Return `call()`; after an OSError call it again after each of PAUSES_SECONDS. Raises StorageError (of `url`, with
    the failed action) if it failed every time, or for a permanent reason.
    """
    try:
        return call()
    except OSError as error:
        return retry(url, doing, call, error)


def retry(url: str, doing: str, call: Callable[[], T], error: OSError) -> T:
    """Continue as `tried` does after the first call failed with `error`."""
    for pause in PAUSES_SECONDS:
        if error.errno in OF_THE_FILE:
            break
        time.sleep(pause)
        try:
            return call()
        except OSError as latest:
            error = latest
    raise storage_error(url, doing, error) from error


def storage_error(url: str, doing: str, error: OSError) -> StorageError:
    """Build the error for a file: a write to a full disk does not name it, or names a temporary file."""
    hint = _MAY_NOT if error.errno in (errno.EACCES, errno.EPERM) else ""
    return StorageError(url, f"{doing}: {error.strerror or error}{hint}", error.errno)


class Patience:
    """The time that a build may wait, in total: the seconds in which at least one of its shards waits for a retry.
    `on_trouble` gets the first error, before the first wait.
    """

    def __init__(self, seconds: float, on_trouble: Callable[[Exception], None]) -> None:
        if not seconds >= 0:
            raise ValueError(f"retry_seconds must be at least 0, got {seconds}")
        self._left = seconds
        self._on_trouble = on_trouble
        self._is_reported = False
        self._waiting = 0
        self._since = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def keep_trying(self, call: Callable[[], T], *errors: type[Exception], failed: Exception | None = None) -> T:
        """Return `call()`; call it again while it raises one of `errors` and time is left; `failed` is the error of an
        earlier call.
        """
        pause = 0.25
        while True:
            if failed is not None:
                if not self._wait(failed, pause):
                    raise failed
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            try:
                return call()
            except errors as error:
                failed = error

    def end(self) -> None:
        """End all waits."""
        self._over.set()

    def _wait(self, error: Exception, pause: float) -> bool:
        """Pause. Return False if no time is left, or the error is permanent, as permissions are after some seconds."""
        if isinstance(error, StorageError) and (error.errno in _LASTING or (error.is_refused and is_remote(error.url))):
            return False  # a server that refuses has been asked twice, with credentials that are fresh
        if isinstance(error, StorageError) and error.is_refused and pause > _REFUSED_PAUSE_SECONDS:
            return False
        with self._lock:
            if self._waiting == 0:
                self._since = time.monotonic()
            left = self._left - (time.monotonic() - self._since)
            if left <= 0 or self._over.is_set():
                return False
            is_reported, self._is_reported = self._is_reported, True
            self._waiting += 1
        try:
            if not is_reported:
                self._on_trouble(error)
            return not self._over.wait(min(pause, left))
        finally:
            with self._lock:
                self._waiting -= 1
                if self._waiting == 0:
                    self._left -= time.monotonic() - self._since

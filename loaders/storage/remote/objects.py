"""Objects of storage: reads by range, looks, listings and writes; ranges that are read ahead; an object as a file.

expect(ranges) --merged--> runs under way, in pieces --read--> a sample's bytes, out of the run that has them
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from orchdata.loaders.errors import StorageError
from orchdata.loaders.memory import room
from orchdata.loaders.storage.remote import requests, urls
from orchdata.loaders.storage.remote.clients import SCHEMES, FsspecClient, HubClient, ObstoreClient, is_filesystem
from orchdata.loaders.storage.remote.requests import (
    RETRY_SECONDS,
    Answer,
    Buffer,
    Client,
    Listed,
    Pending,
    Request,
    Trouble,
)
from orchdata.loaders.storage.remote.urls import HTTP, MAGIC, check_key, is_match, parsed, scheme_of
from orchdata.loaders.storage.storage import Extent, FileVersion, ReadBytes, Storage, fits, runs_of

T = TypeVar("T")

GAP_BYTES: Final = 32 << 10
"""A gap that is read, rather than making another request: about what a connection carries in a millisecond."""
PIECE_BYTES: Final = 8 << 20
"""Most bytes of a request; larger ranges are read in pieces, at the same time."""
_MOST_LISTED: Final = 2_000_000
"""Objects of listings that are kept; of others each is looked at."""
_SIGNED_CLIENTS: Final = 32
"""Clients that stay open for URLs with queries: each of them has its own."""


class ObjectRange(NamedTuple):
    """Bytes of one object, by its URL without secrets, with the size and version that it must have."""

    url: str
    file: FileVersion
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Run:
    """A range on its way: where each piece of it begins, and its result."""

    range: ObjectRange
    pieces: list[tuple[int, Pending[Buffer]]]

    def has(self, start: int, stop: int) -> bool:
        """Return whether it has these bytes. If it failed, it is not read from: the error of a step may keep it."""
        if not self.range.start <= start <= stop <= self.range.stop:
            return False
        return not any(each.done() and each.exception() is not None for _, each in self.pieces)


Ahead = list[_Run]
"""Ranges that are fetched before they are read, as long as they are held."""


class Objects:
    """What a process has open of object storage, as `Files`. Safe from many threads; does not pickle."""

    def __init__(self, options: Mapping[str, Any], store: Any, given: Mapping[str, str]) -> None:
        self._options = options
        self._store = store
        self._given = given
        self._retry_seconds = float(options.get("retry_seconds", RETRY_SECONDS))
        self._clients: OrderedDict[tuple[str, str, str], Client] = OrderedDict()
        self._lock = threading.Lock()
        self._ahead: dict[tuple[str, str], list[weakref.ref[_Run]]] = {}
        self._full = 1000

    def version(self, url: str) -> FileVersion | None:
        """Return size and version of an object; None if there is none. Raises StorageError."""
        return self.versions([url]).get(url)

    def versions(self, wanted: Sequence[str]) -> dict[str, FileVersion]:
        """Return size and version of each object that exists, with a request for each. Raises StorageError."""
        begun: list[tuple[str, Pending[FileVersion]]] = []
        for url in wanted:
            client, key = self._client_of(url)
            if key and not key.endswith("/"):
                look = partial(client.head, key)
                begun.append((url, self._begun(url, "cannot be looked at", "head", client, look)))
        found = {}
        for url, pending in begun:
            try:
                found[url] = requests.HERE.wait(pending)
            except StorageError as error:
                if not error.is_absent:
                    raise
        return found

    def read(self, wanted: ObjectRange, reads: ReadBytes | None = None) -> Buffer:
        """Return the bytes of a range. Raises StorageError, and StaleIndexError for another object than is wanted."""
        url, file, first, last = wanted
        requests.HERE.check(url)  # before any lock: another thread of the parent may have had it
        with self._lock:
            known = [reference() for reference in self._ahead.get((url, file.version), ())]
        run = next((each for each in known if each is not None and each.has(first, last)), None)
        run = run or self._run(wanted, reads)
        parts: list[Buffer] = []
        for start, pending in run.pieces:
            if start < last and first < start + PIECE_BYTES:
                data = requests.HERE.wait(pending)
                parts.append(memoryview(data)[max(0, first - start) : last - start])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def expect(self, ranges: Sequence[ObjectRange], reads: ReadBytes | None = None) -> Ahead:
        """Ask for ranges before they are read, as few requests. Those that are near each other are read together."""
        by_object: dict[tuple[str, FileVersion], list[Extent]] = {}
        for url, file, start, stop in dict.fromkeys(ranges):
            by_object.setdefault((url, file), []).append((start, stop - start))
        begun = [
            self._run(ObjectRange(url, file, run.start, run.stop), reads)
            for (url, file), extents in by_object.items()
            for run in runs_of(extents, gap_bytes=GAP_BYTES)
        ]
        with self._lock:
            for name in {(url, file.version) for url, file in by_object}:  # without what is gone
                self._ahead[name] = [each for each in self._ahead.get(name, ()) if each()]
            for run in begun:
                self._ahead[run.range.url, run.range.file.version].append(weakref.ref(run))
            if len(self._ahead) >= self._full:  # forget now and then objects that are no longer read
                alive = {name: [each for each in known if each()] for name, known in self._ahead.items()}
                self._ahead = {name: known for name, known in alive.items() if known}
                self._full = 2 * len(self._ahead) + 1000
        return begun

    def pages(self, folder: str, *, deep: bool = True) -> Iterator[list[Listed]]:
        """Yield the objects whose URLs begin with that of a folder ("/" at its end), by key, some at a time. Without
        `deep`, those in folders below it may come, or not. Raises StorageError.
        """
        client, key = self._client_of(folder)
        after = ""
        listing = client.pages(key, after, deep=deep)

        def next_page() -> list[Listed] | None:
            # A page that fails is asked for again, from where the one before ended.
            nonlocal listing
            try:
                return next(listing, None)
            except Trouble:
                listing = client.pages(key, after, deep=deep)
                raise

        while (page := self._called(folder, "cannot be listed", "list", client, next_page)) is not None:
            if page:
                after = page[-1].key
                yield page

    def put(self, url: str, data: Buffer) -> None:
        """Write an object. Raises StorageError."""
        client, key = self._client_of(url)
        self._called(url, "cannot be written", "put", client, partial(client.put, key, data))

    def _called(self, url: str, doing: str, kind: str, client: Client, call: Callable[[], T]) -> T:
        """Return the result of a request."""
        return requests.HERE.wait(self._begun(url, doing, kind, client, call))

    def _begun(
        self,
        url: str,
        doing: str,
        kind: str,
        client: Client,
        call: Callable[[], T],
        reads: ReadBytes | None = None,
        num_bytes: int = 0,
    ) -> Pending[T]:
        """Have a thread of the pool make a request, with retries."""
        counts = requests.HERE.counts if reads is None else reads.requests
        how: dict[str, Any] = {"retry_seconds": self._retry_seconds, "counts": counts, "refresh": client.refresh}
        return requests.HERE.begin(Request(call=call, url=url, doing=doing, kind=kind, num_bytes=num_bytes, **how))

    def _run(self, wanted: ObjectRange, reads: ReadBytes | None) -> _Run:
        """Begin to read a range, in pieces."""
        url, file, first, last = wanted
        client, key = self._client_of(url)

        def get(piece: ObjectRange) -> Buffer:
            _check_room(piece)
            answer = client.get(key, piece.start, piece.stop, file.version)
            if reads is not None:
                reads.storage.add(len(answer.data))
            check(answer, piece)
            return answer.data

        pieces = []
        for start in range(first, last, PIECE_BYTES):
            piece = ObjectRange(url, file, start, min(last, start + PIECE_BYTES))
            doing, num_bytes = f"cannot be read at {start}", piece.stop - start
            pieces.append((start, self._begun(url, doing, "get", client, partial(get, piece), reads, num_bytes)))
        return _Run(wanted, pieces)

    def _client_of(self, url: str) -> tuple[Client, str]:
        """Return the client of an object, and its key. Raises StorageError in a process where no client works."""
        requests.HERE.check(url)  # before any lock, as in `read`
        parts = urls.parsed(self._given.get(url, url))
        name = parts.root, parts.query, parts.user
        with self._lock:
            client = self._clients.get(name)
            if client is None:
                client = self._clients[name] = self._opened(parts)
                signed = [each for each in self._clients if each[1]]
                for each in signed[: max(0, len(signed) - _SIGNED_CLIENTS)]:
                    del self._clients[each]
            elif parts.query:
                self._clients.move_to_end(name)
        return client, parts.key

    def _opened(self, parts: urls.ObjectUrl) -> Client:
        if self._store is None and parts.scheme in SCHEMES:
            return ObstoreClient(parts, self._options)
        if parts.scheme == "hf" and (self._store is None or hasattr(self._store, "resolve_path")):
            return HubClient(parts, self._options, self._store)
        if self._store is None or is_filesystem(self._store):
            return FsspecClient(parts, self._options, self._store)
        return ObstoreClient(parts, self._options, self._store)


def check(answer: Answer, wanted: ObjectRange) -> None:
    """Raise Trouble if an answer is of another object, or has other bytes, than what was asked for."""
    then, now = wanted.file, answer.file
    # An etag is of one content: with another size, the answer is wrong.
    is_same = now.size == then.size or (now.version == then.version and now.version.startswith('"'))
    if not is_same:
        raise Trouble("changed", f"has {now.size} bytes, {then.size} when it was indexed")
    if not fits(then.version, now.version):
        raise Trouble(
            "changed", f"was replaced since it was indexed ({then.version} then, {now.version or 'none'} now)"
        )
    got = len(answer.data), answer.start, now.size
    asked = wanted.stop - wanted.start, wanted.start, then.size
    if got != asked:
        form = "{} bytes from {} on, of {}"
        raise Trouble("passing", f"the answer has {form.format(*got)}, in place of {form.format(*asked)}")


def _check_room(wanted: ObjectRange) -> None:
    """Raise MemoryError if less memory is left than reading takes: clients end the process for lack of memory."""
    left, needed = room(), requests.needed_bytes(wanted.stop - wanted.start)
    if left is not None and left.left_bytes < needed:
        raise MemoryError(
            f"reading {wanted.stop - wanted.start} bytes of {wanted.url} takes up to {needed} bytes, and "
            f"{left.left_bytes} are left under {left.limit}"
        )


def matches(objects: Objects, pattern: str) -> dict[str, FileVersion]:
    """Return the objects that a pattern matches as `urls.is_match`, sorted by URL, with sizes and versions. A key that
    is equal to the pattern is the only match. Raises StorageError, and ValueError for a match with a key that cannot be
    read.
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


class Looks:
    """Sizes and versions of objects: from listings of their folders, where these take fewer requests than to look at
    each. Safe from many threads.

    Attributes:
        known: by URL; None for no object.
    """

    def __init__(self, objects: Objects) -> None:
        self.known: dict[str, FileVersion | None] = {}
        self._objects = objects
        self._pages: dict[str, Iterator[list[Listed]]] = {}
        self._allowed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def find(self, urls: Iterable[str]) -> None:
        """Find objects that are not known yet. Raises StorageError."""
        folders: dict[str, dict[str, None]] = {}
        for url in urls:
            if url not in self.known:
                folders.setdefault(url.rpartition("/")[0] + "/", {})[url] = None
        if not folders:
            return
        with self._lock:
            left = [url for folder, wanted in folders.items() for url in self._unlisted(folder, wanted)]
            found = self._objects.versions(left)
            self.known |= {url: found.get(url) for url in left}

    def _unlisted(self, folder: str, wanted: Iterable[str]) -> list[str]:
        """Read on in the listing of a folder, and return what is not in it. Each object that is wanted allows for one
        more page: that is what a look at the object would cost.
        """
        left = {url: None for url in wanted if url not in self.known}
        if folder not in self._pages and scheme_of(folder) not in HTTP and len(left) > 1:
            self._pages[folder] = self._objects.pages(folder)
        self._allowed[folder] += len(left)
        root = parsed(folder).root
        try:
            while left and self._allowed[folder] > 0 and len(self.known) < _MOST_LISTED:
                if not (page := next(self._pages.get(folder, iter(())), None)):
                    break
                self._allowed[folder] -= 1
                for key, file in page:
                    self.known[f"{root}/{key}"] = file
                    left.pop(f"{root}/{key}", None)
        except StorageError as error:
            # These credentials may not list, or a key of another object is none that the client can have.
            if not error.is_refused and error.errno != errno.EILSEQ:
                raise
            self._pages[folder] = iter(())
        return list(left)


BLOCK_BYTES: Final = 4 << 20
_MOST_BLOCKS: Final = 12
COPIED_AHEAD: Final = 7
"""Blocks ahead of an object that is copied as a whole, as fast as the storage gives it."""


class RemoteFile(Storage):
    """An object of storage. Each read says which version it must have, as the index has it, and gets bytes of no other.
    No request is made to open it.
    """

    def __init__(self, objects: Objects, url: str, file: FileVersion, reads: ReadBytes | None = None) -> None:
        self.url = url
        self.size, self.version = file
        self._objects = objects
        self._file = file
        self._reads = reads

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.view(offset, size))

    def view(self, offset: int, size: int) -> Buffer:
        """Read as `read`, without a copy of what was read ahead."""
        stop = min(offset + size, self.size)
        if stop <= offset:
            return b""
        return self._objects.read(ObjectRange(self.url, self._file, offset, stop), self._reads)

    def expect(self, extents: Sequence[Extent]) -> Ahead:
        ranges = [
            ObjectRange(self.url, self._file, offset, stop)
            for offset, size in extents
            if (stop := min(offset + size, self.size)) > offset
        ]
        return self._objects.expect(ranges, self._reads)


class Blocks(RemoteFile):
    """An object that is read from its start to its end: it reads large blocks, and the next `ahead` of them.

    A block is kept for a while: an index reads headers first, and texts between them after that. Blocks inside of a
    large member are left out.
    """

    def __init__(self, file: RemoteFile, ahead: int = 2) -> None:
        super().__init__(file._objects, file.url, file._file, file._reads)
        self._num_ahead = ahead
        self._blocks: OrderedDict[int, Ahead] = OrderedDict()
        self._last = -1
        self._current: tuple[int, Buffer] = (-1, b"")  # a block's number and content: most reads are of the last one
        self._lock = threading.Lock()

    def view(self, offset: int, size: int) -> Buffer:
        stop = min(offset + size, self.size)
        if stop <= offset or size > BLOCK_BYTES:
            return super().view(offset, size)
        first, last = offset // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if first == last:
            return memoryview(self._block(first))[offset % BLOCK_BYTES :][: stop - offset]
        self._begin(first, last)
        halves = [self._block(first)[offset % BLOCK_BYTES :], self._block(last)[: (stop - 1) % BLOCK_BYTES + 1]]
        return b"".join(halves)

    def _block(self, number: int) -> Buffer:
        current, content = self._current
        if current != number:
            self._begin(number, number)
            content = super().view(number * BLOCK_BYTES, BLOCK_BYTES)
            self._current = number, content
        return content

    def close(self) -> None:
        with self._lock:
            blocks, self._blocks = list(self._blocks.values()), OrderedDict()
            self._current = -1, b""
        for block in blocks:
            block.clear()

    def _begin(self, first: int, last: int) -> None:
        """Begin to read blocks, and those after them if the file is read in order."""
        with self._lock:
            in_order = first in (self._last, self._last + 1)
            self._last = max(self._last, last)
            wanted = range(first, last + 1 + (self._num_ahead if in_order else 0))
            for number in wanted:
                start = number * BLOCK_BYTES
                if number in self._blocks:
                    self._blocks.move_to_end(number)
                elif start < self.size:
                    self._blocks[number] = self.expect([(start, BLOCK_BYTES)])
            dropped = [self._blocks.popitem(last=False)[1] for _ in range(max(0, len(self._blocks) - _MOST_BLOCKS))]
        for block in dropped:
            block.clear()


def in_order(file: Storage, ahead: int = 2) -> Storage:
    """Return a file for reading from start to end: of object storage in blocks, so many of them ahead."""
    return Blocks(file, ahead) if isinstance(file, RemoteFile) and not isinstance(file, Blocks) else file

"""Objects of storage: reads by range, looks, listings and writes, with their retries; and ranges that are read ahead.

expect(ranges) --merged--> fetches under way --read--> a sample's bytes, out of the fetch that has them
"""

from __future__ import annotations

import errno
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from orchdata.loaders.errors import StorageError
from orchdata.loaders.memory import room
from orchdata.loaders.storage.coalesce import Extent, runs_of
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.storage.remote import process, requests, urls
from orchdata.loaders.storage.remote.clients.client import Answer, Buffer, Client, Listed
from orchdata.loaders.storage.remote.clients.of_obstore import SCHEMES, ObstoreClient
from orchdata.loaders.storage.remote.clients.trouble import Trouble
from orchdata.loaders.storage.remote.counts import RequestCounts
from orchdata.loaders.storage.remote.requests import Pending
from orchdata.loaders.storage.remote.stamps import fits
from orchdata.loaders.storage.remote.trying import RETRY_SECONDS, keep_trying
from orchdata.loaders.storage.storage import FileVersion

T = TypeVar("T")

GAP_BYTES: Final = 32 << 10
"""A gap that is read, rather than making another request: about what a connection carries in a millisecond."""
PIECE_BYTES: Final = 8 << 20
"""Most bytes of a request; larger ranges are read in pieces, at the same time."""
_PIECES_AHEAD: Final = 4
"""Pieces of an object that is read whole which are under way at a time."""
_SHALLOW_ATTEMPTS: Final = 3
_ENDED_SECONDS: Final = 0.2
_SIGNED_CLIENTS: Final = 32
"""Clients that stay open for URLs with queries: each of them has its own."""


class ObjectRange(NamedTuple):
    """Bytes of one object.

    Attributes:
        url: without secrets.
        file: size and version that it must have.
    """

    url: str
    file: FileVersion
    start: int
    stop: int


class Ahead:
    """Ranges that are fetched before they are read; they are dropped with this object."""

    def __init__(self, objects: Objects, fetches: Sequence[_Fetch]) -> None:
        self.num_bytes = sum(fetch.range.stop - fetch.range.start for fetch in fetches)
        self._drop = weakref.finalize(self, objects._forget, fetches)

    def close(self) -> None:
        self._drop()


class _Fetch(NamedTuple):
    """A range on its way."""

    range: ObjectRange
    pending: Pending[Buffer]


class Objects:
    """What a process has open of object storage. Safe from many threads; does not pickle.

    Args:
        options: `storage_options`.
        store: of the user's, for all URLs.
        given: URL without secrets -> the URL as it was given, if that differs.
    """

    def __init__(self, options: Mapping[str, Any], store: Any, given: Mapping[str, str]) -> None:
        self._options = options
        self._store = store
        self._given = given
        self._budget = float(options.get("retry_seconds", RETRY_SECONDS))
        self._clients: OrderedDict[tuple[str, str, str], Client] = OrderedDict()
        self._lock = threading.RLock()  # what is dropped by a collection of garbage may be dropped inside of it
        self._dropped: deque[_Fetch] = deque()
        self._ahead: dict[tuple[str, str], list[_Fetch]] = {}

    def version(self, url: str) -> FileVersion | None:
        """Return size and version of an object; None if there is none. Raises StorageError."""
        client, key = self._client_of(url)
        if not key or key.endswith("/"):
            return None
        try:
            return self._called(url, "cannot be looked at", "head", client, partial(client.head, key))
        except StorageError as error:
            if not error.is_absent:
                raise
            return None

    def read(self, wanted: ObjectRange, reads: ReadBytes | None = None) -> Buffer:
        """Return the bytes of a range. Raises StorageError, and StaleIndexError for another object than is wanted."""
        fetches = self._found(wanted)
        if fetches is None:
            fetches = [
                (fetch, fetch.range.start, fetch.range.stop)
                for fetch in self._begin([(wanted.start, wanted.stop)], wanted.url, wanted.file, reads)
            ]
        counts = requests.HERE.counts if reads is None else reads.requests
        parts: list[Buffer] = []
        try:
            for ((url, _, start, stop), pending), begin, end in fetches:
                data = requests.HERE.wait(pending, url, num_bytes=stop - start, is_read=True, counts=counts)
                parts.append(memoryview(data)[begin - start : end - start])
            return parts[0] if len(parts) == 1 else b"".join(parts)
        except BaseException:
            data = b""  # the error refers to this frame
            del fetches, parts
            raise

    def expect(self, ranges: Sequence[ObjectRange], reads: ReadBytes | None = None) -> Ahead:
        """Ask for ranges before they are read, as few requests. Those that are near each other are read together."""
        fetches: list[_Fetch] = []
        by_object: dict[tuple[str, FileVersion], list[Extent]] = {}
        for url, file, start, stop in dict.fromkeys(ranges):
            by_object.setdefault((url, file), []).append((start, stop - start))
        for (url, file), extents in by_object.items():
            runs = runs_of(_apart(extents), gap_bytes=GAP_BYTES)
            fetches += self._begin([(run.start, run.stop) for run in runs], url, file, reads)
        with self._lock:
            self._forget(())
            for fetch in fetches:
                self._ahead.setdefault((fetch.range.url, fetch.range.file.version), []).append(fetch)
        return Ahead(self, fetches)

    def pages(self, folder: str, *, deep: bool = True) -> Iterator[list[Listed]]:
        """Yield the objects whose URLs begin with that of a folder, by key, some at a time. Raises StorageError.

        Args:
            folder: URL that ends in "/".
            deep: with those in folders below it; otherwise they may come, or not.
        """
        client, key = self._client_of(folder)
        after, failed = "", 0
        listing = client.pages(key, after, deep=deep)

        def next_page() -> list[Listed] | None:
            # A page that fails is asked for again, from where the one before ended.
            nonlocal listing, failed
            try:
                return next(listing, None)
            except Trouble:
                failed += 1  # a client may have to begin a listing of one folder again, which may never end
                listing = client.pages(key, after, deep=deep or failed >= _SHALLOW_ATTEMPTS)
                raise

        while (page := self._called(folder, "cannot be listed", "list", client, next_page)) is not None:
            if page:
                after = page[-1].key
                yield page

    def put(self, url: str, data: Buffer, *, create: bool = False) -> bool:
        """Write an object; with `create` only if there is none. Return whether it was written. Raises StorageError."""
        client, key = self._client_of(url)
        try:
            self._called(url, "cannot be written", "put", client, partial(client.put, key, data, create=create))
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        return True

    def delete(self, url: str) -> None:
        """Remove an object, if it is there. Raises StorageError."""
        client, key = self._client_of(url)
        try:
            self._called(url, "cannot be removed", "put", client, partial(client.delete, key))
        except StorageError as error:
            if not error.is_absent:
                raise

    def pieces(
        self, url: str, file: FileVersion, reads: ReadBytes, ended: Callable[[], bool] = lambda: False
    ) -> Iterator[Buffer]:
        """Yield all bytes of an object in order. Some pieces are under way at a time, after all other requests.

        Args:
            ended: whether no more of them are wanted; looked at several times a second.

        Raises StorageError, and StaleIndexError for another object than is wanted.
        """
        client, key = self._client_of(url)

        def read(wanted: ObjectRange) -> Buffer:
            def request() -> Buffer:
                reads.requests.add("get")
                answer = client.get(key, wanted.start, wanted.stop, file.version)
                reads.storage.add(len(answer.data))
                check(answer, wanted)
                return answer.data

            return self._try(request, url, f"cannot be read at {wanted.start}", client, reads.requests, ended)

        left = (
            ObjectRange(url, file, start, min(file.size, start + PIECE_BYTES))
            for start in range(0, file.size, PIECE_BYTES)
        )
        under_way: deque[Pending[Buffer]] = deque()
        try:
            while True:
                for wanted in islice(left, _PIECES_AHEAD - len(under_way)):
                    under_way.append(requests.HERE.submit(partial(read, wanted), later=True))
                if not under_way:
                    return
                while not under_way[0].wait(_ENDED_SECONDS):
                    if ended():
                        return
                yield under_way.popleft().result()
        finally:
            for pending in under_way:
                pending.drop()

    def _called(self, url: str, doing: str, kind: str, client: Client, call: Callable[[], T]) -> T:
        """Have a thread of the pool make a request, with retries, and wait for it."""
        counts = requests.HERE.counts

        def request() -> T:
            counts.add(kind)
            return call()

        pending = requests.HERE.submit(partial(self._try, request, url, doing, client, counts))
        return requests.HERE.wait(pending, url)

    def _try(
        self,
        request: Callable[[], T],
        url: str,
        doing: str,
        client: Client,
        counts: RequestCounts,
        ended: Callable[[], bool] = lambda: False,
    ) -> T:
        return keep_trying(
            request,
            url=url,
            doing=doing,
            budget=self._budget,
            counts=counts,
            outage=requests.HERE.outage,
            refresh=client.refresh,
            ended=ended,
        )

    def _begin(
        self, extents: Sequence[tuple[int, int]], url: str, file: FileVersion, reads: ReadBytes | None
    ) -> list[_Fetch]:
        """Begin to read ranges of an object, in pieces."""
        client, key = self._client_of(url)
        fetches = []
        for start, stop in extents:
            for begin in range(start, stop, PIECE_BYTES):
                wanted = ObjectRange(url, file, begin, min(stop, begin + PIECE_BYTES))
                fetches.append(_Fetch(wanted, self._pending(client, key, wanted, reads)))
        for fetch in fetches:
            requests.HERE.begin(fetch.pending)
        return fetches

    def _pending(self, client: Client, key: str, wanted: ObjectRange, reads: ReadBytes | None) -> Pending[Buffer]:
        """Return a read that has not begun. Retries end with the last who may ask for it."""
        is_ended = lambda: pending.is_done or not pending.is_wanted  # noqa: E731 - the read and its end name each other
        read = partial(self._fetch, client, key, wanted, reads, is_ended)
        pending: Pending[Buffer] = Pending(read, wanted.stop - wanted.start)
        return pending

    def _fetch(
        self, client: Client, key: str, wanted: ObjectRange, reads: ReadBytes | None, is_ended: Callable[[], bool]
    ) -> Buffer:
        """Read a range, with retries; a thread of the pool calls this."""
        counts = requests.HERE.counts if reads is None else reads.requests

        def request() -> Buffer:
            began = time.monotonic()
            _check_room(wanted)
            counts.add("get")
            answer = client.get(key, wanted.start, wanted.stop, wanted.file.version)
            if reads is not None:
                reads.storage.add(len(answer.data))
            check(answer, wanted)
            requests.HERE.timed(time.monotonic() - began, wanted.stop - wanted.start)
            return answer.data

        return self._try(request, wanted.url, f"cannot be read at {wanted.start}", client, counts, is_ended)

    def _found(self, wanted: ObjectRange) -> list[tuple[_Fetch, int, int]] | None:
        """Return the fetches under way that have a range, in order; None if they do not have all of it.

        Each comes with the bytes that are read from it, as start and stop: fetches of several steps may overlap.
        """
        if not self._ahead:
            return None
        with self._lock:
            fetches = self._ahead.get((wanted.url, wanted.file.version), ())
            found: list[tuple[_Fetch, int, int]] = []
            at = wanted.start
            while at < wanted.stop:
                # One that failed may be kept by the error of its step: it is read again.
                here = [each for each in fetches if each.range.start <= at < each.range.stop]
                here = [each for each in here if not each.pending.has_failed]
                if not here:
                    return None
                fetch = max(here, key=lambda each: each.range.stop)
                stop = min(fetch.range.stop, wanted.stop)
                found.append((fetch, at, stop))
                at = stop
            for fetch, _, _ in found:
                fetch.pending.is_awaited = True
            return found

    def _forget(self, fetches: Sequence[_Fetch]) -> None:
        """Drop ranges. A finalizer calls this, and does not wait: what another thread's lock keeps is dropped later."""
        self._dropped.extend(fetches)
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self._dropped:
                fetch = self._dropped.popleft()
                key = fetch.range.url, fetch.range.file.version
                left = [each for each in self._ahead.get(key, ()) if each is not fetch]
                if left:
                    self._ahead[key] = left
                else:
                    self._ahead.pop(key, None)
                if not fetch.pending.is_awaited:
                    fetch.pending.drop()
        finally:
            self._lock.release()

    def _client_of(self, url: str) -> tuple[Client, str]:
        """Return the client of an object, and its key. Raises StorageError in a process where no client works."""
        process.check(url)  # before any lock: another thread of the parent may have had it
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
        from orchdata.loaders.storage.remote.clients.of_fsspec import FsspecClient, is_filesystem
        from orchdata.loaders.storage.remote.clients.of_hub import SCHEME, HubClient

        if self._store is None and parts.scheme in SCHEMES:
            return ObstoreClient(parts, self._options)
        if parts.scheme == SCHEME and (self._store is None or hasattr(self._store, "resolve_path")):
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
        raise Trouble("passing", f"the answer has {form.format(*got)}, in place of {form.format(*asked)}", is_odd=True)


def _check_room(wanted: ObjectRange) -> None:
    """Raise MemoryError if less memory is left than reading takes: clients end the process for lack of memory."""
    left, needed = room(), requests.needed_bytes(wanted.stop - wanted.start)
    if left is not None and left.left_bytes < needed:
        raise MemoryError(
            f"reading {wanted.stop - wanted.start} bytes of {wanted.url} takes up to {needed} bytes, and "
            f"{left.left_bytes} are left under {left.limit}"
        )


def _apart(extents: Sequence[Extent]) -> list[Extent]:
    """Return ranges without overlaps, that have the same bytes."""
    apart: list[Extent] = []
    for start, size in sorted(extents):
        if apart and start < sum(apart[-1]):
            begin, before = apart[-1]
            apart[-1] = begin, max(before, start + size - begin)
        else:
            apart.append((start, size))
    return apart

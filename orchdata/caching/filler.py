"""Filler: a thread that copies a node's own shards into its cache, in the order in which the loader reaches them.

    position of the loader --order--> shards of the next samples --not copied yet--> fetched whole --> copies

Each rank of a node has one, in its training process. A shard that one of them fetches is left to it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import IO, Final, NamedTuple

import numpy as np

from orchdata.loaders.errors import OrchdataError, StaleIndexError
from orchdata.loaders.index.index import Index
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.node.cache import Cache
from orchdata.loaders.storage.node.copies import Added, Copies, name_of
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import FileVersion
from orchdata.notices import warn_once
from orchdata.order.order import SampleOrder

_SAMPLES_AHEAD: Final = 4096
_STOP_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 1.0
_MOST_FAILURES: Final = 3

_log = logging.getLogger("orchdata")
_FILLERS: weakref.WeakSet[Filler] = weakref.WeakSet()


class Place(NamedTuple):
    """Where a loader stands: an epoch, and the share of it that was begun."""

    epoch: int
    share: float


class Filler:
    """Copies shards while a loader iterates. The thread ends with the loader, and never runs in a forked process.

    Args:
        cache: of the node.
        index: the shards.
        files: reads them.
        order: of the loader.
        streams: streams of the order that this node alone reads; None for all.
        reads: counts what is fetched.
    """

    def __init__(
        self, cache: Cache, index: Index, files: Files, order: SampleOrder, streams: range | None, reads: ReadBytes
    ) -> None:
        self.cache = cache
        self.order = order
        self._copies = Copies(cache)
        self._index = index
        self._files = files
        self._streams = None if streams is None else np.array(streams, np.int64)
        self._reads = reads
        self._wanted = [_is_copied(shard) for shard in index.shards]
        self.names = frozenset(
            name_of(shard.url, _file_of(shard))
            for shard, wanted in zip(index.shards, self._wanted, strict=True)
            if wanted
        )
        self._where: Callable[[], Place] = lambda: Place(0, 0.0)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        _FILLERS.add(self)

    def begin(self, where: Callable[[], Place]) -> None:
        """Copy what is read from there on.

        Args:
            where: returns where the loader stands now.
        """
        if not self.names or os.getpid() != self._process:
            return
        self._where = where
        if self._thread is None or not self._thread.is_alive():
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="orchdata-cache", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. A shard that it was fetching is not kept."""
        if os.getpid() != self._process:
            return
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)

    def wait(self) -> None:
        """Wait until all that is wanted now is copied, or the cache is full."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._fill()
        except _Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - a cache costs no epoch
            _warn(f"the cache {self.cache.path} cannot be filled, and shards are read from the store: {error}")

    def _fill(self) -> None:
        """Copy shards until all are there, or there is no room. Raises OSError or StorageError of the folder."""
        failures, left = 0, deque[int]()
        for number in chain(self._upcoming(), self._again(left)):
            try:
                added = self._add(self._index.shards[number])
            except _NotFetched as error:
                # If it lasts, steps fail too, and say why.
                if isinstance(error.__cause__, StaleIndexError):
                    continue
                failures += 1
                if failures >= _MOST_FAILURES:
                    _warn(f"shards are not copied into the cache {self.cache.path}: {error.__cause__}")
                    return
                added = "busy"
            else:
                failures = 0
            if added == "busy":
                left.append(number)
            elif added == "too large":
                _warn(
                    f"the cache {self.cache.path} holds {self.cache.max_bytes:,} bytes, less than the shard "
                    f"{self._index.shards[number].url}: shards of this size are not copied"
                )
            elif added == "full":
                return

    def _again(self, left: deque[int]) -> Iterator[int]:
        """Yield, after a pause, shards that other processes were fetching: one of them may have been killed."""
        while left and not self._stop.wait(_PAUSE_SECONDS):
            for _ in range(len(left)):
                yield left.popleft()

    def _add(self, shard: ShardInfo) -> Added:
        file = _file_of(shard)
        if self._copies.has(shard.url, file):
            return "there"
        return self._copies.add(shard.url, file, partial(self._fetch, shard, file), _Stay(self.cache))

    def _fetch(self, shard: ShardInfo, file: FileVersion, out: IO[bytes]) -> None:
        """Write a shard. Raises _NotFetched for trouble of the store or of memory, OSError for that of the folder."""
        objects = self._files.others.get(shard.url, self._files).objects
        pieces = objects.pieces(shard.url, file, self._reads, self._stop.is_set)
        written = 0
        while True:
            try:
                piece = next(pieces, None)
            except (OrchdataError, MemoryError) as error:  # of memory, there may be more later
                raise _NotFetched from error
            if piece is None:
                break
            out.write(piece)
            written += len(piece)
        if written != file.size:
            raise _Stopped

    def _upcoming(self) -> Iterator[int]:
        """Yield the numbers of shards, each once, from the loader's place on, through this epoch and the next."""
        seen: set[int] = set()
        first = self._where().epoch
        for epoch in (first, first + 1):
            length = self.order.length(epoch)
            at = self._position(epoch, length)
            while at < length:
                stop = min(length, at + _SAMPLES_AHEAD)
                for number, last in self._shards_between(epoch, at, stop):
                    if self._stop.is_set():
                        return
                    # What was passed meanwhile is read again in the next epoch.
                    if number not in seen and last >= self._position(epoch, length):
                        seen.add(number)
                        yield number
                at = max(stop, self._position(epoch, length))

    def _position(self, epoch: int, length: int) -> int:
        """Return the first position of an epoch that the loader has not begun."""
        place = self._where()
        if place.epoch == epoch:
            return min(length, int(place.share * length))
        return length if place.epoch > epoch else 0

    def _shards_between(self, epoch: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the shards that this node reads there, as they come, each with its last position."""
        try:
            rows, positions = self.order.rows(epoch, start, stop)[1], np.arange(start, stop)
        except IndexError:  # of an epoch whose samples changed before the loader's place
            return []
        if self._streams is not None:
            mine = np.isin(self.order.drawn_from(epoch, start, stop), self._streams)
            rows, positions = rows[mine], positions[mine]
        shards = np.asarray(self._index.shard[rows])
        last = dict(zip(shards.tolist(), positions.tolist(), strict=True))
        return [(number, last[number]) for number in dict.fromkeys(shards.tolist()) if self._wanted[number]]


class _Stay:
    """Names of copies that a run does not remove: those of all its loaders with this cache."""

    def __init__(self, cache: Cache) -> None:
        self._names = [each.names for each in list(_FILLERS) if each.cache.path == cache.path]

    def __contains__(self, name: object) -> bool:
        return any(name in names for names in self._names)


class _Stopped(Exception):
    """The loader has ended."""


class _NotFetched(Exception):
    """The store did not give a shard; the cause says why."""


def _is_copied(shard: ShardInfo) -> bool:
    """Return whether a shard may be copied: an object with a version. A compressed one has a decompressed copy, and of
    one whose beginning was indexed most is not read.
    """
    return is_remote(shard.url) and not shard.packed and not shard.reach and bool(shard.version and shard.size)


def _file_of(shard: ShardInfo) -> FileVersion:
    return FileVersion(shard.size, shard.version)


def _warn(message: str) -> None:
    """Warn once. Where warnings are errors, none can be raised from this thread into the loader."""
    try:
        warn_once("trouble with a cache", message)
    except Warning:
        _log.warning("%s", message)

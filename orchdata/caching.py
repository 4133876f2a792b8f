"""What fills the cache of a loader: which shards a node has of its own, and the thread that copies them.

    position of the loader --order--> shards of the next samples --not copied yet--> fetched whole --> copies

A node's own shards are those that no other node reads; a cache keeps these alone. Each rank of a node has a thread in
its training process. A shard that one of them fetches is left to it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain, compress
from typing import IO, Final

import numpy as np

from orchdata.building.step import BuildSpec
from orchdata.loaders.errors import OrchdataError, StaleIndexError
from orchdata.loaders.index.index import Index
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.cache import copy_name
from orchdata.loaders.storage.files import Cache, Copies, Files
from orchdata.loaders.storage.remote.objects import BLOCK_BYTES, COPIED_AHEAD, Blocks, RemoteFile
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import FileVersion, ReadBytes
from orchdata.loaders.watch import Ended, here
from orchdata.notices import warn_once
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order, SampleOrder
from orchdata.planning.balance import Balance
from orchdata.planning.windows import WindowBatches
from orchdata.ranks.parallel import Rank

_SAMPLES_AHEAD: Final = 4096
_STOP_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 1.0
_MOST_FAILURES: Final = 3

_log = logging.getLogger("orchdata")
_FILLERS: weakref.WeakSet[Filler] = weakref.WeakSet()


class Filler:
    """Copies shards while a loader iterates, of the streams that this node alone reads (None: all). The thread ends
    with the loader, and never runs in a forked process.
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
        # Objects with a version. A compressed one has a decompressed copy, and of one whose beginning was indexed
        # most is not read.
        self._wanted = [
            is_remote(shard.url) and not shard.packed and not shard.reach and bool(shard.version and shard.size)
            for shard in index.shards
        ]
        wanted = compress(index.shards, self._wanted)
        self.names = {copy_name(shard.url, FileVersion(shard.size, shard.version)): None for shard in wanted}
        self._where: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        _FILLERS.add(self)

    def begin(self, where: Callable[[], tuple[int, float]]) -> None:
        """Copy what is read from where the loader stands, as `where` says."""
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
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_PAUSE_SECONDS)  # a Ctrl-C that comes as a wait begins is heard after it

    def _run(self) -> None:
        here().ended = self._stop.is_set
        try:
            self._fill()
        except Ended:
            pass
        except Exception as error:  # noqa: BLE001 - a cache costs no epoch
            _warn(f"the cache {self.cache.path} cannot be filled, and shards are read from the store: {error}")

    def _fill(self) -> None:
        """Copy shards until all are there, or there is no room. Raises OSError or StorageError of the folder."""
        failures, left = 0, deque[int]()
        for number in chain(self._upcoming(), self._again(left)):
            shard = self._index.shards[number]
            file = FileVersion(shard.size, shard.version)
            # No copy that a loader of this run reads goes.
            stay = ChainMap(*(each.names for each in list(_FILLERS) if each.cache.path == self.cache.path))
            try:
                added = self._copies.add(shard.url, file, partial(self._fetch, shard, file), stay)
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
                    f"{shard.url}: shards of this size are not copied"
                )
            elif added == "full":
                return

    def _again(self, left: deque[int]) -> Iterator[int]:
        """Yield, after a pause, shards that other processes were fetching: one of them may have been killed."""
        while left and not self._stop.wait(_PAUSE_SECONDS):
            for _ in range(len(left)):
                yield left.popleft()

    def _fetch(self, shard: ShardInfo, file: FileVersion, out: IO[bytes]) -> None:
        """Write a shard. Raises _NotFetched for trouble of the store or of memory, OSError for that of the folder."""
        objects = self._files.others.get(shard.url, self._files).objects
        with closing(Blocks(RemoteFile(objects, shard.url, file, self._reads), COPIED_AHEAD)) as source:
            for start in range(0, file.size, BLOCK_BYTES):
                here().check()
                try:
                    block = source.view(start, BLOCK_BYTES)
                except (OrchdataError, MemoryError) as error:  # of memory, there may be more later
                    raise _NotFetched from error
                out.write(block)

    def _upcoming(self) -> Iterator[int]:
        """Yield the numbers of shards, each once, from the loader's place on, through this epoch and the next."""
        seen: set[int] = set()
        first, _ = self._where()
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
        begun, share = self._where()
        if begun == epoch:
            return min(length, int(share * length))
        return length if begun > epoch else 0

    def _shards_between(self, epoch: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the shards that this node reads there, as they come, each with its last position."""
        try:
            samples, positions = self.order.samples(epoch, start, stop), np.arange(start, stop)
        except IndexError:  # of an epoch whose samples changed before the loader's place
            return []
        if self._streams is not None:
            mine = np.isin(samples.stream, self._streams)
            samples, positions = samples.take(mine), positions[mine]
        shards = np.asarray(self._index.shard[samples.row])
        last = dict(zip(shards.tolist(), positions.tolist(), strict=True))
        return [(number, last[number]) for number in dict.fromkeys(shards.tolist()) if self._wanted[number]]


class _NotFetched(Exception):
    """The store did not give a shard; the cause says why."""


def _warn(message: str) -> None:
    """Warn once. Where warnings are errors, none can be raised from this thread into the loader."""
    try:
        warn_once("trouble with a cache", message)
    except Warning:
        _log.warning("%s", message)


def own_streams(rank: Rank, balance: Balance, num_streams: int) -> range | None:
    """Return the streams of the order that this rank's node alone reads; None if every node reads every shard. A node
    has streams of its own if it is the only one, or if samples stay in groups of ranks (scope "grouped"), and both
    groups and streams end where the ranks of a node do.
    """
    per_node = _ranks_per_node(rank, balance)
    if per_node is None:
        return None
    if per_node >= rank.size:
        return range(num_streams)
    if balance.scope != "grouped":
        return None
    bounds = range(0, rank.size, per_node)
    if any(bound * num_streams % rank.size or bound % (balance.group_size or per_node) for bound in bounds):
        return None
    first = rank.rank // per_node * per_node
    stop = min(first + per_node, rank.size)
    return range(first * num_streams // rank.size, stop * num_streams // rank.size)


def _ranks_per_node(rank: Rank, balance: Balance) -> int | None:
    """Return the ranks of a node; by default a group is a node."""
    if rank.size == 1:
        return 1
    return rank.ranks_per_node or (balance.group_size if balance.scope == "grouped" else None)


def filler_of(
    spec: BuildSpec, rank: Rank, cache: Cache | None, reads: ReadBytes | None, *, forks: bool
) -> Filler | None:
    """Return what fills the cache of a loader; None if there is nothing to fill. Warns once, on the first rank, if that
    is a surprise. `forks`: whether workers are forked from this process.
    """
    plan, order, shards = spec.plan, spec.plan.order, spec.shards
    if cache is None or reads is None or not isinstance(order, Order | MixtureOrder):
        return None
    if not any(is_remote(shard.url) for shard in shards.index.shards):
        return None
    own, has_windows = own_streams(rank, plan.balance, order.streams), isinstance(plan.batches, WindowBatches)
    if own is None or (has_windows and len(own) < order.streams):
        way_out = (
            'balance="grouped" and shuffle=od.Shuffle(streams=...), a multiple of the number of nodes, with groups '
            "that are nodes, give each node shards of its own; LOCAL_WORLD_SIZE or od.DataParallel(ranks_per_node=...) "
            "must say which ranks a node has"
        )
        if has_windows:
            way_out = "windows of concatenated documents take documents of all streams; without them, " + way_out
        why_none = f"a sample that a node reads in one epoch is read by another in the next: {way_out}"
    elif forks:
        why_none = (
            "workers that are forked from a process that fetches cannot read object storage. Leave "
            'multiprocessing_context out, or pass "forkserver"'
        )
    else:
        streams = None if len(own) == order.streams else own
        return Filler(cache, shards.index, shards.files, order, streams, reads)
    if not rank.rank:
        warn_once("a cache that keeps nothing", f"cache= fetches no shard: {why_none}")
    return None

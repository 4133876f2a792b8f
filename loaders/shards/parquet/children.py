"""Measuring Parquet files in child processes, so that a file that ends the Parquet library ends no build.

    build --measuring()--> children, started when they are needed, reused, ended with the block
    file --measure()--> facts or the reason why there are none, and the checksum of its content

A child that dies is replaced. A file that ends two of them has failed; a child that something else killed is no word
about the file. One that takes far too long ends the build: time makes no verdict. See `process` for one child, `child`
for its own side.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchdata.loaders.errors import StorageError
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import is_limited_below, measured_at
from orchdata.loaders.shards.facts_table import FactsTable, shard_failure
from orchdata.loaders.shards.parquet.child import memory_bytes
from orchdata.loaders.shards.parquet.process import Died, MeasuringProcess, Scanned
from orchdata.loaders.storage.content_digest import ContentDigest
from orchdata.loaders.storage.storage import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a file holds.

    Attributes:
        table: its facts, one row with the reason where it failed.
        ignored: rows of each ignored column.
        checksum: of size and content, hex.
        failed: whether the file as a whole did.
        promised_rows: what its footer counts; 0 where it could not be read.
    """

    table: FactsTable
    ignored: dict[str, int]
    checksum: str
    failed: bool
    promised_rows: int


@contextmanager
def measuring() -> Iterator[None]:
    """Children started by `measure` inside the block, by any thread, are kept for the next file and end with it.

    What is being measured then fails with a StorageError. Blocks may nest and overlap: the last one ends the children.
    """
    _pool.enter()
    try:
        yield
    finally:
        _pool.leave()


def measure(file: Storage, limits: Limits) -> Measurement:
    """Measure a Parquet file in a child process, one of its own outside a `measuring` block.

    Raises:
        StorageError: no child can be started, something ends them from outside, or the file takes far too long; and
            what `file` raises.
    """
    digest = ContentDigest(file)
    for attempt in (1, 2):
        child = _pool.take(file.url)
        try:
            found = child.measure(file, limits, digest)
        except Died as death:
            _pool.discard(child)
            if child.unwanted:
                raise StorageError(file.url, "was not measured to the end: the build ended") from None
            if death.external and attempt == 2:
                raise StorageError(file.url, f"the process that measures it {death}, twice: is memory short?") from None
            if death.slow:
                reason = (
                    f"the Parquet library {death}, a hundred times as much as files of this size take. How long it "
                    "takes makes no verdict, so none is kept: write the file anew, or leave it out"
                )
                raise StorageError(file.url, reason, errno.ETIME) from None
            if attempt == 2 and is_limited_below(memory_bytes(limits)):
                raise measured_at(MemoryError(f"the process that measures it {death}"), file.url) from None
            if attempt == 2 and not death.external:
                return _measurement(f"the Parquet library {death}", child.promised_rows, digest)
        except BaseException:
            _pool.discard(child)  # it still waits for an answer
            raise
        else:
            _pool.give_back(child)
            return _measurement(found, child.promised_rows, digest)
    raise AssertionError("the second attempt ends in one of these ways")


def _measurement(found: Scanned | str, promised_rows: int, digest: ContentDigest) -> Measurement:
    failed = isinstance(found, str)
    table, ignored = (shard_failure(found), {}) if isinstance(found, str) else found
    return Measurement(
        table=table, ignored=ignored, checksum=digest.hexdigest(), failed=failed, promised_rows=promised_rows
    )


class _Pool:
    """All children of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._idle: list[MeasuringProcess] = []
        self._busy: set[MeasuringProcess] = set()

    def enter(self) -> None:
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            idle, self._idle = self._idle, []
            for child in self._busy:
                child.kill()
        for child in idle:
            child.close()

    def take(self, url: str) -> MeasuringProcess:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        if child is not None and not child.alive:
            child.close()
            return self.take(url)
        child = child or MeasuringProcess(url)
        with self._lock:
            if self._users:  # else it is the caller's alone
                self._busy.add(child)
        return child

    def give_back(self, child: MeasuringProcess) -> None:
        with self._lock:
            self._busy.discard(child)
            kept = self._users > 0 and not child.unwanted
            if kept:
                self._idle.append(child)
        if not kept:
            child.close()

    def discard(self, child: MeasuringProcess) -> None:
        with self._lock:
            self._busy.discard(child)
        child.close()


_pool = _Pool()


def _forget() -> None:
    """In a fork: the children are those of the parent."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget)

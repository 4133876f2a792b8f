"""Measuring Parquet and Arrow files in child processes, so that a file that crashes their library ends no build.

    build --measuring()--> children, started when they are needed, reused, ended with the block
    file --measure()--> facts or the reason why there are none, and the checksum of its content

A child that dies is replaced. A file that ends two children has failed; a child that was killed from outside says
nothing about the file. A file that takes far too long ends the build, and is not marked bad. `process` is the parent's
side of one child, `child` its own side.
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
from orchdata.loaders.shards.fields import ColumnRules
from orchdata.loaders.shards.parquet.child import memory_bytes
from orchdata.loaders.shards.parquet.columns import RowReader
from orchdata.loaders.shards.parquet.process import Died, MeasuringProcess, Scanned
from orchdata.loaders.storage.content_digest import ContentDigest
from orchdata.loaders.storage.storage import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The result of measuring a file.

    Attributes:
        table: its facts; one row with the reason if it failed.
        ignored: rows of each ignored column.
        checksum: of size and content, hex.
        failed: whether the file as a whole failed.
        promised_rows: number of rows in its footer; 0 if the footer could not be read.
        met: as of FactsMeta.
    """

    table: FactsTable
    ignored: dict[str, int]
    checksum: str
    failed: bool
    promised_rows: int
    met: dict[str, int]


@contextmanager
def measuring() -> Iterator[None]:
    """Keep the children that `measure` starts inside the block, in any thread, for other files; end them with it.

    Files that are being measured at its end fail with StorageError. Blocks may overlap: the last one ends the children.
    """
    _pool.enter()
    try:
        yield
    finally:
        _pool.leave()


def measure(file: Storage, limits: Limits, rules: ColumnRules, reader: type[RowReader]) -> Measurement:
    """Measure a file by a reader, in a child process; outside a `measuring` block, in a new one.

    Raises:
        StorageError: no child can be started, children are killed from outside, or the file takes far too long. Also
            raises the errors of `file`.
    """
    digest, library = ContentDigest(file), f"the {reader.kind.split()[0]} library"
    for attempt in (1, 2):
        child = _pool.take(file.url, fresh=attempt == 2)
        try:
            scanned = child.measure(file, limits, rules, reader, digest)
        except Died as death:
            _pool.discard(child)
            if child.unwanted:
                raise StorageError(file.url, "was not measured to the end: the build ended") from None
            if death.external and attempt == 2:
                raise StorageError(file.url, f"the process that measures it {death}, twice: is memory short?") from None
            if death.slow:
                reason = (
                    f"{library} {death}, a hundred times as much as files of this size take. Slowness does "
                    "not mark a file as bad, so the build ends: write the file again, or leave it out"
                )
                raise StorageError(file.url, reason, errno.ETIME) from None
            if attempt == 2 and not death.of_the_file and is_limited_below(memory_bytes(limits)):
                raise measured_at(MemoryError(f"the process that measures it {death}"), file.url) from None
            if attempt == 2 and not death.external:
                return _measurement(f"{library} {death}", child.promised_rows, digest)
        except BaseException:
            _pool.discard(child)  # it still waits for an answer
            raise
        else:
            _pool.give_back(child)
            return _measurement(scanned, child.promised_rows, digest)
    raise AssertionError("the second attempt returns or raises")


def _measurement(scanned: Scanned | str, promised_rows: int, digest: ContentDigest) -> Measurement:
    failed = isinstance(scanned, str)
    table, ignored, met = (shard_failure(scanned), {}, {}) if isinstance(scanned, str) else scanned
    return Measurement(
        table=table,
        ignored=ignored,
        checksum=digest.hexdigest(),
        failed=failed,
        promised_rows=promised_rows,
        met=met,
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

    def take(self, url: str, *, fresh: bool = False) -> MeasuringProcess:
        with self._lock:
            child = self._idle.pop() if self._idle and not fresh else None
        if child is not None and not child.alive:
            child.close()
            return self.take(url)
        child = child or MeasuringProcess(url)
        with self._lock:
            if self._users:  # otherwise only the caller knows it
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
    """Start with an empty pool in a fork: the children belong to the parent."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget)

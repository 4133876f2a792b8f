"""Measuring Parquet and Arrow files in child processes, so that a file that crashes their library ends no build.

    build --measuring()--> children, started when they are needed, reused, ended with the block
    file --measure()--> a child, which wants blocks; the parent reads them into memory that both map --> facts, or why
                        there are none, and the checksum of the file's content

A child that dies is replaced. A file that ends two children has failed; a child that was killed from outside says
nothing about the file. A file that takes far too long ends the build, and is not marked bad. What a child sends is
JSON, and the facts: nothing in them is executed. `child.py` is its own side.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from orchdata.loaders.child_process import begun, open_channel
from orchdata.loaders.errors import PackageError, StorageError
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import UnmeasuredError, is_limited_below, measured_at
from orchdata.loaders.shards.fields import ColumnRules
from orchdata.loaders.shards.parquet.child import cpu_seconds, memory_bytes
from orchdata.loaders.shards.parquet.file import RowReader
from orchdata.loaders.shards.shard import SCHEMA, FactsTable, shard_failure
from orchdata.loaders.storage.content_digest import BLOCK_BYTES, ContentDigest
from orchdata.loaders.storage.storage import Storage


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


def measure(
    file: Storage, limits: Limits, rules: ColumnRules, reader: type[RowReader]
) -> tuple[FactsTable, dict[str, Any]]:
    """Measure a file by a reader, in a child process; outside a `measuring` block, in a new one.

    Returns its facts, one row with the reason if it failed as a whole, and fields of their FactsMeta: then `lost_bytes`
    is above 0, and `lost_samples` the number of rows in its footer; 0 if the footer could not be read.

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
                return _measured(f"{library} {death}", child.promised_rows, file, digest)
        except BaseException:
            _pool.discard(child)  # it still waits for an answer
            raise
        else:
            _pool.give_back(child)
            return _measured(scanned, child.promised_rows, file, digest)
    raise AssertionError("the second attempt returns or raises")


def _measured(
    scanned: Scanned | str, promised_rows: int, file: Storage, digest: ContentDigest
) -> tuple[FactsTable, dict[str, Any]]:
    if isinstance(scanned, str):
        lost = {"lost_samples": promised_rows, "lost_bytes": max(1, file.size)}
        return shard_failure(scanned), {"checksum": digest.hexdigest()} | lost
    table, ignored, met = scanned
    return table, {"checksum": digest.hexdigest(), "ignored": ignored, "met": met}


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

Scanned = tuple[FactsTable, dict[str, int], dict[str, int]]

_START_SECONDS = 300.0
_SILENT_SECONDS = 600.0
_CRASH_SIGNALS = tuple(map(signal.Signals.__getitem__, "SIGSEGV SIGABRT SIGILL SIGFPE SIGSYS SIGTRAP".split()))
"""Signals that a process causes itself. Others come from outside, as SIGBUS of a full or lost disk does."""
_NOT_STARTED = "the process that measures shards cannot be started"
_PROGRAM = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from orchdata.loaders.shards.parquet.child import main; main(given['end'])"
)
# One thread, and an allocator that returns memory to the system: the limits of the child count its private memory.
_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ARROW_IO_THREADS": "1",
}


class Died(Exception):
    """A child has ended, or sent nonsense; the message describes it.

    Attributes:
        external: whether something other than the file may have ended it.
        slow: whether it took too long.
        of_the_file: whether the library's last words blame the file, and not memory.
    """

    def __init__(self, message: str, *, external: bool = False, slow: bool = False, of_the_file: bool = False) -> None:
        super().__init__(message)
        self.external = external
        self.slow = slow
        self.of_the_file = of_the_file


class MeasuringProcess:
    """A child process that measures one file at a time.

    Attributes:
        unwanted: whether it was ended because it is no longer needed.
        promised_rows: rows in the footer of its last file; 0 if it could not be read.
    """

    def __init__(self, url: str) -> None:
        """Start it. Raises StorageError."""
        self.unwanted = False
        self.promised_rows = 0
        with ExitStack() as resources:
            try:
                self._start(resources)
            except OSError as error:
                raise StorageError(url, f"{_NOT_STARTED}: {error.strerror}", error.errno) from error
            try:
                self._receive(_START_SECONDS)
            except Died:
                self._errors.seek(0)
                lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["it ends immediately"]
                raise StorageError(url, f"{_NOT_STARTED}: {lines[-1][:300]}") from None
            self._resources = resources.pop_all()

    def _start(self, resources: ExitStack) -> None:
        self._errors = resources.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - `resources` closes it
        ours, theirs = open_channel()
        resources.callback(ours.close)
        with theirs, ExitStack() as inherited:
            window = os.memfd_create("orchdata-block", os.MFD_CLOEXEC)
            inherited.callback(os.close, window)
            os.ftruncate(window, BLOCK_BYTES)
            self._window = resources.enter_context(mmap.mmap(window, BLOCK_BYTES))
            given = {"path": [entry for entry in sys.path if isinstance(entry, str)], "end": theirs.fileno()}
            self._process = resources.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, json.dumps(given)],
                    stdin=subprocess.DEVNULL,
                    stderr=self._errors,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, **_ENVIRONMENT},
                )
            )
            resources.callback(self._process.kill)
            self._channel = begun(ours, [window])
        self._answers = select.poll()
        self._answers.register(ours, select.POLLIN)

    def _receive(self, timeout: float) -> bytes:
        """Return the next message. Raises Died."""
        if not self._answers.poll(timeout * 1000):
            raise Died(f"gave no answer for {timeout:.0f} s", slow=True)
        try:
            received = self._channel.receive()
        except ConnectionError:
            received = None
        if received is None:
            raise self._death()
        return received[0]

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(json.dumps(message).encode())
        except OSError:
            raise self._death() from None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def measure(
        self, file: Storage, limits: Limits, rules: ColumnRules, reader: type[RowReader], digest: ContentDigest
    ) -> Scanned | str:
        """Return facts, ignored columns, the names of `rules` that were met and media names that are not read, or the
        reason why there are none.

        Raises Died, PackageError, MemoryError, and the errors of `file`.
        """
        self.promised_rows = 0
        by = reader.__module__, reader.__qualname__
        self._send({"size": file.size, "limits": asdict(limits), "reader": by, **rules._asdict()})
        while True:
            patience = _SILENT_SECONDS + 10 * cpu_seconds(file.size, min(self.promised_rows, limits.shard_rows))
            try:
                kind, value = next(iter(json.loads(self._receive(patience)).items()))
            except (ValueError, AttributeError, StopIteration):
                raise Died("sent what is no message") from None
            if kind == "block" and isinstance(value, int):
                self._send_block(file, value, digest)
            elif kind == "rows" and isinstance(value, int):
                self.promised_rows = value
            elif kind == "broken" and isinstance(value, list):
                raise PackageError(*map(str, value))
            elif kind == "short" and isinstance(value, list):
                raise measured_at(UnmeasuredError(*map(str, value)), file.url)
            elif kind == "failure" and isinstance(value, str):
                return value
            elif kind == "facts" and isinstance(value, dict):
                return _checked(self._receive(patience)), _counts(value["ignored"]), _counts(value["met"])
            else:
                raise Died(f"sent an unknown message {kind!r}")

    def _send_block(self, file: Storage, block: int, digest: ContentDigest) -> None:
        with memoryview(self._window) as view:
            got = file.read_into(block * BLOCK_BYTES, view) if 0 <= block < digest.num_blocks else 0
            self._send({"got": got})
            if got:
                digest.note(block, view[:got])  # while the child continues

    def _death(self) -> Died:
        status = self._process.wait()
        if not status:  # 0 also if the status is unknown because this process ignores SIGCHLD
            return Died("ended in an unknown way (SIGCHLD may be ignored)", external=True)
        if status > 0:
            return Died(f"ended the process with exit code {status}")
        number = -status
        if number == signal.SIGXCPU:
            return Died("took too much processor time (SIGXCPU)", slow=True)
        name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
        if number in _CRASH_SIGNALS:
            self._errors.seek(0)
            said = self._errors.read()[-2000:]
            return Died(
                f"ended the process with {name}",
                of_the_file=b"throwing an instance of 'parquet::" in said and b"bad_alloc" not in said,
            )
        return Died(f"was killed ({name})", external=True)

    def kill(self) -> None:
        """End it. A thread that is waiting for it then closes it."""
        self.unwanted = True
        self._process.kill()

    def close(self) -> None:
        """End it, wait for its end, and close the descriptors and memory of this side."""
        self._resources.close()


def _counts(value: dict[str, Any]) -> dict[str, int]:
    return {str(name): int(count) for name, count in value.items()}


def _checked(data: bytes) -> FactsTable:
    """Parse and check the facts that a child sent. Raises Died if they are malformed."""
    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
    except pa.ArrowException as error:
        raise Died("sent facts that cannot be read") from error
    if table.schema != SCHEMA or not len(table):
        raise Died("sent facts with another schema")
    samples = table.column("sample").to_numpy()
    if samples[0] != 0 or not np.isin(np.diff(samples), (0, 1)).all():
        raise Died("sent facts out of order")
    return FactsTable.of_arrow(table.combine_chunks())

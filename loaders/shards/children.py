"""Measuring Parquet and Arrow files in child processes, so that a file that crashes their library ends no build.

    build --measuring()--> children, started when they are needed, reused, ended with the block
    file --measure()--> a child, which wants blocks; the parent reads them into memory that both map --> facts, or why
                        there are none, and the checksum of the file's content

A child opens no file, so the errors of a storage stay in the parent. One that dies is replaced. A file that ends two
children has failed; a child that was killed from outside says nothing about the file. A file that takes far too long
ends the build, and is not marked bad. What a child sends is JSON, and the facts: nothing in them is executed.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import pyarrow as pa

from orchdata.loaders.child_process import Channel, begin, begun, lower_limit, open_channel
from orchdata.loaders.environment import failed_import
from orchdata.loaders.errors import (
    NOT_DATA,
    DecodeError,
    PackageError,
    StorageError,
    one_line,
    package_error,
    pass_trouble,
)
from orchdata.loaders.field_names import NULL
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import UnmeasuredError, is_limited_below, measured_at
from orchdata.loaders.modalities.builtin import OTHER, TEXT
from orchdata.loaders.modalities.modality import Header
from orchdata.loaders.shards.cells import Column, PathOnly, Refused, is_text, sniff, text_bytes
from orchdata.loaders.shards.fields import PARQUET, ColumnRules
from orchdata.loaders.shards.shard import NO_HEADER, SCHEMA, FactsTable, Rows, header_of, shard_failure
from orchdata.loaders.storage.storage import BLOCK_BYTES, ContentDigest, Storage
from orchdata.loaders.text.conversation import WORDS_SUFFIX
from orchdata.loaders.watch import here

if TYPE_CHECKING:
    from orchdata.loaders.shards.columns import RowReader

CPU_SECONDS = 60.0
_START_SECONDS = 300.0
_SILENT_SECONDS = 600.0
_KEPT_BLOCKS: Final = 48
_CRASH_SIGNALS: Final = tuple(map(signal.Signals.__getitem__, "SIGSEGV SIGABRT SIGILL SIGFPE SIGSYS SIGTRAP".split()))
"""Signals that a process causes itself. Others come from outside, as SIGBUS of a full or lost disk does."""
_NOT_STARTED: Final = "the process that measures shards cannot be started"
_PROGRAM = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from orchdata.loaders.shards.children import main; main(given['end'])"
)
# One thread, and an allocator that returns memory to the system: the limits of the child count its private memory.
_ENVIRONMENT: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ARROW_IO_THREADS": "1",
}

Scanned = tuple[FactsTable, dict[str, int], dict[str, int]]
"""Facts, ignored columns with their rows, and the names of `rules` that were met."""


def cpu_seconds(size: int, rows: int) -> float:
    """Return the processor time after which a file ends the build: a hundred times what files of its size take."""
    return CPU_SECONDS + size / (1 << 20) + rows / 1000


def memory_bytes(limits: Limits) -> int:
    """Return the memory that a file may take: some copies of its largest cell."""
    return (2 << 30) + 4 * limits.member_bytes


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
    scanned: Scanned | str = ""
    for attempt in (1, 2):
        child = _pool.take(file.url, fresh=attempt == 2)
        try:
            scanned = child.measure(file, limits, rules, reader, digest)
            break
        except Died as death:
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
            scanned = f"{library} {death}"
        finally:
            _pool.give_back(child)
    if isinstance(scanned, str):
        lost = {"lost_samples": child.promised_rows, "lost_bytes": max(1, file.size)}
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

    def take(self, url: str, *, fresh: bool) -> MeasuringProcess:
        child = None
        while child is None and not fresh:
            with self._lock:
                if not self._idle:
                    break
                child = self._idle.pop()
            if not child.is_alive:
                child.close()
                child = None
        child = child or MeasuringProcess(url)
        with self._lock:
            if self._users:  # otherwise only the caller knows it
                self._busy.add(child)
        return child

    def give_back(self, child: MeasuringProcess) -> None:
        """Keep a child that has answered; end any other."""
        with self._lock:
            self._busy.discard(child)
            is_kept = self._users > 0 and child.has_answered and not child.unwanted
            if is_kept:
                self._idle.append(child)
        if not is_kept:
            child.close()


_pool = _Pool()


def _forget() -> None:
    """Start with an empty pool in a fork: the children belong to the parent."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget)


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
        has_answered: whether it waits for another file.
        promised_rows: rows in the footer of its last file; 0 if it could not be read.
    """

    def __init__(self, url: str) -> None:
        """Start it. Raises StorageError."""
        self.unwanted = self.has_answered = False
        self.promised_rows = 0
        with ExitStack() as resources:
            try:
                self._start(resources)
                self._receive(_START_SECONDS)
            except OSError as error:
                raise StorageError(url, f"{_NOT_STARTED}: {error.strerror}", error.errno) from error
            except Died:
                lines = self._said().decode(errors="replace").strip().splitlines() or ["it ends immediately"]
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
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def measure(
        self, file: Storage, limits: Limits, rules: ColumnRules, reader: type[RowReader], digest: ContentDigest
    ) -> Scanned | str:
        """Return what is known of a file, or the reason why nothing is. Raises Died, PackageError, MemoryError, and the
        errors of `file`.
        """
        self.promised_rows, self.has_answered = 0, False
        by = reader.__module__, reader.__qualname__
        self._send({"size": file.size, "limits": asdict(limits), "reader": by, **rules._asdict()})
        while True:
            patience = _SILENT_SECONDS + 10 * cpu_seconds(file.size, min(self.promised_rows, limits.shard_rows))
            try:
                kind, value = json.loads(self._receive(patience))
            except (ValueError, TypeError):
                raise Died("sent what is no message") from None
            if kind == "block":
                self._send_block(file, value, digest)
            elif kind == "rows":
                self.promised_rows = value
            elif kind == "broken":
                raise PackageError(*value)
            elif kind == "short":
                raise measured_at(UnmeasuredError(*value), file.url)
            else:
                answer = value if kind == "failure" else (_checked(self._receive(patience)), *value)
                self.has_answered = True
                return answer

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
            said = self._said()[-2000:]
            of_the_file = b"throwing an instance of 'parquet::" in said and b"bad_alloc" not in said
            return Died(f"ended the process with {name}", of_the_file=of_the_file)
        return Died(f"was killed ({name})", external=True)

    def _said(self) -> bytes:
        self._errors.seek(0)
        return self._errors.read()

    def kill(self) -> None:
        """End it. A thread that is waiting for it then closes it."""
        self.unwanted = True
        self._process.kill()

    def close(self) -> None:
        """End it, wait for its end, and close the descriptors and memory of this side."""
        self._resources.close()


def _checked(data: bytes) -> FactsTable:
    """Parse the facts that a child sent. Raises Died if they are malformed."""
    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
        samples = table.column("sample").to_numpy()
        is_whole = table.schema == SCHEMA and samples[0] == 0 and np.isin(np.diff(samples), (0, 1)).all()
    except (pa.ArrowException, LookupError) as error:
        raise Died("sent facts that cannot be read") from error
    if not is_whole:
        raise Died("sent facts with another schema, or out of order")
    return FactsTable.of_arrow(table.combine_chunks())


def main(end: int) -> None:
    """Serve requests in a child until the parent closes its end of this channel, which ends the child."""
    begin(socket.socket(fileno=end), _serve_all)


def _serve_all(channel: Channel, fds: list[int]) -> None:
    lower_limit(resource.RLIMIT_CORE, 0)
    os.dup2(2, 1)  # printed text is not a message
    parent = _Parent(channel, mmap.mmap(fds[0], BLOCK_BYTES, access=mmap.ACCESS_READ))
    parent.send("ready")
    while True:
        _serve(parent.receive(), parent)


class _Parent:
    """The parent, as its child sees it. The child ends with the channel."""

    def __init__(self, channel: Channel, shared: mmap.mmap) -> None:
        self.shared = shared
        self._channel = channel
        self._sending = threading.Lock()

    def send(self, kind: str, value: Any = None, *contents: memoryview) -> None:
        """Send a message, and what follows it. Threads send one after another."""
        try:
            with self._sending:
                self._channel.send(json.dumps([kind, value]).encode())
                for content in contents:
                    self._channel.send(content)
        except OSError:
            _end()

    def receive(self) -> dict[str, Any]:
        received = self._channel.receive()
        message: dict[str, Any] = json.loads(received[0]) if received is not None else _end()
        return message


def _end() -> NoReturn:
    os._exit(0)


def _serve(request: dict[str, Any], parent: _Parent) -> None:
    limits = Limits(**request["limits"])
    size = int(request["size"])
    lower_limit(resource.RLIMIT_DATA, memory_bytes(limits))
    _allow_cpu(cpu_seconds(size, 0))
    module, name = request["reader"]
    reading = getattr(importlib.import_module(module), name)  # a RowReader
    # Scan the file; a failure is an answer too.
    try:
        names = tuple((old, new) for old, new in request["names"])
        rules = ColumnRules(names, bool(request["all"]), tuple(request["kept"]), tuple(request["only"]))
        reader = reading(_ParentFile(size, parent), limits, rules)
        parent.send("rows", reader.plausible_rows())
        _allow_cpu(cpu_seconds(size, min(reader.plausible_rows(), limits.shard_rows)))
        table, ignored = scan(reader, limits)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            writer.write_table(table.arrow())
        parent.send("facts", [ignored, reader.met], memoryview(sink.getvalue()))
    except MemoryError as error:
        if is_limited_below(memory_bytes(limits)):
            parent.send("short", measured_at(error, "").args)
        else:
            reason = (
                f"takes more than {memory_bytes(limits)} bytes of memory to read "
                f"(four times Limits.member_bytes={limits.member_bytes} and 2 GiB)"
            )
            parent.send("failure", reason)
        _end()  # this process may have little memory left
    except Refused as error:
        parent.send("failure", str(error))
    except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds for damaged files
        broken = failed_import(error)
        if broken is None:
            parent.send("failure", f"not a readable {reading.kind}: {one_line(error)}")
        else:
            doing = f"reading {reading.kind.split()[0]}"
            parent.send("broken", package_error(broken.cause, doing, broken.package).args)


class _ParentFile(Storage):
    """A file whose bytes the parent reads, and checks for changes."""

    url, version = "", ""

    def __init__(self, size: int, parent: _Parent) -> None:
        self.size = size
        self._parent = parent
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def read(self, offset: int, size: int) -> bytes:
        stop = min(offset + size, self.size)
        pieces = []
        while offset < stop:
            block, start = divmod(offset, BLOCK_BYTES)
            piece = self._block(block)[start : start + stop - offset]
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _block(self, number: int) -> bytes:
        block = self._blocks.get(number)
        if block is None:
            self._parent.send("block", number)
            block = self._parent.shared[: int(self._parent.receive()["got"])]
            self._blocks[number] = block
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return block


def _allow_cpu(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    lower_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))


# A date or time outside of Python's range is an ArithmeticError.
_CELL_ERRORS = (pa.ArrowException, ArithmeticError, ValueError, TypeError, LookupError, RecursionError)
_NUMBER = (1, *NO_HEADER[1:])  # header of a number that is no longer than an empty list

Cell = tuple[str, int, int, Header, str | None]
"""A field of a cell: its name, kind, bytes, header and error."""


def scan(reader: RowReader, limits: Limits) -> tuple[FactsTable, dict[str, int]]:
    """Return the facts of a file, and the number of rows of each ignored column that have a value, as far as that is
    known. Bad cells are rows with an error. Raises Refused: the file as a whole cannot be a shard, or is above the
    limits. It runs in a child process, because the first decoding of a file may crash the library.
    """
    if not reader.columns and reader.promised_rows:
        raise Refused(f"no column has text or media (columns: {', '.join(map(str, reader.schema.names))[:200]})")
    reader.check()
    for column in reader.columns:
        too_long = limits.name_error("column's name", column.name)
        if too_long is not None:
            raise Refused(f"{shortened(column.name)!r}: {too_long}")
    rows = _Scan(limits)
    rows.run(reader)
    ignored = {name: reader.promised_rows - reader.nulls(name.removesuffix(WORDS_SUFFIX)) for name in reader.ignored}
    return rows.table, ignored


class _Scan(Rows):
    """One pass over a file: cells to rows of the facts, with the headers of media."""

    def run(self, reader: RowReader) -> None:
        key = reader.key
        names = list(dict.fromkeys([*(column.name for column in reader.columns), *([] if key is None else [key])]))
        columns = [] if reader.columns.are_whole else reader.columns
        number = 0
        current = here()
        for group in range(len(reader.starts) - 1):
            current.key = f"row {number}"
            for batch in reader.batches(group, names, scan=True):
                cells = [batch.column(column.name) for column in columns]
                keys = batch.column(key) if key is not None else None
                for i in range(batch.num_rows):
                    given = _key(keys[i]) if keys is not None else None
                    current.key = name = str(number) if given is None else given
                    self._add_row(number, name, columns, [cell[i] for cell in cells], is_id=key != "__key__")
                    number += 1
                current.key = f"row {number}"  # its batch is decoded next
                if len(self.table) > self.limits.shard_rows:
                    raise Refused(f"more than {self.limits.shard_rows} fields, above Limits.shard_rows")
        current.key = None

    def _add_row(self, number: int, key: str, columns: list[Column], scalars: list[pa.Scalar], *, is_id: bool) -> None:
        first, add = len(self.table), partial(self.table.append, number, offset=number, encoding=PARQUET)
        too_long = self.limits.name_error("key", key)
        if too_long is not None:
            add(shortened(key), "", error=too_long)
            return
        here().key = key = self.distinct(key, number) if is_id else key
        for column, scalar in zip(columns, scalars, strict=True):
            try:
                for field, kind, size, header, error in self._cells(column, scalar):
                    add(key, field, kind=kind, size=size, header=header, error=error)
            except NOT_DATA:
                raise
            except _CELL_ERRORS as problem:  # the other cells may be readable
                pass_trouble(problem)
                add(key, column.name, kind=column.kind, error=f"cannot be read: {one_line(problem)}")
        if len(self.table) == first:
            add(key, "")
        reason = "rows {} and {} both have the key {!r}: give each row a different __key__, or drop that column, "
        self.end_sample(key, first, reason + "so that rows are named by id or number")

    def _cells(self, column: Column, scalar: pa.Scalar) -> Iterator[Cell]:
        """Yield the fields of a cell."""
        if (excess := column.excess(scalar, self.limits)) is not None:
            yield column.name, column.kind, 0, NO_HEADER, excess
            return
        if (missing := column.missing(scalar)) is not None:
            yield missing, TEXT, 0, NO_HEADER, None
            return
        items = [(column.field, scalar)]
        if column.listed:
            items = [(f"{column.name}.{at}", item) for at, item in enumerate(scalar.values if scalar.is_valid else ())]
        for field, item in items:
            try:
                data, path = column.content(item), column.path(item)
            except (PathOnly, UnicodeDecodeError) as problem:
                error = str(problem)
                if isinstance(problem, UnicodeDecodeError):
                    error = f"contains a string that is not valid UTF-8: {problem.reason}"
                yield field, column.kind, 0, NO_HEADER, error
                continue
            if data is not None:
                kind, is_json = column.kind_of(data, path), column.is_json
                is_number = column.form == "words" and len(data) <= 2 and data not in (b"[]", b"{}")
                yield self._content(field, kind, data, is_json=is_json, header=_NUMBER if is_number else NO_HEADER)
            elif column.has_nulls and column.listed:  # the other items keep their numbers
                yield field + NULL, TEXT, 0, NO_HEADER, None
        for at, data in enumerate(column.media(scalar)):
            yield self._content(f"{column.name}.{at}", sniff(data), data, is_media=True)

    def _content(
        self,
        field: str,
        kind: int,
        data: bytes | memoryview,
        *,
        is_json: bool = False,
        is_media: bool = False,
        header: Header = NO_HEADER,
    ) -> Cell:
        is_read = kind != OTHER or is_json or is_media
        error = self.limits.size_error(len(data), is_text=kind == TEXT or is_json) if is_read else None
        if error is None and kind not in (TEXT, OTHER):
            try:
                header = header_of(kind, len(data), lambda count: bytes(data[:count]), self.limits)
            except DecodeError as problem:
                error = problem.reason
            except MemoryError as problem:
                raise measured_at(problem, "", str(here().key), field) from problem
        return field, kind, len(data), header, error


def _key(scalar: pa.Scalar) -> str | None:
    """Return a key as text, None for null; bytes that are not UTF-8 become escapes."""
    if not scalar.is_valid:
        return None
    type_ = scalar.type.value_type if isinstance(scalar, pa.DictionaryScalar) else scalar.type
    return bytes(text_bytes(scalar)).decode("utf-8", "backslashreplace") if is_text(type_) else str(scalar.as_py())

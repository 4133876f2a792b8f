"""A shard of the user's container as the library reads it: scanned once, then read by position.

    Shard.keys, Shard.sample --scan--> facts: (number of the sample, size) of each field, or its range of the file
    member of the index --> Shard.sample(number)[field], or the range, with the size that it had

All that the user's functions do wrong becomes an error that names the container, the shard and the sample.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final, TypeVar

from orchdata.loaders.compact import RowsOfKeys
from orchdata.loaders.errors import NOT_DATA, ContainerError, DecodeError, FieldError, ShardError, pass_trouble
from orchdata.loaders.field_names import NULL
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at, pass_shortage
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, OTHER, TEXT
from orchdata.loaders.modalities.modality import Header
from orchdata.loaders.modalities.probing import read_header
from orchdata.loaders.shards.facts_table import NO_HEADER, Facts, FactsTable, shard_failure
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.fields import GZIP, OWN_JSON, OWN_TEXT, RAW, Met, printable
from orchdata.loaders.shards.first.beginning import Beginning
from orchdata.loaders.shards.own.fields import Cell, cells_of
from orchdata.loaders.shards.own.shard import ByteRange, Container, OpenContext, Shard, name_of
from orchdata.loaders.shards.own.source import ShardSource
from orchdata.loaders.shards.shard import beginning_of, facts_of
from orchdata.loaders.shards.tar import gunzip
from orchdata.loaders.slow import SCANNING, here

_END: Final = object()
_HEAD_BYTES: Final = 16
_REMEMBERED_BYTES: Final = 1 << 20
_INT_BOUND: Final = 1 << 62

T = TypeVar("T")


class OpenedShard:
    """An open shard of a container of the user's, with the methods of `shards.shard.Shard`.

    Args:
        container: that opens it.
        source: its bytes; closed with it.
        context: passed on to the container.
        rules: names of fields, and whether a function gets all of them.

    Raises:
        ShardError: the container's `open` failed.
        ContainerError: it returned something else than an `od.Shard`.
    """

    is_new = False
    packed = False

    def __init__(self, container: Container, source: ShardSource, context: OpenContext, rules: FieldRules) -> None:
        self.url, self.size, self.version = source.url, source.size, source.version
        self._name = name_of(container)
        self._source = source
        self._limits = context.limits
        self._names = dict(rules.columns)
        self._all_values = rules.record is not None
        self._met = Met(rules.columns)
        try:
            self._shard = _opened(container, source, context)
        except BaseException:
            source.close()
            raise
        # Without `parallel`, one thread at a time is in the user's code.
        self._turn: Any = nullcontext() if self._shard.parallel else threading.Lock()
        self._last: tuple[int, list[Cell]] | None = None
        self._lock = threading.Lock()
        self._readers = 0
        self._closing = False
        self._finalizer = weakref.finalize(self, _close, self._shard, source)
        self._finalizer.atexit = False

    def checksum(self) -> str:
        """Return the checksum of its whole content."""
        return self._source.checksum()

    def facts(self) -> Facts:
        """Ask for every sample once. Bad samples become rows with an error."""
        table = _Scan(self).run()
        checksum = self.checksum()
        self._source.check_unchanged()
        more = {"ignored": table.ignored(), "met": self._met.counts}
        return facts_of(self, table, checksum, **more)

    def begin(self, most: int) -> Beginning:
        """Ask for all keys, and for the first samples. Bad samples become rows with an error."""
        table, count = _Scan(self).run_first(most)
        self._source.check_unchanged()
        more = {"share": most / max(1, count), "reach": most, "met": self._met.counts}
        return beginning_of(self, table, most, is_whole=count <= most, **more)  # type: ignore[arg-type]

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes:
        """Read one member. Raises FieldError."""
        (data,) = self.read_many([(offset, size, encoding, field)])
        return bytes(data)

    def read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[bytes | memoryview]:
        """Read the members of one sample; the user's `sample` is called once. Raises FieldError."""
        self._enter()
        try:
            return self._read_many(members)
        finally:
            self._leave()

    def is_text(self, field: str, encoding: int) -> bool:
        """Return whether a field was a string."""
        return encoding == OWN_TEXT

    def is_json(self, field: str, encoding: int) -> bool:
        """Return whether a field was a number, list or dict, which became JSON."""
        return encoding == OWN_JSON

    def expect(self, members: Sequence[tuple[int, int, int, str]]) -> None:
        """The container decides what it reads."""

    def close(self) -> None:
        with self._lock:
            self._closing = True
            if self._readers == 0:
                self._finalizer()

    def keys(self) -> Iterator[str]:
        """Yield the keys. Raises ShardError for all that goes wrong."""
        with self._turn:
            keys = self._called("keys()", self._shard.keys)
        if isinstance(keys, str | bytes) or not hasattr(keys, "__iter__"):
            raise self._unfit(f"keys() returned a {type(keys).__name__}: return the keys of all samples, as a list")
        iterator, number = iter(keys), 0
        while True:
            with self._turn:
                key = self._called("keys()", lambda: next(iterator, _END))
            if key is _END:
                return
            if not isinstance(key, str) or not key:
                raise self._unfit(f"keys() gave {key!r:.80} for sample {number}: keys are strings, and not empty")
            yield key
            number += 1

    def cells(self, number: int) -> list[Cell]:
        """Return the fields of a sample. Raises DecodeError and FieldError."""
        what = f"sample({number})"
        try:
            with self._turn:
                sample = self._called(what, self._shard.sample, number)
        except ShardError as error:
            raise DecodeError(error.reason) from error
        try:
            if self._names and isinstance(sample, Mapping):
                self._met.add(name for name in sample if isinstance(name, str))
            return cells_of(sample, self._names, self._limits, all_values=self._all_values)
        except DecodeError as error:
            raise DecodeError(f"{self._name}: {what} {error.reason}") from error

    def content(self, cell: Cell, most: int | None = None) -> bytes:
        """Return the bytes of a field as stored, or the first of them. Raises FieldError."""
        if not isinstance(cell.value, ByteRange):
            return cell.value[:most]
        offset, size = cell.value
        data = self._source.read(offset, size if most is None else min(size, most))
        if most is None and len(data) < size:
            raise FieldError(cell.field, f"cut: {len(data)} of {size} bytes at {offset} are in the shard")
        return data

    def _read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[bytes | memoryview]:
        cells: dict[int, dict[str, Cell]] = {}
        contents: list[bytes | memoryview] = []
        try:
            for offset, size, encoding, field in members:
                if size > self._limits.member_bytes:
                    raise FieldError(field, f"{size} bytes, above Limits.member_bytes={self._limits.member_bytes}")
                if encoding in (RAW, GZIP):  # a range of the file
                    data = self.content(Cell(field, None, encoding, ByteRange(offset, size)))
                    contents.append(gunzip(data, field, self._limits) if encoding == GZIP else data)
                    continue
                if not size and field.endswith(NULL):
                    contents.append(b"")
                    continue
                if offset not in cells:
                    cells[offset] = {cell.field: cell for cell in self._cells_at(offset, field)}
                contents.append(self._same(cells[offset].get(field), offset, size, field))
        except (FieldError, ShardError):
            self._source.check_unchanged()  # a change of the file can look like damage
            raise
        self._source.check_unchanged()
        return contents

    def _cells_at(self, number: int, field: str) -> list[Cell]:
        """Return the fields of a sample. Small ones are remembered: text and media are read in turn."""
        last = self._last
        if last is not None and last[0] == number:
            return last[1]
        try:
            cells = self.cells(number)
        except DecodeError as error:
            raise error.at(field) from error.__cause__
        if sum(len(cell.value) for cell in cells) <= _REMEMBERED_BYTES:
            self._last = number, cells
        return cells

    def _same(self, cell: Cell | None, number: int, size: int, field: str) -> bytes:
        """Return the bytes of a field, which must have the size that it had."""
        value = None if cell is None else cell.value
        if not isinstance(value, bytes) or len(value) != size:
            now = "nothing" if value is None else "a ByteRange" if isinstance(value, tuple) else f"{len(value)} bytes"
            raise FieldError(
                field,
                f"{self._name}: sample({number}) returns {now} now, and {size} bytes when it was indexed: it must "
                "return the same each time. If the container was changed, raise its `version`",
            )
        return value

    def _called(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the user's. Raises ShardError for an exception that is about the data."""
        return called(self._name, self.url, what, function, *arguments)

    def _unfit(self, reason: str) -> ShardError:
        return ShardError(self.url, f"{self._name}: {reason}")

    def _enter(self) -> None:
        with self._lock:
            if self._closing:
                raise ValueError(f"{self.url}: read after close")
            self._readers += 1

    def _leave(self) -> None:
        with self._lock:
            self._readers -= 1
            if self._closing and self._readers == 0:
                self._finalizer()


class _Scan:
    """One pass over a shard: samples -> rows of the facts, with the headers of media."""

    def __init__(self, shard: OpenedShard) -> None:
        self._shard = shard
        self._limits: Limits = shard._limits
        self._table = FactsTable()
        self._first_row = RowsOfKeys(self._table.key)

    def run(self) -> FactsTable:
        current = here()
        number = 0
        keys = list(self._shard.keys())
        for number, given in enumerate(keys):
            current.key = key = printable(given)
            current.fraction = SCANNING * number / len(keys)
            self._add_sample(number, key)
            if len(self._table) > self._limits.shard_rows:
                return shard_failure(f"more than {self._limits.shard_rows} fields, above Limits.shard_rows")
        current.key = None
        if not keys:
            return shard_failure(f"no samples: {self._shard._name}: keys() gives none")
        return self._table

    def run_first(self, most: int) -> tuple[FactsTable, int]:
        """Return the facts of the first samples, and the number of all."""
        keys = list(self._shard.keys())
        for number, given in enumerate(keys[:most]):
            here().key = printable(given)
            self._add_sample(number, printable(given))
        here().key = None
        return self._table if keys else shard_failure(f"no samples: {self._shard._name}: keys() gives none"), len(keys)

    def _add_sample(self, number: int, key: str) -> None:
        table, first = self._table, len(self._table)
        too_long = self._limits.name_error("key", key)
        if too_long is not None:
            table.append(number, shortened(key), "", error=too_long)
            return
        try:
            for cell in self._shard.cells(number):
                self._add_cell(number, key, cell)
        except FieldError as error:
            table.append(number, key, error.field, error=error.reason)
        except DecodeError as error:
            table.append(number, key, "*", error=error.reason)
        if len(table) == first:
            table.append(number, key, "")
        earlier = self._first_row.setdefault(key, first)
        if earlier != first:
            reason = (
                f"{self._shard._name}: samples {table.sample[earlier]} and {number} both have the key {key!r}: give "
                "each sample of a shard a different key"
            )
            table.fail_structure(earlier, reason)
            table.fail_structure(first, reason)

    def _add_cell(self, number: int, key: str, cell: Cell) -> None:
        field = cell.field
        long_name = self._limits.name_error("field's name", field)
        if long_name is not None:
            self._table.append(number, key, shortened(field), error=long_name)
            return
        is_range = isinstance(cell.value, ByteRange)
        offset, size = cell.value if isinstance(cell.value, ByteRange) else (number, len(cell.value))
        header, error = NO_HEADER, None
        kind = OTHER if cell.kind is None else cell.kind
        if is_range and offset + size > self._shard.size:
            error = f"od.ByteRange({offset}, {size}) ends after the {self._shard.size} bytes of the shard"
            offset, size = min(offset, _INT_BOUND), 0
        else:
            kind = cell.kind_by(self._shard.content(cell, _HEAD_BYTES) if cell.kind is None else b"")
            error = self._limits.size_error(size, is_text=kind == TEXT) if kind != OTHER else None
            if error is None and kind not in (TEXT, OTHER):
                header, error = self._header(kind, cell, size, key)
        self._table.append(
            number, key, field, kind=kind, offset=offset, size=size, encoding=cell.encoding, header=header, error=error
        )

    def _header(self, kind: int, cell: Cell, size: int, key: str) -> tuple[Header, str | None]:
        modality = BUILTINS[KINDS[kind]]
        try:
            header = read_header(modality, size, lambda count: self._shard.content(cell, count), self._limits)
        except DecodeError as problem:
            return NO_HEADER, problem.reason
        except MemoryError as problem:
            raise measured_at(problem, self._shard.url, key, cell.field) from problem
        return (*header, *NO_HEADER[len(header) :]), None


def called(name: str, url: str, what: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of a container of the user's.

    Raises ShardError, with the container and the line, for an exception that may be about the data; other errors pass.
    """
    try:
        return function(*arguments)
    except NOT_DATA:
        raise
    except NotImplementedError as error:
        raise ContainerError(f"{url}: {name}: {error}") from error
    except Exception as error:
        pass_shortage(error)
        pass_trouble(error)
        said = error.reason if isinstance(error, ShardError) else " ".join(str(error).split())[:200]
        raise ShardError(
            url, f"{name}: {what} raised {type(error).__name__}{f': {said}' if said else ''}{_line_of(error, what)}"
        ) from error


def _line_of(error: BaseException, what: str) -> str:
    """Return the place in the user's function at which an exception left it, as text."""
    wanted = what.partition("(")[0]
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == wanted]
    return f" (line {frames[-1][1]} of {frames[-1][0].f_code.co_filename})" if frames else ""


def _opened(container: Container, source: ShardSource, context: OpenContext) -> Shard:
    name = name_of(container)
    shard = called(name, source.url, "open()", container.open, source, context)
    if not isinstance(shard, Shard):
        raise ContainerError(
            f"{source.url}: {name}: open() returned a {type(shard).__name__}: return an object of a subclass "
            "of od.Shard"
        )
    return shard


def _close(shard: Shard, source: ShardSource) -> None:
    with suppress(Exception):  # nothing is read afterwards
        shard.close()
    source.close()

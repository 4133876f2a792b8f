"""A shard of the user's container as the library reads it: read once for its facts, then by row.

    Shard.facts, Shard.read --scan--> facts: (row, size) of each field --> Shard.read([row])

All that the user's functions do wrong becomes an error that names the container, the shard and the sample.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from orchdata.loaders.compact import RowsOfKeys
from orchdata.loaders.errors import NOT_DATA, ContainerError, DecodeError, FieldError, ShardError, pass_trouble
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at, pass_shortage
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, OTHER, TEXT
from orchdata.loaders.modalities.probing import read_header
from orchdata.loaders.shards.facts_table import NO_HEADER, Facts, FactsTable, shard_failure
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.fields import GZIP, OWN_BYTES, Met, classify_renamed, printable
from orchdata.loaders.shards.own.shard import Container, Shard, ShardSource, name_of
from orchdata.loaders.shards.parquet.cells import declared_kind, sniff
from orchdata.loaders.shards.shard import facts_of
from orchdata.loaders.shards.tar import gunzip
from orchdata.loaders.slow import SCANNING, here
from orchdata.loaders.storage.local import LocalFolder
from orchdata.loaders.storage.storage import Storage

_ROWS: Final = 16
"""That are read together while a shard is indexed."""


class OpenedShard:
    """An open shard of a container of the user's, with the methods of `shards.shard.Shard`.

    Args:
        storage: its bytes; closed with it.
        rules: names of fields.

    Raises:
        ShardError: the container's `open` failed.
        ContainerError: it returned something else than a shard.
    """

    is_new = False
    packed = False

    def __init__(self, container: Container, storage: Storage | LocalFolder, rules: FieldRules, limits: Limits) -> None:
        self.url, self.size, self.version = storage.url, storage.size, storage.version
        self._name = name_of(container)
        self._storage = storage
        self._source = ShardSource(storage)
        self._limits = limits
        self._names = dict(rules.columns)
        self._stored = {new: old for old, new in rules.columns}
        self._met = Met(rules.columns)
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._shard: Shard = self._called("open()", container.open, self._source)
            if not hasattr(self._shard, "facts") or not hasattr(self._shard, "read"):
                kind = type(self._shard).__name__
                raise ContainerError(
                    f"{self.url}: {self._name}: open() returned a {kind}: return an object with facts() and read()"
                )
        except BaseException:
            storage.close()
            raise
        self._finalizer = weakref.finalize(self, _close, self._shard, storage)
        self._finalizer.atexit = False

    def checksum(self) -> str:
        """Return the checksum of its whole content."""
        return self._source.checksum()

    def facts(self) -> Facts:
        """Read every row once. Bad samples become rows with an error. Raises ShardError."""
        table = self._scan(self._rows())
        checksum = self.checksum()
        self._storage.check_unchanged()
        return facts_of(self, table, checksum, ignored=table.ignored(), met=self._met.counts)

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes:
        """Read one member. Raises FieldError."""
        (data,) = self.read_many([(offset, size, encoding, field)])
        return bytes(data)

    def read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[bytes | memoryview]:
        """Read the members of one sample; the user's `read` is called once. Raises FieldError."""
        contents: list[bytes | memoryview] = []
        field = members[0][3]
        try:
            for (row, size, _, field), data in zip(members, self._read([row for row, *_ in members]), strict=True):
                content = self._content(field, data)
                if len(content) != size:
                    raise FieldError(
                        field,
                        f"{self._name}: read([{row}]) returns {len(content)} bytes now, and {size} bytes when it was "
                        "indexed: it must return the same each time. If the container was changed, raise its `version`",
                    )
                contents.append(content)
        except (FieldError, ShardError) as error:
            self._storage.check_unchanged()  # a change of the file can look like damage
            if isinstance(error, FieldError):
                raise
            raise FieldError(field, error.reason) from error
        self._storage.check_unchanged()
        return contents

    def is_text(self, field: str, encoding: int) -> bool:
        """Members are bytes."""
        return False

    def is_json(self, field: str, encoding: int) -> bool:
        """Members are bytes."""
        return False

    def expect(self, members: Sequence[tuple[int, int, int, str]]) -> None:
        """The container decides what it reads."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._finalizer()

    def _rows(self) -> list[tuple[int, str, str]]:
        """Return (number of the sample, key, field) of each row. Raises ShardError."""
        table = self._called("facts()", self._shard.facts)
        try:
            keys, fields = (table.column(name).to_pylist() for name in ("key", "field"))
        except (AttributeError, KeyError):
            reason = f"facts() returned a {type(table).__name__}: return a table with the columns key and field"
            raise self._unfit(reason) from None
        if not keys:
            raise ShardError(self.url, f"no samples: {self._name}: facts() has no rows")
        for what, strings in (("key", keys), ("field", fields)):
            if bad := [each for each in strings if not isinstance(each, str) or not each]:
                raise self._unfit(f"facts() gives the {what} {bad[0]!r:.80}: these are strings, and not empty")
        rows, sample = [], -1
        for row, (key, field) in enumerate(zip(keys, fields, strict=True)):
            sample += not row or keys[row - 1] != key
            rows.append((sample, printable(key), field))
        return rows

    def _read(self, rows: Sequence[int]) -> list[Any]:
        """Return what the user's function returns for some rows. Raises ShardError."""
        found: list[Any] = self._called(f"read({list(rows)})", lambda: list(self._shard.read(list(rows))))
        if len(found) != len(rows):
            raise self._unfit(f"read() returned {len(found)} values for {len(rows)} rows")
        return found

    def _content(self, field: str, data: Any) -> bytes:
        """Return a value as bytes, decompressed. Raises FieldError."""
        if isinstance(data, str):
            data = data.encode("utf-8", "surrogatepass")
        if not isinstance(data, bytes | bytearray | memoryview):
            raise FieldError(field, f"{self._name}: read() returned a {type(data).__name__}: return bytes, or a str")
        _, encoding = classify_renamed(self._stored.get(field, field).lower(), field.lower())
        return gunzip(bytes(data), field, self._limits) if encoding == GZIP else bytes(data)

    def _called(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the user's. Raises ShardError for an exception that may be about the data."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.url}: read after close")
            try:
                return function(*arguments)
            except NOT_DATA:
                raise
            except NotImplementedError as error:
                raise ContainerError(f"{self.url}: {self._name}: {error}") from error
            except Exception as error:
                pass_shortage(error)
                pass_trouble(error)
                said = error.reason if isinstance(error, ShardError) else " ".join(str(error).split())[:200]
                raise self._unfit(f"{what} raised {type(error).__name__}{f': {said}' if said else ''}") from error

    def _unfit(self, reason: str) -> ShardError:
        return ShardError(self.url, f"{self._name}: {reason}")

    def _scan(self, rows: Sequence[tuple[int, str, str]]) -> FactsTable:
        table, current = FactsTable(), here()
        first_row = RowsOfKeys(table.key)
        for row, data in enumerate(self._each(len(rows))):
            sample, current.key, _ = rows[row]
            current.fraction = SCANNING * row / len(rows)
            self._add(table, row, rows[row], data)
            first = row
            if not row or rows[row - 1][0] != sample:
                fields: set[str] = set()
                first = first_row.setdefault(table.key[row], row)
            name = table.field[row]
            if name in fields:
                reason = f"{self._name}: facts() gives two fields with the name {name!r}, after columns="
                table.fail_structure(row, reason)
            fields.add(name)
            if first != row:
                reason = (
                    f"{self._name}: samples {table.sample[first]} and {sample} both have the key {current.key!r}: give "
                    "each sample of a shard a different key, and its rows one after the other"
                )
                table.fail_structure(first, reason)
                table.fail_structure(row, reason)
            if len(table) > self._limits.shard_rows:
                return shard_failure(f"more than {self._limits.shard_rows} fields, above Limits.shard_rows")
        current.key = None
        return table

    def _each(self, count: int) -> Iterator[Any]:
        """Yield the value of each row, or an error. A few are read at a time; those that fail together one by one."""
        for start in range(0, count, _ROWS):
            rows = range(start, min(start + _ROWS, count))
            try:
                yield from self._read(rows)
            except ShardError:
                for row in rows:
                    try:
                        yield from self._read([row])
                    except ShardError as error:
                        yield error

    def _add(self, table: FactsTable, row: int, facts: tuple[int, str, str], data: Any) -> None:
        sample, key, stored = facts
        if self._names:
            self._met.add([stored])
        name = printable(self._names.get(stored, stored))
        for what, given in (("key", key), ("field's name", name)):
            if (too_long := self._limits.name_error(what, given)) is not None:
                field = "" if what == "key" else shortened(name)
                table.append(sample, shortened(key) if what == "key" else key, field, error=too_long)
                return
        kind, size, header, error = OTHER, 0, NO_HEADER, None
        try:
            if isinstance(data, ShardError):
                raise FieldError(name, data.reason)
            content = self._content(name, data)
            size = len(content)
            kind, _ = classify_renamed(stored.lower(), name.lower())
            kind = kind if kind != OTHER else declared_kind(name, None)
            kind = kind if kind != OTHER else sniff(content)
            error = self._limits.size_error(size, is_text=kind == TEXT) if kind != OTHER else None
            if error is None and kind not in (TEXT, OTHER):
                found = read_header(BUILTINS[KINDS[kind]], size, lambda count: content[:count], self._limits)
                header = (*found, *NO_HEADER[len(found) :])
        except (FieldError, DecodeError) as problem:
            error = problem.reason
        except MemoryError as problem:
            raise measured_at(problem, self.url, key, name) from problem
        table.append(
            sample, key, name, kind=kind, offset=row, size=size, encoding=OWN_BYTES, header=header, error=error
        )


def _close(shard: Shard, storage: Storage | LocalFolder) -> None:
    with suppress(Exception):  # nothing is read afterwards
        getattr(shard, "close", lambda: None)()
    storage.close()

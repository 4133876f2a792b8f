"""A shard of the user's container as the library reads it: each sample once for its facts, then by row.

    Shard.facts, Shard.read --> facts: (row, size) of each field --> Shard.read([row])

All that the user's functions do wrong becomes an error that names the container, the shard and the sample.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from orchdata.loaders.compact import RowsOfKeys
from orchdata.loaders.errors import NOT_DATA, DecodeError, FieldError, ShardError, pass_trouble
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at, pass_shortage
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, OTHER, TEXT
from orchdata.loaders.modalities.checks import read_header
from orchdata.loaders.shards import shard
from orchdata.loaders.shards.container import Container, Shard, ShardSource, name_of
from orchdata.loaders.shards.fields import GZIP, OWN_BYTES, FieldRules, Met, classify_renamed, printable
from orchdata.loaders.shards.parquet.cells import declared_kind, sniff
from orchdata.loaders.shards.shard import NO_HEADER, Facts, FactsTable, facts_of, shard_failure
from orchdata.loaders.shards.tar import gunzip
from orchdata.loaders.storage.content_digest import ContentDigest
from orchdata.loaders.storage.local import LocalFolder
from orchdata.loaders.storage.storage import Storage
from orchdata.loaders.watch import SCANNING, here


class OpenedShard(shard.Shard):
    """An open shard of a container of the user's; closes its storage. Raises ShardError if the container's `open`
    failed.
    """

    def __init__(self, container: Container, storage: Storage | LocalFolder, rules: FieldRules, limits: Limits) -> None:
        self.url, self.size, self.version = storage.url, storage.size, storage.version
        self._name = name_of(container)
        self._storage = storage
        self._limits = limits
        self._names = dict(rules.columns)
        self._stored = {new: old for old, new in rules.columns}
        self._met = Met(rules.columns)
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._shard: Shard = self._called("open()", lambda: container.open(ShardSource(storage)))
        except BaseException:
            storage.close()
            raise
        self._finalizer = weakref.finalize(self, _close, self._shard, storage)
        self._finalizer.atexit = False

    def checksum(self) -> str:
        """Return the checksum of its whole content."""
        storage = self._storage
        return storage.checksum() if isinstance(storage, LocalFolder) else ContentDigest(storage).hexdigest()

    def facts(self) -> Facts:
        """Read every sample once. Bad samples become rows with an error. Raises ShardError."""
        table, checksum = self._scan(), self.checksum()
        self._storage.check_unchanged()
        return facts_of(self, table, checksum, ignored=table.ignored(), met=self._met.counts)

    def read_many(self, members: Sequence[shard.Member]) -> list[bytes | memoryview]:
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
            raise error if isinstance(error, FieldError) else FieldError(field, error.reason) from error
        self._storage.check_unchanged()
        return contents

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._finalizer()

    def _called(self, what: str, function: Callable[[], Any]) -> Any:
        """Call a function of the user's. Raises ShardError for an exception that may be about the data."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.url}: read after close")
            try:
                return function()
            except NOT_DATA:
                raise
            except Exception as error:
                pass_shortage(error)
                pass_trouble(error)
                said = error.reason if isinstance(error, ShardError) else " ".join(str(error).split())[:200]
                raise self._unfit(f"{what} raised {type(error).__name__}{f': {said}' if said else ''}") from error

    def _unfit(self, reason: str) -> ShardError:
        return ShardError(self.url, f"{self._name}: {reason}")

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

    def _scan(self) -> FactsTable:
        given = self._called("facts()", lambda: self._shard.facts())
        try:
            keys, fields = (given.column(name).to_pylist() for name in ("key", "field"))
        except (AttributeError, KeyError):
            reason = f"facts() returned a {type(given).__name__}: return a table with the columns key and field"
            raise self._unfit(reason) from None
        if not keys:
            raise self._unfit("facts() has no rows: no samples")
        if bad := [each for each in (*keys, *fields) if not isinstance(each, str) or not each]:
            raise self._unfit(f"facts() gives the key or field {bad[0]!r:.80}: these are strings, and not empty")
        if len(keys) > self._limits.shard_rows:
            return shard_failure(f"more than {self._limits.shard_rows} fields, above Limits.shard_rows")
        table, current = FactsTable(), here()
        first_row = RowsOfKeys(table.key)
        for sample, (key, group) in enumerate(groupby(range(len(keys)), keys.__getitem__)):
            rows = list(group)
            current.key, current.fraction = printable(key), SCANNING * rows[0] / len(keys)
            try:
                contents = self._read(rows)
            except ShardError as error:
                contents = [error] * len(rows)
            for row, data in zip(rows, contents, strict=True):
                self._add(table, sample, row, printable(key), fields[row], data)
            names = [table.field[row] for row in rows]
            if twice := [name for name in names if names.count(name) > 1]:
                reason = f"{self._name}: facts() gives two fields with the name {twice[0]!r}, after columns="
                table.fail_structure(rows[-1], reason)
            first = first_row.setdefault(table.key[rows[0]], rows[0])
            if first != rows[0]:
                reason = (
                    f"{self._name}: samples {table.sample[first]} and {sample} both have the key {current.key!r}: give "
                    "each sample of a shard a different key, and its rows one after the other"
                )
                table.fail_structure(first, reason)
                table.fail_structure(rows[0], reason)
        current.key = None
        return table

    def _add(self, table: FactsTable, sample: int, row: int, key: str, stored: str, data: Any) -> None:
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
        more: dict[str, Any] = {"kind": kind, "offset": row, "size": size, "header": header, "error": error}
        table.append(sample, key, name, encoding=OWN_BYTES, **more)


def _close(shard: Shard, storage: Storage | LocalFolder) -> None:
    with suppress(Exception):  # nothing is read afterwards
        getattr(shard, "close", lambda: None)()
    storage.close()

"""A shard of the user's container as the library reads it: read once for its facts, then by row.

    Shard.facts, Shard.read --cells--> facts: (row of the sample, size) of each field --> Shard.read([row])[0][field]

All that the user's functions do wrong becomes an error that names the container, the shard and the sample.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from orchdata.loaders.compact import RowsOfKeys
from orchdata.loaders.errors import NOT_DATA, ContainerError, DecodeError, FieldError, ShardError, pass_trouble
from orchdata.loaders.field_names import NULL
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at, pass_shortage
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, OTHER, TEXT
from orchdata.loaders.modalities.probing import read_header
from orchdata.loaders.shards.facts_table import NO_HEADER, Facts, FactsTable, shard_failure
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.fields import (
    GZIP,
    OWN_BYTES,
    OWN_JSON,
    OWN_TEXT,
    Met,
    classify,
    classify_renamed,
    names_content,
    printable,
)
from orchdata.loaders.shards.first.beginning import Beginning
from orchdata.loaders.shards.own.shard import Container, Shard, ShardSource, name_of
from orchdata.loaders.shards.parquet.cells import declared_kind, sniff
from orchdata.loaders.shards.shard import beginning_of, facts_of
from orchdata.loaders.shards.tar import gunzip
from orchdata.loaders.slow import SCANNING, here
from orchdata.loaders.storage.local import LocalFolder
from orchdata.loaders.storage.storage import Storage
from orchdata.loaders.text.chat_keys import has_strings, is_chat_context
from orchdata.loaders.text.messages import CHAT_KEYS
from orchdata.loaders.text.words import WORDS_SUFFIX, names_words

_ROWS: Final = 16
"""That are read together while a shard is indexed."""
_REMEMBERED_BYTES: Final = 1 << 20
_TURNS: Final = (frozenset(("role", "content")), frozenset(("from", "value")))
_RECORDS: Final = ("json", "jsn", "jsonl")
_RESERVED: Final = ("__key__", "__url__")
_ALLOWED: Final = (
    "bytes (of an array: as numpy.save writes them, for a modality of yours), str, lists of bytes, None, or numbers, "
    "lists and dicts as in JSON"
)
_Bytes = bytes | bytearray | memoryview


class Cell(NamedTuple):
    """One field of a sample: its name, its modality (TEXT, OTHER), OWN_BYTES, OWN_TEXT or OWN_JSON, and its bytes."""

    field: str
    kind: int
    encoding: int
    value: bytes


class OpenedShard:
    """An open shard of a container of the user's, with the methods of `shards.shard.Shard`.

    Args:
        storage: its bytes; closed with it.
        rules: names of fields, and whether a function gets all of them.

    Raises:
        ShardError: the container's `open` failed.
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
        self._all_values = rules.record is not None
        self._met = Met(rules.columns)
        self._last: tuple[int, list[Cell]] | None = None
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
        """Read every sample once. Bad samples become rows with an error. Raises ShardError."""
        table = self._scan(self.keys())
        checksum = self.checksum()
        self._storage.check_unchanged()
        return facts_of(self, table, checksum, ignored=table.ignored(), met=self._met.counts)

    def begin(self, most: int) -> Beginning:
        """Read the first samples. Bad samples become rows with an error. Raises ShardError."""
        keys = self.keys()
        table, share = self._scan(keys[:most]), most / len(keys)
        self._storage.check_unchanged()
        is_whole = len(keys) <= most
        return beginning_of(self, table, most, is_whole=is_whole, share=share, reach=most, met=self._met.counts)

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes:
        """Read one member. Raises FieldError."""
        (data,) = self.read_many([(offset, size, encoding, field)])
        return bytes(data)

    def read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[bytes | memoryview]:
        """Read the members of one sample; the user's `read` is called once. Raises FieldError."""
        contents: list[bytes | memoryview] = []
        try:
            for row, size, _, field in members:
                if not size and field.endswith(NULL):
                    contents.append(b"")
                    continue
                found = [cell.value for cell in self._cells_at(row, field) if cell.field == field]
                if not found or len(found[0]) != size:
                    now = f"{len(found[0])} bytes" if found else "nothing"
                    raise FieldError(
                        field,
                        f"{self._name}: read([{row}]) returns {now} now, and {size} bytes when it was indexed: it must "
                        "return the same each time. If the container was changed, raise its `version`",
                    )
                contents.append(found[0])
        except (FieldError, ShardError):
            self._storage.check_unchanged()  # a change of the file can look like damage
            raise
        self._storage.check_unchanged()
        return contents

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
            self._closed = True
            self._finalizer()

    def keys(self) -> list[str]:
        """Return the keys of all samples. Raises ShardError."""
        table = self._called("facts()", self._shard.facts)
        try:
            keys: list[str] = table.column("key").to_pylist()
        except (AttributeError, KeyError):
            raise self._unfit(f"facts() returned a {type(table).__name__}: return a table with a column key") from None
        if not keys:
            raise ShardError(self.url, f"no samples: {self._name}: facts() has no rows")
        if bad := [key for key in keys if not isinstance(key, str) or not key]:
            raise self._unfit(f"facts() gives the key {bad[0]!r:.80}: keys are strings, and not empty")
        return keys

    def samples(self, rows: Sequence[int]) -> list[Any]:
        """Return what the user's function returns for some rows. Raises ShardError."""
        samples: list[Any] = self._called(f"read({list(rows)})", lambda: list(self._shard.read(list(rows))))
        if len(samples) != len(rows):
            raise self._unfit(f"read() returned {len(samples)} samples for {len(rows)} rows")
        return samples

    def cells(self, sample: Any) -> list[Cell]:
        """Return the fields of a sample. Raises DecodeError and FieldError."""
        if self._names and isinstance(sample, Mapping):
            self._met.add(name for name in sample if isinstance(name, str))
        try:
            return cells_of(sample, self._names, self._limits, all_values=self._all_values)
        except DecodeError as error:
            raise DecodeError(f"{self._name}: read() {error.reason}") from error

    def _cells_at(self, row: int, field: str) -> list[Cell]:
        """Return the fields of a sample. Small ones are remembered: text and media are read in turn."""
        last = self._last
        if last is not None and last[0] == row:
            return last[1]
        try:
            cells = self.cells(self.samples([row])[0])
        except (DecodeError, ShardError) as error:
            raise FieldError(field, error.reason) from error
        if sum(len(cell.value) for cell in cells) <= _REMEMBERED_BYTES:
            self._last = row, cells
        return cells

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

    def _scan(self, keys: Sequence[str]) -> FactsTable:
        """Read samples, a few at a time: those that fail together are read one by one."""
        table, current = FactsTable(), here()
        first_row = RowsOfKeys(table.key)
        for start in range(0, len(keys), _ROWS):
            rows = range(start, min(start + _ROWS, len(keys)))
            current.key, current.fraction = printable(keys[start]), SCANNING * start / len(keys)
            for row, sample in zip(rows, self._each(rows), strict=True):
                current.key = key = printable(keys[row])
                self._add_sample(table, first_row, row, key, sample)
            if len(table) > self._limits.shard_rows:
                return shard_failure(f"more than {self._limits.shard_rows} fields, above Limits.shard_rows")
        current.key = None
        return table

    def _each(self, rows: Sequence[int]) -> list[Any]:
        """Return samples, or a DecodeError for one that fails alone."""
        try:
            return self.samples(rows)
        except ShardError as error:
            if len(rows) == 1:
                return [DecodeError(error.reason)]
            return [sample for row in rows for sample in self._each([row])]

    def _add_sample(self, table: FactsTable, first_row: RowsOfKeys, row: int, key: str, sample: Any) -> None:
        first = len(table)
        too_long = self._limits.name_error("key", key)
        if too_long is not None:
            table.append(row, shortened(key), "", error=too_long)
            return
        try:
            if isinstance(sample, DecodeError):
                raise sample
            for cell in self.cells(sample):
                self._add_cell(table, row, key, cell)
        except (FieldError, DecodeError) as error:
            table.append(row, key, error.field if isinstance(error, FieldError) else "*", error=error.reason)
        if len(table) == first:
            table.append(row, key, "")
        earlier = first_row.setdefault(key, first)
        if earlier != first:
            reason = (
                f"{self._name}: samples {table.sample[earlier]} and {row} both have the key {key!r}: give each sample "
                "of a shard a different key"
            )
            table.fail_structure(earlier, reason)
            table.fail_structure(first, reason)

    def _add_cell(self, table: FactsTable, row: int, key: str, cell: Cell) -> None:
        name, kind, encoding, value = cell
        error = self._limits.name_error("field's name", name)
        if error is not None:
            table.append(row, key, shortened(name), error=error)
            return
        header = NO_HEADER
        if kind != OTHER:
            error = self._limits.size_error(len(value), is_text=kind == TEXT)
        if error is None and kind not in (TEXT, OTHER):
            try:
                found = read_header(BUILTINS[KINDS[kind]], len(value), lambda count: value[:count], self._limits)
                header = (*found, *NO_HEADER[len(found) :])
            except DecodeError as problem:
                error = problem.reason
            except MemoryError as problem:
                raise measured_at(problem, self.url, key, name) from problem
        size = len(value)
        table.append(row, key, name, kind=kind, offset=row, size=size, encoding=encoding, header=header, error=error)


def _close(shard: Shard, storage: Storage | LocalFolder) -> None:
    with suppress(Exception):  # nothing is read afterwards
        getattr(shard, "close", lambda: None)()
    storage.close()


def cells_of(sample: Any, names: Mapping[str, str], limits: Limits, *, all_values: bool) -> list[Cell]:
    """Return the cells of a sample, in its order, by the rules of table columns.

    Args:
        sample: one that `Shard.read` returned.
        names: old name -> new name of renamed fields.
        all_values: a function of the user's gets all values: also nulls, and numbers as JSON.

    Raises DecodeError, or FieldError for one field.
    """
    if not isinstance(sample, Mapping):
        raise DecodeError(f"returned a {type(sample).__name__}: return a dict of name -> value of each field")
    cells: dict[str, Cell] = {}
    for stored, value in sample.items():
        if not isinstance(stored, str) or not stored or stored in _RESERVED:
            raise DecodeError(
                f"returned a field {stored!r:.80}: names are strings that are not empty, and not {_RESERVED}"
            )
        for cell in _cells(printable(names.get(stored, stored)), stored, value, limits, all_values=all_values):
            if cell.field in cells:
                raise DecodeError(
                    f"returned two fields with the name {cell.field!r}, after columns= and the numbers of lists"
                )
            cells[cell.field] = cell
        if len(cells) > limits.sample_parts:
            raise DecodeError(f"has more than {limits.sample_parts} fields, above Limits.sample_parts")
    return list(cells.values())


def _cells(name: str, stored: str, value: Any, limits: Limits, *, all_values: bool) -> Iterator[Cell]:
    if value is None or (isinstance(value, float | np.floating) and np.isnan(value)):
        if all_values:
            yield Cell(name + NULL, TEXT, OWN_TEXT, b"")
        elif value is not None and names_content(name):
            raise FieldError(name, "NaN, and the name says text or media: return None if the sample has none")
    elif isinstance(value, _Bytes):
        yield _bytes_cell(name, name, stored, value, limits)
    elif isinstance(value, list | tuple) and value and all(isinstance(item, _Bytes) for item in value):
        for number, item in enumerate(value):
            yield _bytes_cell(f"{name}.{number}", name, stored, item, limits)
    elif isinstance(value, str):
        yield Cell(name, TEXT, OWN_TEXT, value.encode("utf-8", "surrogatepass"))
    else:
        kind, field = _kind_of_json(name, value, all_values=all_values)
        yield Cell(field, kind, OWN_JSON, _as_json(name, value))


def _bytes_cell(field: str, name: str, stored: str, value: _Bytes, limits: Limits) -> Cell:
    kind, encoding = classify_renamed(stored.lower(), name.lower())
    kind = kind if kind != OTHER else declared_kind(name, None)
    data = gunzip(bytes(value), field, limits) if encoding == GZIP else bytes(value)
    return Cell(field, kind if kind != OTHER else sniff(data), OWN_BYTES, data)


def _kind_of_json(name: str, value: Any, *, all_values: bool) -> tuple[int, str]:
    """Return the kind and field name of a value that becomes JSON."""
    is_nested = isinstance(value, Mapping | list | tuple)
    turns = value if isinstance(value, list | tuple) else ()
    is_chat = name in CHAT_KEYS or is_chat_context(name)
    is_chat = is_chat or (bool(turns) and all(isinstance(turn, Mapping) and _is_turn(turn) for turn in turns))
    lowered = name.lower()
    if is_nested and (is_chat or lowered.endswith(_RECORDS)):
        return TEXT, name
    if is_nested and not all_values and classify(lowered)[0] not in (TEXT, OTHER):
        raise FieldError(name, f"a {type(value).__name__}, and the name says media: return bytes, or a list of bytes")
    if all_values or names_content(name) or names_words(name) or (is_nested and has_strings(value)):
        return TEXT, name + WORDS_SUFFIX
    return OTHER, name


def _is_turn(turn: Mapping[str, Any]) -> bool:
    return any(keys <= turn.keys() for keys in _TURNS)


def _as_json(name: str, value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise FieldError(name, f"a {type(value).__name__} cannot be a field ({error}): return {_ALLOWED}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")

"""One pass over a Parquet or Arrow file: cells -> rows of the facts, with the headers of media.

It runs in a child process (see `children`), because the first decoding of a file may crash the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from orchdata.loaders.compact import RowsOfKeys
from orchdata.loaders.errors import NOT_DATA, DecodeError, one_line, pass_trouble
from orchdata.loaders.field_names import NULL
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, OTHER, TEXT
from orchdata.loaders.modalities.modality import Header, read_header
from orchdata.loaders.shards.fields import PARQUET
from orchdata.loaders.shards.parquet.cells import Column, PathOnly, is_text, sniff, text_bytes
from orchdata.loaders.shards.parquet.file import Refused, RowReader
from orchdata.loaders.shards.shard import NO_HEADER, FactsTable
from orchdata.loaders.text.conversation import WORDS_SUFFIX
from orchdata.loaders.watch import here

# A date or time outside of Python's range is an ArithmeticError.
_CELL_ERRORS = (pa.ArrowException, ArithmeticError, ValueError, TypeError, LookupError, RecursionError)
_NUMBER = (1, *NO_HEADER[1:])  # header of a number that is no longer than an empty list


class ScannedRows(NamedTuple):
    """Facts of a file, and the number of rows of each ignored column that have a value, as far as that is known."""

    table: FactsTable
    ignored: dict[str, int]


def scan(reader: RowReader, limits: Limits) -> ScannedRows:
    """Scan a file. Bad cells are rows with an error. Raises Refused: the file as a whole cannot be a shard, or is above
    the limits.
    """
    if not reader.columns and reader.promised_rows:
        raise Refused(f"no column has text or media (columns: {', '.join(map(str, reader.schema.names))[:200]})")
    reader.check()
    for column in reader.columns:
        too_long = limits.name_error("column's name", column.name)
        if too_long is not None:
            raise Refused(f"{shortened(column.name)!r}: {too_long}")
    rows = _Scan(reader, limits)
    table = rows.run()
    ignored = {name: reader.promised_rows - reader.nulls(name.removesuffix(WORDS_SUFFIX)) for name in reader.ignored}
    return ScannedRows(table, ignored)


class _Scan:
    """Collects the rows of the facts."""

    def __init__(self, reader: RowReader, limits: Limits) -> None:
        self._reader = reader
        self._limits = limits
        self._table = FactsTable()
        self._first_row = RowsOfKeys(self._table.key)

    def run(self) -> FactsTable:
        reader, key = self._reader, self._reader.key
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
                    self._add_row(number, name, columns, [cell[i] for cell in cells])
                    number += 1
                current.key = f"row {number}"  # its batch is decoded next
                if len(self._table) > self._limits.shard_rows:
                    raise Refused(f"more than {self._limits.shard_rows} fields, above Limits.shard_rows")
        current.key = None
        return self._table

    def _add_row(self, number: int, key: str, columns: list[Column], scalars: list[pa.Scalar]) -> None:
        table = self._table
        first = len(table)
        too_long = self._limits.name_error("key", key)
        if too_long is not None:
            self._append(number, shortened(key), "", OTHER, 0, too_long)
            return
        if self._reader.key != "__key__":
            key = self._distinct(key, number)
        for column, scalar in zip(columns, scalars, strict=True):
            try:
                self._add_cells(number, key, column, scalar)
            except NOT_DATA:
                raise
            except _CELL_ERRORS as error:  # the other cells may be readable
                pass_trouble(error)
                self._append(number, key, column.name, column.kind, 0, f"cannot be read: {one_line(error)}")
        if len(table) == first:
            self._append(number, key, "", OTHER, 0, None)
        earlier = self._first_row.setdefault(key, first)
        if earlier != first:
            reason = (
                f"rows {table.sample[earlier]} and {number} both have the key {key!r}: give each row a different "
                "__key__, or drop that column, so that rows are named by id or number"
            )
            table.fail_structure(earlier, reason)
            table.fail_structure(first, reason)

    def _distinct(self, key: str, number: int) -> str:
        """Add the row number to an id that an earlier row has: every row is a sample, also if its id comes twice."""
        while key in self._first_row:
            key = f"{key}#{number}"
        return key

    def _add_cells(self, number: int, key: str, column: Column, scalar: pa.Scalar) -> None:
        excess = column.excess(scalar, self._limits)
        if excess is not None:
            self._append(number, key, column.name, column.kind, 0, excess)
            return
        missing = column.missing(scalar)
        if missing is not None:
            self._append(number, key, missing, TEXT, 0, None)
            return
        for field, item in _items(column, scalar):
            self._add_cell(number, key, field, column, item)
        for at, data in enumerate(column.media(scalar)):
            kind, error, header = sniff(data), self._limits.size_error(len(data), is_text=False), NO_HEADER
            if error is None and kind != OTHER:
                header, error = self._header(kind, data, key, column.name)
            self._append(number, key, f"{column.name}.{at}", kind, len(data), error, header)

    def _add_cell(self, number: int, key: str, field: str, column: Column, scalar: pa.Scalar) -> None:
        error: str | None = None
        header = NO_HEADER
        size = 0
        kind = column.kind
        try:
            data = column.content(scalar)
            path = column.path(scalar)
        except PathOnly as problem:
            error = str(problem)
        except UnicodeDecodeError as problem:
            error = f"contains a string that is not valid UTF-8: {problem.reason}"
        else:
            if data is None:
                if column.has_nulls and column.listed:  # the other items keep their numbers
                    self._append(number, key, field + NULL, TEXT, 0, None)
                return
            size = len(data)
            header = _NUMBER if column.form == "words" and size <= 2 and data not in (b"[]", b"{}") else NO_HEADER
            kind = column.kind_of(data, path)
            if kind != OTHER or column.is_json:
                error = self._limits.size_error(size, is_text=kind == TEXT or column.is_json)
            if error is None and kind not in (TEXT, OTHER):
                header, error = self._header(kind, data, key, field)
        self._append(number, key, field, kind, size, error, header)

    def _append(
        self, number: int, key: str, field: str, kind: int, size: int, error: str | None, header: Header = NO_HEADER
    ) -> None:
        self._table.append(
            number, key, field, kind=kind, offset=number, size=size, encoding=PARQUET, header=header, error=error
        )

    def _header(self, kind: int, data: bytes | memoryview, key: str, field: str) -> tuple[Header, str | None]:
        modality = BUILTINS[KINDS[kind]]
        try:
            header = read_header(modality, len(data), lambda count: bytes(data[:count]), self._limits)
        except DecodeError as problem:
            return NO_HEADER, problem.reason
        except MemoryError as problem:
            raise measured_at(problem, "", key, field) from problem
        return (*header, *NO_HEADER[len(header) :]), None


def _key(scalar: pa.Scalar) -> str | None:
    """Return a key as text, None for null; bytes that are not UTF-8 become escapes."""
    if not scalar.is_valid:
        return None
    type_ = scalar.type.value_type if isinstance(scalar, pa.DictionaryScalar) else scalar.type
    return bytes(text_bytes(scalar)).decode("utf-8", "backslashreplace") if is_text(type_) else str(scalar.as_py())


def _items(column: Column, scalar: pa.Scalar) -> Iterator[tuple[str, pa.Scalar]]:
    """Yield (field, scalar) of a cell: one, or one for each item of a list."""
    if not column.listed:
        yield column.field, scalar
    elif scalar.is_valid:
        for i, item in enumerate(scalar.values):
            yield f"{column.name}.{i}", item

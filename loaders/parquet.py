"""Parquet shards: one sample a row; images, audio, text and chats in columns; cells read by row number."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from orchdata.loaders.cells import Column, PathOnly, is_text, plan_columns, text_bytes
from orchdata.loaders.columns import FactsBuilder, FactsMeta, shard_failure, with_meta
from orchdata.loaders.errors import FieldError, ShardError
from orchdata.loaders.fields import OTHER, PARQUET
from orchdata.loaders.headers import HeaderError, MediaHeader, read_header
from orchdata.loaders.limits import Limits
from orchdata.loaders.modality import AUDIO, IMAGE
from orchdata.loaders.storage import Storage
from orchdata.loaders.tar import limits_fingerprint, size_error

SCAN_ROWS = 64
_STREAM_BYTES = 1 << 20
_RATIO_FREE_BYTES = 64 << 20
_FOOTER_BYTES = 1 << 16


class ColumnCache:
    """Decoded columns of row groups, least recently used out first; shared by all shards and threads of the process.

    Holds at most `max_bytes`, or the one column that is larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._columns: OrderedDict[tuple[int, int, str], tuple[pa.ChunkedArray, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int, str]) -> pa.ChunkedArray | None:
        with self._lock:
            found = self._columns.get(key)
            if found is None:
                return None
            self._columns.move_to_end(key)
            return found[0]

    def put(self, key: tuple[int, int, str], column: pa.ChunkedArray) -> None:
        size = column.get_total_buffer_size()
        with self._lock:
            self._drop(key)
            self._columns[key] = (column, size)
            self.held_bytes += size
            while self.held_bytes > self.max_bytes and len(self._columns) > 1:
                self._drop(next(iter(self._columns)))

    def forget(self, shard: int) -> None:
        with self._lock:
            for key in [key for key in self._columns if key[0] == shard]:
                self._drop(key)

    def _drop(self, key: tuple[int, int, str]) -> None:
        if (found := self._columns.pop(key, None)) is not None:
            self.held_bytes -= found[1]


COLUMNS = ColumnCache(512 << 20)
_numbers = itertools.count()


class ParquetShard:
    """A Parquet file. `read` and `read_many` are safe from many threads; decoding of one file is one at a time."""

    def __init__(self, url: str, file: Storage, *, limits: Limits) -> None:
        self.url = url
        self.size = file.size
        self.version = file.version
        self._file = file
        self._limits = limits
        self._number = next(_numbers)
        self._lock = threading.Lock()
        self._closed = False
        self._parquet: pq.ParquetFile | None = None
        self._columns: dict[str, Column] = {}
        self._starts = np.zeros(1, np.int64)  # first row of each row group, and the end

    def checksum(self) -> str:
        digest = hashlib.blake2b(str(self.size).encode(), digest_size=16)
        digest.update(self._file.read(max(0, self.size - _FOOTER_BYTES), _FOOTER_BYTES))
        return digest.hexdigest()

    def facts(self) -> pa.Table:
        """Read all cells of the columns with media or text, and their headers. Bad data are rows with an error."""
        ignored: dict[str, int] = {}
        try:
            if self.size == 0:
                raise _Refused("empty file")
            with self._lock:
                parquet = self._open()
                table, ignored = _Scan(parquet, self._limits).run()
        except _Refused as error:
            table = shard_failure(str(error))
        except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds for damaged files
            table = shard_failure(f"not a readable Parquet file: {_short(error)}")
        meta = FactsMeta(
            url=self.url,
            size=self.size,
            version=self.version,
            checksum=self.checksum(),
            limits=limits_fingerprint(self._limits),
            ignored=ignored,
        )
        return with_meta(table, meta)

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes:
        """The cell `field` of row `offset`; lists by item ("images.0"). Raises FieldError; ShardError for the file."""
        if self._closed:
            raise ValueError(f"{self.url}: read after close")
        try:
            data = self._cell(offset, field)
        except PathOnly as error:
            raise FieldError(field, str(error)) from error
        except (ShardError, FieldError):
            raise
        except Exception as error:
            raise FieldError(field, f"cannot be read: {_short(error)}") from error
        if data is None or len(data) != size:
            held = "nothing" if data is None else f"{len(data)} bytes"
            raise FieldError(field, f"row {offset} holds {held}, {size} bytes were indexed: index the shard again")
        return data

    def read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[bytes | memoryview]:
        """Cells (row, size, encoding, field) of one sample. Raises as `read` does."""
        return [self.read(*member) for member in members]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._parquet = None
            self._file.close()
        COLUMNS.forget(self._number)

    def _cell(self, row: int, field: str) -> bytes | None:
        with self._lock:
            try:
                parquet = self._open()
            except Exception as error:
                raise ShardError(self.url, f"not a readable Parquet file: {_short(error)}") from error
        name, item = field, -1
        if field not in self._columns or self._columns[field].listed:
            name, _, number = field.rpartition(".")
            item = int(number) if number.isdecimal() else -1
        column = self._columns.get(name)
        if column is None or not 0 <= row < self._starts[-1] or column.listed != (item >= 0):
            raise FieldError(field, f"the file has no such cell (row {row}): index the shard again")
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        scalar = self._decoded(parquet, group, name)[row - int(self._starts[group])]
        if column.listed:
            if not scalar.is_valid or item >= len(scalar.values):
                return None
            scalar = scalar.values[item]
        return column.cell(scalar)

    def _decoded(self, parquet: pq.ParquetFile, group: int, name: str) -> pa.ChunkedArray:
        key = (self._number, group, name)
        column = COLUMNS.get(key)
        if column is None:
            with self._lock:  # a second thread finds what the first decoded
                column = COLUMNS.get(key)
                if column is None:
                    column = parquet.read_row_group(group, columns=[name], use_threads=False).column(name)
                    COLUMNS.put(key, column)
        return column

    def _open(self) -> pq.ParquetFile:
        """The open file; the caller holds the lock."""
        if self._parquet is None:
            source = pa.PythonFile(cast(Any, _Stream(self._file)), mode="r")
            parquet = pq.ParquetFile(source, pre_buffer=False, buffer_size=_STREAM_BYTES)
            groups = range(parquet.metadata.num_row_groups)
            self._starts = np.cumsum([0, *(parquet.metadata.row_group(i).num_rows for i in groups)], dtype=np.int64)
            columns, _, _ = plan_columns(parquet.schema_arrow)
            self._columns = {column.name: column for column in columns}
            self._parquet = parquet
        return self._parquet


class _Refused(Exception):
    """The file is readable and yet no shard; the message is the reason."""


class _Scan:
    """One pass over a file: cells to rows of the facts."""

    def __init__(self, parquet: pq.ParquetFile, limits: Limits) -> None:
        self._parquet = parquet
        self._limits = limits
        self._builder = FactsBuilder()
        self._headers: list[MediaHeader] = []
        self._first_row: dict[str, int] = {}

    def run(self) -> tuple[pa.Table, dict[str, int]]:
        schema = self._parquet.schema_arrow
        rows = self._parquet.metadata.num_rows
        columns, ignored, key = plan_columns(schema)
        if rows == 0:
            raise _Refused("no samples: the file has no rows")
        if not columns:
            raise _Refused(f"no column holds images, audio or text (columns: {', '.join(schema.names)[:200]})")
        self._check_ratio()
        names = [column.name for column in columns] + ([key] if key is not None else [])
        number = 0
        for batch in self._parquet.iter_batches(batch_size=SCAN_ROWS, columns=names, use_threads=False):
            cells = [batch.column(column.name) for column in columns]
            keys = batch.column(key) if key is not None else None
            for i in range(batch.num_rows):
                named = _key(keys[i]) if keys is not None else None
                self._add_row(number, str(number) if named is None else named, columns, [cell[i] for cell in cells])
                number += 1
        headers = np.array([(h.width, h.height, h.frames, h.rate) for h in self._headers], np.int64).reshape(-1, 4)
        self._builder.append_media(*headers.T)
        return self._builder.table(), dict.fromkeys(ignored, rows)

    def _check_ratio(self) -> None:
        metadata = self._parquet.metadata
        for group in range(metadata.num_row_groups):
            for i in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(i)
                stored, decoded = chunk.total_compressed_size, chunk.total_uncompressed_size
                if decoded > max(_RATIO_FREE_BYTES, self._limits.decompression_ratio * stored):
                    raise _Refused(
                        f"row group {group}, column {chunk.path_in_schema!r} decompresses {stored} bytes to {decoded}, "
                        f"above Limits.decompression_ratio={self._limits.decompression_ratio:g}"
                    )

    def _add_row(self, number: int, key: str, columns: list[Column], scalars: list[pa.Scalar]) -> None:
        builder = self._builder
        first = len(builder)
        for column, scalar in zip(columns, scalars, strict=True):
            for field, item in _items(column, scalar):
                self._add_cell(number, key, field, column, item)
        if len(builder) == first:
            builder.append(number, key, "", offset=number, encoding=PARQUET)
            self._headers.append(MediaHeader())
        earlier = self._first_row.setdefault(key, first)
        if earlier != first:
            reason = f"key {key!r} is that of row {builder.sample[earlier]} and of row {number}"
            builder.fail_structure(earlier, reason)
            builder.fail_structure(first, reason)

    def _add_cell(self, number: int, key: str, field: str, column: Column, scalar: pa.Scalar) -> None:
        error: str | None = None
        header = MediaHeader()
        size = 0
        kind = column.kind
        try:
            data = column.cell(scalar)
            path = scalar["path"].as_py() if column.form == "struct" and scalar.is_valid and "path" in scalar else None
        except PathOnly as problem:
            error = str(problem)
        except UnicodeDecodeError as problem:
            error = f"holds a string that is not valid UTF-8: {problem.reason}"
        else:
            if data is None:
                return
            size = len(data)
            kind = column.kind_of(data, path)
            error = size_error(kind, size, self._limits) if kind != OTHER else None
            if error is None and kind in (IMAGE, AUDIO):
                try:
                    header = read_header(kind, size, lambda count: data[:count], self._limits)
                except HeaderError as problem:
                    error = str(problem)
        self._builder.append(number, key, field, kind=kind, offset=number, size=size, encoding=PARQUET, error=error)
        self._headers.append(header)


def _key(scalar: pa.Scalar) -> str | None:
    """A key as text, None for null; bytes that are not UTF-8 become escapes."""
    if not scalar.is_valid:
        return None
    type_ = scalar.type.value_type if isinstance(scalar, pa.DictionaryScalar) else scalar.type
    return text_bytes(scalar).decode("utf-8", "backslashreplace") if is_text(type_) else str(scalar.as_py())


def _items(column: Column, scalar: pa.Scalar) -> Iterator[tuple[str, pa.Scalar]]:
    """(field, scalar) of a cell: one, or one for each item of a list."""
    if not column.listed:
        yield column.name, scalar
    elif scalar.is_valid:
        for i, item in enumerate(scalar.values):
            yield f"{column.name}.{i}", item


class _Stream:
    """A storage as the seekable binary file that pyarrow wants."""

    def __init__(self, file: Storage) -> None:
        self._file = file
        self._position = 0
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._position, self._file.size - self._position if size < 0 else size)
        self._position += len(data)
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        self._position = position + (0, self._position, self._file.size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._file.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None: ...

    def close(self) -> None:
        """The storage is its owner's to close."""
        self.closed = True


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__

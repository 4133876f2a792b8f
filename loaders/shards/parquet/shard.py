"""Parquet shards: one sample per row; images, audio, text and chats in columns; cells are read by row number.

This process decodes no page before a child process has measured the file (see `children`): before reads, the size and
modification time, or the checksum of all bytes, are compared with those of the measured file.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from orchdata.loaders.errors import ShardError
from orchdata.loaders.failures import as_failure
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.fields import ALL_AS_NAMED, ColumnRules
from orchdata.loaders.shards.parquet.cells import column_of, is_json_field, is_text_field, locate_cell, read_cell
from orchdata.loaders.shards.parquet.children import measure
from orchdata.loaders.shards.parquet.file import ColumnValues, ParquetReader, read_columns
from orchdata.loaders.shards.shard import Facts, facts_of, shard_failure
from orchdata.loaders.storage.content_digest import ContentDigest
from orchdata.loaders.storage.storage import Storage


class DecodedColumn:
    """A decoded column of a row group, in pieces.

    Args:
        least_bytes: that it is known to take.
    """

    def __init__(self, pieces: Sequence[pa.Array], least_bytes: int = 0) -> None:
        self._pieces = pieces
        self._least_bytes = least_bytes
        self._starts = np.cumsum([0, *map(len, pieces)])

    def __getitem__(self, row: int) -> pa.Scalar:
        piece = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._pieces[piece][row - int(self._starts[piece])]

    def get_total_buffer_size(self) -> int:
        return max(self._least_bytes, int(pa.chunked_array(self._pieces).get_total_buffer_size()))


class ColumnCache:
    """Decoded columns of row groups, shared by all shards and threads of the process; drops the least recently used.

    Keeps at most `max_bytes`, or one column that is larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.cached_bytes = 0
        self._columns: OrderedDict[tuple[int, int, str], tuple[DecodedColumn, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int, str]) -> DecodedColumn | None:
        with self._lock:
            entry = self._columns.get(key)
            if entry is None:
                return None
            self._columns.move_to_end(key)
            return entry[0]

    def put(self, key: tuple[int, int, str], column: DecodedColumn) -> None:
        size = column.get_total_buffer_size()
        with self._lock:
            self._drop(key)
            self._columns[key] = (column, size)
            self.cached_bytes += size
            while self.cached_bytes > self.max_bytes and len(self._columns) > 1:
                self._drop(next(iter(self._columns)))

    def forget(self, shard: int) -> None:
        with self._lock:
            for key in [key for key in self._columns if key[0] == shard]:
                self._drop(key)

    def _drop(self, key: tuple[int, int, str]) -> None:
        if (entry := self._columns.pop(key, None)) is not None:
            self.cached_bytes -= entry[1]


COLUMNS = ColumnCache(512 << 20)
NUMBERS = itertools.count()


class ColumnShard:
    """A file of columns, read by cells. `read` and `read_many` are safe from many threads."""

    is_new = False
    packed = False
    reader: ClassVar[type[Any]]
    """Reads its descriptions: of a file, limits, rules."""

    def __init__(self, url: str, file: Storage, *, limits: Limits, rules: ColumnRules = ALL_AS_NAMED) -> None:
        self.url = url
        self.size = file.size
        self.version = file.version
        self._file = file
        self._limits = limits
        self._rules = rules
        self._number = next(NUMBERS)
        self._lock = threading.Lock()
        self._closed = False
        self._reader: Any = None

    def checksum(self) -> str:
        """Return the checksum of the whole content; computed once per process and version of the file."""
        key = (self.url, self.size, self.version)
        if key not in _checksums:
            _checksums[key] = ContentDigest(self._file).hexdigest()
        return _checksums[key]

    def facts(self) -> Facts:
        """Read all cells of the columns with media or text, in a child process. Bad data become rows with an error."""
        if self.size == 0:
            table = shard_failure("empty file")
            found: dict[str, Any] = {"checksum": self.checksum(), "lost_bytes": 1}
        else:
            table, found = measure(self._file, self._limits, self._rules, self.reader)
        self._file.check_unchanged()
        return facts_of(self, table, **found)

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes:
        """Read `field` ("images.0": an item of a list) of row `offset`. Raises FieldError; ShardError for the file."""
        if self._closed:
            raise ValueError(f"{self.url}: read after close")
        return read_cell(self._cell, self._file, offset, size, field)

    def read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[bytes | memoryview]:
        """Read cells (row, size, encoding, field) of one sample. Raises as `read` does."""
        return [self.read(*member) for member in members]

    def is_text(self, field: str, encoding: int) -> bool:
        """Return whether the column of a field has text, and not bytes."""
        return is_text_field(self._open().columns, field)

    def is_json(self, field: str, encoding: int) -> bool:
        """Return whether the cells of a field are JSON."""
        return is_json_field(self._open().columns, field)

    def columns(self, names: Sequence[str]) -> ColumnValues:
        """Read whole columns, which are measured first. Raises ShardError, and as `facts`."""
        rules = self._rules._replace(all=False, kept=(), only=tuple(names))
        with as_failure(partial(ShardError, self.url), f"not a readable {self.reader.kind}"):
            reader = self.reader(self._file, self._limits, rules)
            if not reader.columns:
                return ColumnValues([], {}, {})
            table, found = measure(self._file, self._limits, rules, self.reader)
            if found.get("lost_bytes"):
                raise ShardError(self.url, table.errors[0])
            columns = read_columns(reader, table)
            self._file.check_unchanged()
            return columns

    def expect(self, members: Sequence[tuple[int, int, int, str]]) -> None:
        """What of the file a cell takes is known when it is decoded."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._reader = None
            self._file.close()
        COLUMNS.forget(self._number)

    def _scalar(self, reader: Any, group: int, name: str, row: int) -> pa.Scalar:
        raise NotImplementedError

    def _cell(self, row: int, field: str) -> bytes | None:
        reader = self._open()
        column, item, group, group_row = locate_cell(reader.columns, reader.starts, row, field)
        return column.item(self._scalar(reader, group, column.name, group_row), item, self._limits)

    def _open(self) -> Any:
        with self._lock:
            if self._reader is None:
                with as_failure(partial(ShardError, self.url), f"not a readable {self.reader.kind}"):
                    self._reader = self.reader(self._file, self._limits, self._rules)
                    self._file.check_unchanged()
            return self._reader


class ParquetShard(ColumnShard):
    """A Parquet file; one thread at a time decodes it."""

    reader = ParquetReader

    def chunk_bytes(self, fields: Sequence[str]) -> list[tuple[int, int]]:
        """Return the rows of each row group, and the stored bytes of the column chunks of these fields in it.

        Raises ShardError.
        """
        reader: ParquetReader = self._open()
        found = [column_of(reader.columns, field) for field in fields]
        return reader.chunk_bytes(sorted({each[0].name for each in found if each is not None}))

    def _scalar(self, reader: ParquetReader, group: int, name: str, row: int) -> pa.Scalar:
        return self._decoded(reader, group, name)[row]

    def _decoded(self, reader: ParquetReader, group: int, name: str) -> DecodedColumn:
        key = (self._number, group, name)
        column = COLUMNS.get(key)
        if column is None:
            with self._lock:  # a second thread uses the column that the first one decoded
                column = COLUMNS.get(key)
                if column is None:
                    try:
                        column = DecodedColumn([batch.column(name) for batch in reader.batches(group, [name])])
                    finally:
                        self._file.check_unchanged()  # a change of the file can look like damage
                    COLUMNS.put(key, column)
        return column


_checksums: dict[tuple[str, int, str], str] = {}

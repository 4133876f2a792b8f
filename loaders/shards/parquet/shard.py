"""Parquet shards: one sample per row; images, audio, text and chats in columns; cells are read by row number.

This process decodes no page before a child process has measured the file (see `children`): before reads, the size and
modification time, or the checksum of all bytes, are compared with those of the measured file.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from orchdata.loaders.errors import NOT_DATA, FieldError, ShardError, as_failure, one_line, pass_trouble
from orchdata.loaders.field_names import EMPTY, NULL
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.fields import ALL_AS_NAMED, ColumnRules
from orchdata.loaders.shards.parquet.cells import PathOnly, column_of
from orchdata.loaders.shards.parquet.children import measure
from orchdata.loaders.shards.parquet.file import ParquetReader
from orchdata.loaders.shards.shard import Facts, Member, Recent, Shard, facts_of, shard_failure
from orchdata.loaders.storage.storage import ContentDigest, Storage


class ColumnValues(NamedTuple):
    """Columns of a file: keys of its rows (empty without columns), name -> values of all rows, and name -> names of the
    classes that a column has the numbers of.
    """

    keys: list[str]
    columns: Mapping[str, pa.ChunkedArray]
    labels: Mapping[str, tuple[str, ...]]


class DecodedColumn:
    """A decoded column of a row group, in pieces."""

    def __init__(self, pieces: Sequence[pa.Array]) -> None:
        self.num_bytes = int(pa.chunked_array(pieces).get_total_buffer_size())
        self._pieces = pieces
        self._starts = np.cumsum([0, *map(len, pieces)])

    def __getitem__(self, row: int) -> pa.Scalar:
        piece = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._pieces[piece][row - int(self._starts[piece])]


COLUMNS: Recent[DecodedColumn] = Recent(512 << 20, or_one=True)
"""Decoded columns, by number of the shard, row group and name; of all shards of the process."""
NUMBERS = itertools.count()


class ColumnShard(Shard):
    """A file of columns, read by cells. `read` and `read_many` are safe from many threads."""

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
        """Read `field` ("images.0": an item of a list) of row `offset`, and check that it has the size in the index.
        Raises FieldError if it cannot be read; ShardError if the file cannot be read at all; StaleIndexError if it
        changed.
        """
        if self._closed:
            raise ValueError(f"{self.url}: read after close")
        if not size and field.endswith((NULL, EMPTY)):
            return b""
        try:
            data = self._cell(offset, field)
            if data is None or len(data) != size:
                now = "nothing" if data is None else f"{len(data)} bytes"
                raise FieldError(field, f"row {offset} has {now}, {size} bytes were indexed: index the shard again")
            return data
        except NOT_DATA:
            raise
        except Exception as error:
            pass_trouble(error)
            self._file.check_unchanged()  # a change of the file can look like damage
            if isinstance(error, ShardError | FieldError):
                raise
            reason = str(error) if isinstance(error, PathOnly) else f"cannot be read: {one_line(error)}"
            raise FieldError(field, reason) from error

    def read_many(self, members: Sequence[Member]) -> list[bytes | memoryview]:
        """Read cells of one sample. Raises as `read` does."""
        return [self.read(*member) for member in members]

    def is_text(self, field: str) -> bool:
        """Return whether its column has text: strings, names of classes, or lists and structs as JSON."""
        found = column_of(self._open().columns, field)
        return found is not None and found[0].form not in ("binary", "struct", "turns")

    def is_json(self, field: str) -> bool:
        """Return whether the cells of a field are JSON of a list, struct, number or the like."""
        found = column_of(self._open().columns, field)
        return found is not None and found[0].is_json

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
            names = [column.name for column in reader.columns]
            pieces: dict[str, list[pa.Array]] = {name: [] for name in names}
            for group in range(len(reader.starts) - 1):
                for batch in reader.batches(group, names):
                    for name in names:
                        pieces[name].append(batch.column(name))
            self._file.check_unchanged()
        first = [row for row, sample in enumerate(table.sample) if not row or sample != table.sample[row - 1]]
        values = {name: pa.chunked_array(pieces[name], reader.schema.field(name).type) for name in names}
        labels = {column.name: column.labels for column in reader.columns if column.labels}
        return ColumnValues([table.key[row] for row in first], values, labels)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._reader = None
            self._file.close()
        COLUMNS.drop(lambda name: name[0] == self._number)

    def _scalar(self, reader: Any, group: int, name: str, row: int) -> pa.Scalar:
        raise NotImplementedError

    def _cell(self, row: int, field: str) -> bytes | None:
        reader = self._open()
        found = column_of(reader.columns, field)
        if found is None or not 0 <= row < reader.starts[-1]:
            raise FieldError(field, f"the file has no such cell (row {row}): index the shard again")
        column, item = found
        group = int(np.searchsorted(reader.starts, row, side="right")) - 1
        return column.item(
            self._scalar(reader, group, column.name, row - int(reader.starts[group])), item, self._limits
        )

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
        """Return the rows of each row group, and the stored bytes of the column chunks of these fields in it. Raises
        ShardError.
        """
        reader: ParquetReader = self._open()
        found = [column_of(reader.columns, field) for field in fields]
        return reader.chunk_bytes(sorted({each[0].name for each in found if each is not None}))

    def _scalar(self, reader: ParquetReader, group: int, name: str, row: int) -> pa.Scalar:
        def decoded() -> tuple[DecodedColumn, int]:
            with self._lock:
                try:
                    column = DecodedColumn([batch.column(name) for batch in reader.batches(group, [name])])
                finally:
                    self._file.check_unchanged()  # a change of the file can look like damage
            return column, column.num_bytes

        return COLUMNS.made((self._number, group, name), decoded)[row]


_checksums: dict[tuple[str, int, str], str] = {}

"""Parquet shards: one sample per row; images, audio, text and chats in columns; cells are read by row number.

    storage --> footer --check against file and limits--> row groups --batches--> columns --scan--> rows of the facts

Both measuring and reading use the same reader, so that a file is decoded the same way each time. An exception of the
storage during a call of pyarrow is raised unchanged, even if pyarrow hides or replaces it.

This process decodes no page before a child process has measured the file (see `children`): before reads, the size and
modification time, or the checksum of all bytes, are compared with those of the measured file.
"""

from __future__ import annotations

import itertools
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from orchdata.loaders.errors import NOT_DATA, FieldError, ShardError, as_failure, one_line, pass_trouble
from orchdata.loaders.field_names import EMPTY, NULL
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.cells import (
    PathOnly,
    Refused,
    column_of,
    field_clash,
    plan_columns,
    renamed,
)
from orchdata.loaders.shards.children import measure
from orchdata.loaders.shards.fields import ALL_AS_NAMED, ColumnRules, Met
from orchdata.loaders.shards.shard import (
    Facts,
    Member,
    Recent,
    Shard,
    facts_of,
    shard_failure,
)
from orchdata.loaders.storage.storage import Storage, StorageFile

_STREAM_BYTES = 1 << 20
_SCAN_ROWS = 64
_READ_ROWS = 1 << 16
_BATCH_BYTES = 64 << 20
_DICTIONARY_SLACK = 2
_FREE_ROWS = 1 << 16
_SIGNATURE_BYTES = 28
"""Of a plain footer of an encrypted file, after its content. Every call for a column would end the process."""
INDEX_BYTES_OF_A_ROW = 200
"""About the memory that a row takes while the index is built."""


class RowReader(ABC):
    """A file of columns whose description was read: its rows, in groups.

    Attributes:
        kind: what messages call such a file.
        columns: those with media or text; `ignored` names the others, `key` is the name of the key column.
        starts: first row of each row group, and the end, int64 (num_row_groups + 1,).
        promised_rows: number of rows in the whole file, as it says.
        met: `rows` of the columns with names of `rules`, as stored.
    """

    kind: ClassVar[str]

    def __init__(
        self, file: Storage, limits: Limits, rules: ColumnRules, stored: pa.Schema, counts: Sequence[int], rows: int
    ) -> None:
        self._limits = limits
        self._size = file.size
        self.schema = renamed(stored, rules)
        self._stored_names = {new: old for old, new in rules.names if old in stored.names}
        self.columns, self.ignored, self.key = plan_columns(self.schema, rules)
        ends = [0, *accumulate(counts)]  # in Python's integers: a footer can claim more rows than fit in an int64
        if ends[-1] > np.iinfo(np.int64).max:
            raise Refused(f"its groups of rows claim {ends[-1]} rows")
        self.starts = np.array(ends, np.int64)
        self.promised_rows = int(self.starts[-1])
        met = Met(rules.names)
        met.add(stored.names, rows)
        self.met = met.counts

    def check(self) -> None:
        """Check what the file says of itself against its size and the limits. Raises Refused."""
        rows, limits = self.promised_rows, self._limits
        if rows == 0:
            raise Refused("no samples: the file has no rows")
        if rows > limits.shard_rows:
            raise Refused(f"{rows} rows, above Limits.shard_rows={limits.shard_rows}")
        if (clash := field_clash(self.columns)) is not None:
            raise Refused(clash)

    @property
    def most_rows(self) -> float:
        """How many rows a file of its size may have."""
        return max(_FREE_ROWS, self._limits.decompression_ratio * self._size / INDEX_BYTES_OF_A_ROW)

    def plausible_rows(self) -> int:
        """Return the number of rows as the file says it; 0 if it is too small for them."""
        return self.promised_rows if 0 <= self.promised_rows <= self.most_rows else 0

    def nulls(self, name: str) -> int:
        """Return how many rows of a column are null, as far as the file states it; nothing is decoded."""
        is_null = any(field.name == name and pa.types.is_null(field.type) for field in self.schema)
        return self.promised_rows if is_null else 0

    @abstractmethod
    def batches(self, group: int, names: Sequence[str], *, scan: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a row group, in batches of bounded size: small ones for one pass over several columns
        (`scan`), otherwise as large as memory allows. Raises Refused: a column takes more memory than allowed, or is
        damaged.
        """


class ParquetReader(RowReader):
    """A Parquet file with a valid footer. Not safe from several threads."""

    kind = "Parquet file"

    def __init__(self, file: Storage, limits: Limits, rules: ColumnRules = ALL_AS_NAMED) -> None:
        """Read the footer. Raises the errors of the storage, and pyarrow's errors for a damaged file."""
        self._stream = _Stream(file)
        with self._stream.surfacing():
            source = pa.PythonFile(cast(Any, self._stream), mode="r")
            self._parquet = pq.ParquetFile(
                source, pre_buffer=False, buffer_size=_STREAM_BYTES, page_checksum_verification=True
            )
            self._footer_bytes = int.from_bytes(file.read(file.size - 8, 4), "little")
        metadata, stored = self._parquet.metadata, self._parquet.schema_arrow
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if min(counts, default=0) < 0:
            raise Refused(f"the footer counts {min(counts)} rows in a row group")
        super().__init__(file, limits, rules, stored, counts, max(1, metadata.num_rows))
        self._metadata = metadata
        self.promised_rows = metadata.num_rows
        self._leaves: dict[str, list[int]] = {}
        names, new_names = set(stored.names), dict(rules.names)
        for leaf in range(metadata.num_columns):
            # Names of columns may have dots: the longest beginning of the path that is one.
            parts = metadata.schema.column(leaf).path.split(".")
            paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
            name = next((path for path in paths if path in names), parts[0])
            name = new_names.get(name, name)
            self._leaves.setdefault(name, []).append(leaf)
            if (path := re.sub(r"\.list\.(element|item)", "[]", metadata.schema.column(leaf).path)) != name:
                self._leaves.setdefault(path, []).append(leaf)

    def check(self) -> None:
        """Check that the footer agrees with itself, the file's size and the limits. Raises Refused."""
        rows, group_rows = self.promised_rows, int(self.starts[-1])
        if rows != group_rows:
            raise Refused(f"the footer counts {rows} rows, its row groups {group_rows}")
        if self._footer_bytes - self._metadata.serialized_size == _SIGNATURE_BYTES:
            raise Refused(
                "it is encrypted, with a plain footer, and no keys are given to the library: decrypt it first"
            )
        super().check()
        self._check_density("rows", rows)
        groups = [self._metadata.row_group(group) for group in range(len(self.starts) - 1)]
        for number, group in enumerate(groups):
            for column in self.columns:
                chunks = [group.column(leaf) for leaf in self._leaves.get(column.name, ())]
                self._check_decoded(number, column.name, sum(max(0, each.total_uncompressed_size) for each in chunks))
        # Values are counted over all row groups: many small groups could each be below `_FREE_ROWS`.
        for leaf in (leaf for column in self.columns for leaf in self._leaves.get(column.name, ())):
            values = sum(max(0, group.column(leaf).num_values) for group in groups)
            self._check_density(f"values in column {self._metadata.schema.column(leaf).path!r}", values)

    def _check_density(self, what: str, count: int) -> None:
        ratio = self._limits.decompression_ratio
        if count > self.most_rows:
            raise Refused(
                f"{count} {what} in a file of {self._size} bytes, above Limits.decompression_ratio={ratio:g} "
                f"at {INDEX_BYTES_OF_A_ROW} bytes of memory each"
            )

    def _check_decoded(self, group: int, name: str, decoded: int) -> None:
        limits = self._limits
        if decoded > max(limits.column_bytes, limits.decompression_ratio * self._size):
            raise Refused(
                f"row group {group}, column {name!r} decompresses to {decoded} bytes or more in a file of "
                f"{self._size}, above Limits.column_bytes={limits.column_bytes} and "
                f"Limits.decompression_ratio={limits.decompression_ratio:g}: write smaller row groups, or raise one"
            )

    def nulls(self, name: str) -> int:
        if nulls := super().nulls(name):
            return nulls
        stated = []
        try:
            for leaf in self._leaves.get(name, ()):
                chunks = [self._metadata.row_group(at).column(leaf) for at in range(self._metadata.num_row_groups)]
                stats = [chunk.statistics for chunk in chunks]
                nulls = sum(each.null_count for each in stats if each is not None and each.has_null_count)
                # Values in lists are more than rows, or all of them are null.
                values = sum(chunk.num_values for chunk in chunks)
                stated.append(nulls if values == self.promised_rows else self.promised_rows if nulls == values else 0)
        except (pa.ArrowException, OSError, ValueError):  # metadata that cannot be read, of a column that is not
            return 0
        return min(max(0, min(stated, default=0)), self.promised_rows)

    def chunk_bytes(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Return the rows of each row group, and the stored bytes of the chunks of these columns in it."""
        leaves = [leaf for name in names for leaf in self._leaves.get(name, ())]
        return [
            (group.num_rows, sum(max(0, group.column(leaf).total_compressed_size) for leaf in leaves))
            for group in map(self._metadata.row_group, range(self._metadata.num_row_groups))
        ]

    def batches(self, group: int, names: Sequence[str], *, scan: bool = False) -> Iterator[pa.RecordBatch]:
        rows = int(self.starts[group + 1] - self.starts[group])
        if not rows:
            return
        decoded = dict.fromkeys(names, 0)
        seen = 0
        size = min(rows, self._batch_rows(group, names, _SCAN_ROWS if scan else _READ_ROWS))
        stored = [self._stored_names.get(name, name) for name in names]
        batches = self._parquet.iter_batches(size, row_groups=[group], columns=stored, use_threads=False)
        while True:
            with self._stream.surfacing():
                batch = next(batches, None)
            if batch is None:
                break
            if self._stored_names:
                batch = pa.RecordBatch.from_arrays([batch.column(name) for name in stored], names=list(names))
            seen += batch.num_rows
            for name in names:
                decoded[name] += _plain_bytes(batch.column(name))
                self._check_decoded(group, name, decoded[name])
            if seen > rows:
                break
            yield batch
        if seen != rows:
            raise Refused(f"the footer counts {rows} rows in row group {group}, its columns have {seen}")

    def _batch_rows(self, group: int, names: Sequence[str], most: int) -> int:
        """Return how many rows to decode together: about _BATCH_BYTES, even if all are the largest dictionary value."""
        rows = max(1, int(self.starts[group + 1] - self.starts[group]))
        of_a_row = 1.0
        for name in names:
            for leaf in self._leaves.get(name, ()):
                chunk = self._metadata.row_group(group).column(leaf)
                decoded, stored = max(0, chunk.total_uncompressed_size), max(1, chunk.total_compressed_size)
                of_a_row += decoded / rows
                if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
                    page = max(0, chunk.data_page_offset - chunk.dictionary_page_offset)
                    of_a_row += min(decoded, _DICTIONARY_SLACK * page * decoded / stored)
        return max(1, min(most, int(_BATCH_BYTES / of_a_row)))


def _plain_bytes(array: pa.Array) -> int:
    """Return the bytes of a batch of cells; of dictionary cells, the bytes after each is replaced by its value."""
    if not isinstance(array, pa.DictionaryArray):
        return int(array.nbytes)
    import pyarrow.compute as pc  # imported here: it takes as long as all other imports together

    try:
        lengths = pc.binary_length(array.dictionary)
    except pa.ArrowNotImplementedError:  # numbers, which are never read
        return int(array.indices.nbytes)
    return int(array.indices.nbytes) + (pc.sum(lengths.take(array.indices)).as_py() or 0)


class _Stream(StorageFile):
    """A file as pyarrow reads it."""

    before_start = "the footer points to byte {}"
    _error: BaseException | None = None

    @contextmanager
    def surfacing(self) -> Iterator[None]:
        """Around a call of pyarrow: raise the error of a failed read, even if pyarrow hid or replaced it."""
        try:
            yield
        finally:
            error, self._error = self._error, None
            if error is not None:
                raise error

    def read(self, size: int = -1) -> bytes:
        try:
            return super().read(size)
        except NOT_DATA as error:
            self._error = self._error or error
            raise


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
        super().__init__(url, file, limits)
        self._rules = rules
        self._number = next(NUMBERS)
        self._lock = threading.Lock()
        self._closed = False
        self._reader: Any = None

    def checksum(self) -> str:
        """Return the checksum of the whole content; computed once per process and version of the file."""
        key = (self.url, self.size, self.version)
        if key not in _checksums:
            _checksums[key] = super().checksum()
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
            super().close()
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

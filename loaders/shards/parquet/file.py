"""An open Parquet file: its checked footer, and its columns in batches of bounded size; one pass over such a file.

    storage --> footer --check against file and limits--> row groups --batches--> columns --scan--> rows of the facts

Both measuring and reading use this reader, so that a file is decoded the same way each time. An exception of the
storage during a call of pyarrow is raised unchanged, even if pyarrow hides or replaces it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from orchdata.loaders.errors import NOT_DATA, DecodeError, one_line, pass_trouble
from orchdata.loaders.field_names import NULL
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import OTHER, TEXT
from orchdata.loaders.modalities.modality import Header
from orchdata.loaders.shards.fields import ALL_AS_NAMED, PARQUET, ColumnRules, Met
from orchdata.loaders.shards.parquet.cells import (
    Column,
    PathOnly,
    field_clash,
    is_text,
    plan_columns,
    renamed,
    sniff,
    text_bytes,
)
from orchdata.loaders.shards.shard import NO_HEADER, FactsTable, Rows, header_of
from orchdata.loaders.storage.storage import Storage, StorageFile
from orchdata.loaders.text.conversation import WORDS_SUFFIX
from orchdata.loaders.watch import here

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


class Refused(Exception):
    """The file can be read, but cannot be used as a shard; the message is the reason."""


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


# A date or time outside of Python's range is an ArithmeticError.
_CELL_ERRORS = (pa.ArrowException, ArithmeticError, ValueError, TypeError, LookupError, RecursionError)
_NUMBER = (1, *NO_HEADER[1:])  # header of a number that is no longer than an empty list


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
        first = len(self.table)
        too_long = self.limits.name_error("key", key)
        if too_long is not None:
            self._append(number, shortened(key), "", error=too_long)
            return
        key = self.distinct(key, number) if is_id else key
        for column, scalar in zip(columns, scalars, strict=True):
            try:
                self._add_cells(number, key, column, scalar)
            except NOT_DATA:
                raise
            except _CELL_ERRORS as error:  # the other cells may be readable
                pass_trouble(error)
                self._append(number, key, column.name, column.kind, error=f"cannot be read: {one_line(error)}")
        if len(self.table) == first:
            self._append(number, key, "")
        reason = "rows {} and {} both have the key {!r}: give each row a different __key__, or drop that column, "
        self.end_sample(key, first, reason + "so that rows are named by id or number")

    def _add_cells(self, number: int, key: str, column: Column, scalar: pa.Scalar) -> None:
        excess = column.excess(scalar, self.limits)
        if excess is not None:
            self._append(number, key, column.name, column.kind, error=excess)
            return
        missing = column.missing(scalar)
        if missing is not None:
            self._append(number, key, missing, TEXT)
            return
        if not column.listed:
            self._add_cell(number, key, column.field, column, scalar)
        elif scalar.is_valid:
            for i, item in enumerate(scalar.values):
                self._add_cell(number, key, f"{column.name}.{i}", column, item)
        for at, data in enumerate(column.media(scalar)):
            error = self.limits.size_error(len(data), is_text=False)
            self._add_content(number, key, f"{column.name}.{at}", sniff(data), data, error)

    def _add_cell(self, number: int, key: str, field: str, column: Column, scalar: pa.Scalar) -> None:
        error: str | None
        try:
            data = column.content(scalar)
            path = column.path(scalar)
        except (PathOnly, UnicodeDecodeError) as problem:
            error = str(problem)
            if isinstance(problem, UnicodeDecodeError):
                error = f"contains a string that is not valid UTF-8: {problem.reason}"
            self._append(number, key, field, column.kind, error=error)
            return
        if data is None:
            if column.has_nulls and column.listed:  # the other items keep their numbers
                self._append(number, key, field + NULL, TEXT)
            return
        kind, is_json = column.kind_of(data, path), column.is_json
        is_read = kind != OTHER or is_json
        error = self.limits.size_error(len(data), is_text=kind == TEXT or is_json) if is_read else None
        is_number = column.form == "words" and len(data) <= 2 and data not in (b"[]", b"{}")
        self._add_content(number, key, field, kind, data, error, _NUMBER if is_number else NO_HEADER)

    def _add_content(
        self,
        number: int,
        key: str,
        field: str,
        kind: int,
        data: bytes | memoryview,
        error: str | None,
        header: Header = NO_HEADER,
    ) -> None:
        if error is None and kind not in (TEXT, OTHER):
            try:
                header = header_of(kind, len(data), lambda count: bytes(data[:count]), self.limits)
            except DecodeError as problem:
                header, error = NO_HEADER, problem.reason
            except MemoryError as problem:
                raise measured_at(problem, "", key, field) from problem
        self._append(number, key, field, kind, len(data), error, header)

    def _append(
        self,
        number: int,
        key: str,
        field: str,
        kind: int = OTHER,
        size: int = 0,
        error: str | None = None,
        header: Header = NO_HEADER,
    ) -> None:
        self.table.append(
            number, key, field, kind=kind, offset=number, size=size, encoding=PARQUET, header=header, error=error
        )


def _key(scalar: pa.Scalar) -> str | None:
    """Return a key as text, None for null; bytes that are not UTF-8 become escapes."""
    if not scalar.is_valid:
        return None
    type_ = scalar.type.value_type if isinstance(scalar, pa.DictionaryScalar) else scalar.type
    return bytes(text_bytes(scalar)).decode("utf-8", "backslashreplace") if is_text(type_) else str(scalar.as_py())

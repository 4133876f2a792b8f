"""Arrow shards, as Hugging Face's `datasets` saves them on disk: one sample per row, read by row number.

Columns are used as in Parquet files; reading a row reads only its own bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

import numpy as np
import pyarrow as pa

from orchdata.loaders.errors import one_line
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.arrow.layout import read_layout
from orchdata.loaders.shards.arrow.rows import NEVER, Columns, TooLarge, reading_of
from orchdata.loaders.shards.fields import ALL_AS_NAMED, ColumnRules, Met
from orchdata.loaders.shards.parquet.cells import (
    field_clash,
    plan_columns,
    renamed,
)
from orchdata.loaders.shards.parquet.file import Refused, most_rows, running_sums
from orchdata.loaders.shards.parquet.shard import COLUMNS, ColumnShard, DecodedColumn
from orchdata.loaders.storage.storage import Storage

_SCAN_ROWS: Final = 16


class ArrowReader:
    """An Arrow file whose descriptions were read. Safe from many threads.

    Attributes:
        schema, columns, ignored, key, starts, promised_rows, met: as of a ParquetReader; a batch is a row group.
    """

    kind: ClassVar = "Arrow stream"

    def __init__(self, file: Storage, limits: Limits, rules: ColumnRules = ALL_AS_NAMED) -> None:
        """Read its layout. Raises Refused, or pyarrow's own errors."""
        self._limits = limits
        self._file = file
        self._layout = read_layout(file)
        self._values = Columns(file, self._layout, limits.column_bytes)
        stored = self._layout.schema
        self.schema = renamed(stored, rules)
        met = Met(rules.names)
        met.add(stored.names)
        self.met = met.counts
        self._stored_names = {new: old for old, new in rules.names if old in stored.names}
        self.columns, self.ignored, self.key = plan_columns(self.schema, rules)
        if (clash := field_clash(self.columns)) is not None:
            raise Refused(clash)
        self._check_types()
        counts = Counter(self.schema.names)
        for name in (*(column.name for column in self.columns), *(() if self.key is None else (self.key,))):
            if counts[name] > 1:
                raise Refused(f"two columns are called {name!r}: give each a different name")
        self.starts = np.array([0, *running_sums([batch.num_rows for batch in self._layout.batches])], np.int64)
        self.promised_rows = int(self.starts[-1])

    def _check_types(self) -> None:
        """Ignore columns of types that are not read, if only a function of the user's wants them, or raise Refused."""
        types = dict(zip(self.schema.names, self.schema.types, strict=True))
        for column in [each for each in self.columns if reading_of(types[each.name]) == NEVER]:
            if column.form != "words" or not column.has_nulls:
                raise Refused(
                    f"column {column.name!r} is {str(types[column.name])[:100]}, which is not supported: write it as "
                    "plain strings, bytes and lists, or leave it out"
                )
            self.columns.remove(column)
            self.ignored.append(column.name)

    def check(self) -> None:
        """Raise Refused if there are too many rows, or none."""
        limits, rows = self._limits, self.promised_rows
        if rows == 0:
            raise Refused("no samples: the file has no rows")
        if rows > limits.shard_rows:
            raise Refused(f"{rows} rows, above Limits.shard_rows={limits.shard_rows}")
        if not self.plausible_rows():
            raise Refused(f"{rows} rows in a file of {self._file.size} bytes, above Limits.decompression_ratio")

    def plausible_rows(self) -> int:
        return self.promised_rows if self.promised_rows <= most_rows(self._limits, self._file.size) else 0

    def nulls(self, name: str) -> int:
        """Return how many rows of a column are null by its type; a file has no statistics."""
        is_null = any(field.name == name and pa.types.is_null(field.type) for field in self.schema)
        return self.promised_rows if is_null else 0

    def batches(self, group: int, names: Sequence[str], *, scan: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a batch, a few at a time. Raises Refused if its offsets point outside of it."""
        rows, stored = self._layout.batches[group].num_rows, [self._stored(name) for name in names]
        whole = self._values.whole(group, stored) if rows and self._values.is_whole(group, stored) else None
        start, most = 0, _SCAN_ROWS
        while start < rows:
            length = min(most, rows - start)
            try:
                if whole is not None:
                    arrays = [array.slice(start, length) for array in whole]
                else:
                    arrays = [self._values.take(group, name, start, length) for name in stored]
            except (ValueError, pa.ArrowException) as error:
                if isinstance(error, TooLarge) and length > 1:
                    most = length // 2
                    continue
                raise Refused(f"batch {group}, rows {start} to {start + length}: {one_line(error)}") from None
            yield pa.RecordBatch.from_arrays(arrays, names=list(names))
            start += length
            most = min(_SCAN_ROWS, 2 * most)

    def cell(self, shard: int, group: int, name: str, row: int) -> pa.Scalar:
        """Read one cell of a batch; a column that is read whole is kept, under the number of the shard."""
        stored = self._stored(name)
        if not self._values.is_whole(group, [stored]):
            return self._values.take(group, stored, row, 1)[0]
        column = COLUMNS.get((shard, group, name))
        if column is None:
            batch = self._layout.batches[group]
            column = DecodedColumn(self._values.whole(group, [stored]), batch.stop - batch.offset)
            COLUMNS.put((shard, group, name), column)
        return column[row]

    def _stored(self, name: str) -> str:
        return self._stored_names.get(name, name)


class ArrowShard(ColumnShard):
    """A file of an Arrow stream."""

    reader = ArrowReader

    def _scalar(self, reader: ArrowReader, group: int, name: str, row: int) -> pa.Scalar:
        cell = reader.cell(self._number, group, name, row)
        self._file.check_unchanged()
        return cell

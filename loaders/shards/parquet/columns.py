"""Whole columns of a Parquet or Arrow file, with the keys of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import pyarrow as pa

from orchdata.loaders.shards.facts_table import FactsTable
from orchdata.loaders.shards.parquet.cells import Columns


class RowReader(Protocol):
    """A reader of rows in groups: a ParquetReader, or one of another format.

    Attributes:
        kind: what messages call such a file.
    """

    kind: ClassVar[str]
    schema: pa.Schema
    columns: Columns
    ignored: list[str]
    key: str | None
    starts: Any
    promised_rows: int
    met: dict[str, int]

    def check(self) -> None: ...
    def plausible_rows(self) -> int: ...
    def batches(self, group: int, names: Sequence[str], *, scan: bool = False) -> Iterator[pa.RecordBatch]: ...
    def nulls(self, name: str) -> int: ...


class ColumnValues(NamedTuple):
    """Columns of a file.

    Attributes:
        keys: of its rows; empty if it has none of the columns.
        columns: name -> the values of all rows.
        labels: name -> names of the classes that a column has the numbers of.
    """

    keys: list[str]
    columns: Mapping[str, pa.ChunkedArray]
    labels: Mapping[str, tuple[str, ...]]


def read_columns(reader: RowReader, table: FactsTable) -> ColumnValues:
    """Read all columns of a reader.

    Args:
        table: the facts of the same reader, which have the keys.
    """
    names = [column.name for column in reader.columns]
    pieces: dict[str, list[pa.Array]] = {name: [] for name in names}
    for group in range(len(reader.starts) - 1):
        for batch in reader.batches(group, names):
            for name in names:
                pieces[name].append(batch.column(name))
    first = [row for row, sample in enumerate(table.sample) if not row or sample != table.sample[row - 1]]
    columns = {name: pa.chunked_array(pieces[name], reader.schema.field(name).type) for name in names}
    labels = {column.name: column.labels for column in reader.columns if column.labels}
    return ColumnValues([table.key[row] for row in first], columns, labels)

"""Names of media in columns of lists and structs that no rule reads: counted, so that a loader can warn of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, Protocol

import pyarrow as pa

from orchdata.loaders.errors import NOT_DATA, pass_trouble
from orchdata.loaders.limits import Limits
from orchdata.loaders.media_names import MediaNames, UnreadNames, modality_of_member, names_in
from orchdata.loaders.modalities.builtin import OTHER
from orchdata.loaders.shards.facts_table import FactsTable
from orchdata.loaders.shards.parquet.cells import Column, Columns, is_text
from orchdata.loaders.shards.parquet.file import Refused
from orchdata.loaders.text.words import WORDS_SUFFIX

_FIRST_ROWS: Final = 64
_CHUNK_BYTES: Final = 64 << 20
"""A column with more bytes in a row group is left: reading it takes memory that no sample needs."""
_ERRORS: Final = (Refused, pa.ArrowException, ArithmeticError, ValueError, TypeError, LookupError, RecursionError)


class RowReader(Protocol):
    """A reader of rows in groups: a ParquetReader, or one of another format."""

    schema: pa.Schema
    columns: Columns
    ignored: list[str]
    key: str | None
    starts: Any
    promised_rows: int

    def check(self) -> None: ...
    def chunk_bytes(self, names: Sequence[str]) -> list[tuple[int, int]]: ...
    def batches(self, group: int, names: Sequence[str], *, scan: bool = False) -> Iterator[pa.RecordBatch]: ...


def count_unread(reader: RowReader, table: FactsTable, limits: Limits, unread: UnreadNames) -> None:
    """Add the names in lists and structs that are not read. Columns without a name in the first rows are not read on.

    What cannot be decoded is left: no sample needs it.

    Args:
        table: the facts of all rows.
    """
    counts = Counter(reader.schema.names)
    ignored = [name.removesuffix(WORDS_SUFFIX) for name in reader.ignored]
    names = [name for name in ignored if counts[name] == 1 and _has_strings(reader.schema.field(name).type)]
    names = [name for name in names if max((size for _, size in reader.chunk_bytes([name])), default=0) <= _CHUNK_BYTES]
    try:
        names = [name for name in names if any(islice(_names_by_row(reader, [name], limits), _FIRST_ROWS))]
        if not names:
            return
        has: dict[int, set[str | None]] = defaultdict(set)
        for sample, field, kind in zip(table.sample, table.field, table.kind, strict=True):
            has[sample].add(modality_of_member(field, kind))
        for row, found in enumerate(_names_by_row(reader, names, limits)):
            unread.add(found, has[row])
    except NOT_DATA:
        raise
    except _ERRORS as error:
        pass_trouble(error)


def _names_by_row(reader: RowReader, names: Sequence[str], limits: Limits) -> Iterator[MediaNames]:
    """Yield the names of media in these columns of each row."""
    columns = [Column(name, "words", False, OTHER) for name in names]
    for group in range(len(reader.starts) - 1):
        for batch in reader.batches(group, names, scan=True):
            cells = [batch.column(name) for name in names]
            for at in range(batch.num_rows):
                row_cells = zip(columns, (each[at] for each in cells), strict=True)
                sound = [(column, cell) for column, cell in row_cells if column.excess(cell, limits) is None]
                yield names_in({column.name: cell.as_py() for column, cell in sound})


def _has_strings(type_: pa.DataType) -> bool:
    """Return whether values are lists or structs that contain strings at some depth."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return is_text(type_.value_type) or _has_strings(type_.value_type)
    if not pa.types.is_struct(type_):
        return False
    return any(is_text(field.type) or _has_strings(field.type) for field in type_)

"""The facts table: one row per member of a shard, in shard order. Filled by the readers, read by the index.

Columns: `sample` (ordinal in the shard), `key`, `field`, `kind` (modality code, 255 for what is ignored), `offset` and
`size` of the content (Parquet: row number, bytes), `encoding`, `width`, `height`, `frames`, `rate`, `error`.

An error on a row of kind 255 is structural (a field given twice, a key that comes back, damage to the archive): it
makes the sample bad whatever a recipe asks for. An error on a row of another kind concerns that field alone.
A shard that cannot be read at all has one row: sample 0, key and field "", kind 255, and the reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.fields import OTHER, RAW
from orchdata.loaders.versions import RULES

SCHEMA = pa.schema(
    [
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("field", pa.string(), nullable=False),
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("encoding", pa.uint8(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("frames", pa.int64(), nullable=False),
        pa.field("rate", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
    ]
)
_NUMBERS = {field.name: field.type.to_pandas_dtype() for field in SCHEMA if field.type != pa.string()}
_NOTHING = np.zeros(0, np.int64)
_ROW_COLUMNS = ("sample", "key", "field", "kind", "offset", "size", "encoding")
_META_KEY = b"orchdata"


@dataclass(frozen=True, kw_only=True, slots=True)
class FactsMeta:
    """What the facts of a shard belong to; kept in the schema of the table.

    Attributes:
        url: as given by the user.
        size: bytes of the shard as stored (compressed, where it is).
        version: of its content, as `Storage.version`.
        checksum: of its size and its headers, hex.
        ignored: how many members of each ignored field.
        lost_samples: that damage hides, beside those that have a row, where the shard tells how many it had.
        lost_bytes: of the shard as stored, behind damage: what they held is not known.
        limits: fingerprint of the limits that were held.
        rules: RULES that it was scanned under.
    """

    url: str
    size: int
    version: str
    checksum: str
    limits: str
    ignored: Mapping[str, int] = field(default_factory=dict)
    lost_samples: int = 0
    lost_bytes: int = 0
    rules: int = RULES

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe; the same as arguments make the same again."""
        return {name: getattr(self, name) for name in FactsMeta.__slots__}

    @staticmethod
    def of(schema: pa.Schema) -> FactsMeta:
        """Raises KeyError, ValueError or TypeError where the schema holds none."""
        return FactsMeta(**json.loads(schema.metadata[_META_KEY]))


class FactsBuilder:
    """Rows of a facts table, as columns that grow."""

    def __init__(self) -> None:
        self.sample: list[int] = []
        self.key: list[str] = []
        self.field: list[str] = []
        self.kind: list[int] = []
        self.offset: list[int] = []
        self.size: list[int] = []
        self.encoding: list[int] = []
        self.media: dict[str, list[NDArray[np.int64]]] = {name: [] for name in ("width", "height", "frames", "rate")}
        self.errors: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.sample)

    def append(
        self,
        sample: int,
        key: str,
        field: str,
        *,
        kind: int = OTHER,
        offset: int = 0,
        size: int = 0,
        encoding: int = RAW,
        error: str | None = None,
    ) -> None:
        """One row; its media columns come with `append_media`."""
        if error is not None:
            self.errors[len(self.sample)] = error
        self.sample.append(sample)
        self.key.append(key)
        self.field.append(field)
        self.kind.append(kind)
        self.offset.append(offset)
        self.size.append(size)
        self.encoding.append(encoding)

    def extend(self, rows: Sequence[tuple[int, str, str, int, int, int, int]]) -> None:
        """Rows of (sample, key, field, kind, offset, size, encoding)."""
        for name, values in zip(
            _ROW_COLUMNS, zip(*rows, strict=True), strict=False
        ):  # without rows there is nothing to zip
            getattr(self, name).extend(values)

    def append_media(
        self,
        width: NDArray[np.int64],
        height: NDArray[np.int64],
        frames: NDArray[np.int64],
        rate: NDArray[np.int64],
    ) -> None:
        """Media columns of the rows appended since the last call: int64 (num_rows,) each."""
        for name, column in zip(("width", "height", "frames", "rate"), (width, height, frames, rate), strict=True):
            self.media[name].append(column)

    def fail_structure(self, row: int, reason: str) -> None:
        """Make the sample of `row` bad whatever a recipe asks for; the first reason stays."""
        self.kind[row] = OTHER
        self.errors.setdefault(row, reason)

    def table(self) -> pa.Table:
        """All rows. Media columns that were never given (rows at the end) are 0."""
        rows = len(self)
        columns: list[Any] = []
        for name, dtype in _NUMBERS.items():
            if name in self.media:
                pieces = self.media[name]
                values = (pieces[0] if len(pieces) == 1 else np.concatenate([_NOTHING, *pieces])).astype(dtype)
                columns.append(values if values.size == rows else np.pad(values, (0, rows - values.size)))
            else:
                columns.append(np.array(getattr(self, name), dtype))
        columns = [pa.array(values) for values in columns]
        columns[1:1] = [pa.array(self.key, pa.string()), pa.array(self.field, pa.string())]
        if self.errors:
            columns.append(pa.array([self.errors.get(row) for row in range(rows)], pa.string()))
        else:
            columns.append(pa.nulls(rows, pa.string()))
        return pa.Table.from_arrays(columns, schema=SCHEMA)


def shard_failure(reason: str) -> pa.Table:
    """The facts of a shard that cannot be read at all."""
    builder = FactsBuilder()
    builder.append(0, "", "", error=reason)
    return builder.table()


def all_failed(facts: pa.Table, reason: str) -> pa.Table:
    """The facts with every sample bad for the same reason."""
    rows = len(facts)
    for name, value in (("kind", OTHER), ("error", reason)):
        number = SCHEMA.get_field_index(name)
        facts = facts.set_column(number, SCHEMA.field(name), pa.repeat(pa.scalar(value, SCHEMA.field(name).type), rows))
    return facts


def with_meta(table: pa.Table, meta: FactsMeta) -> pa.Table:
    """The table with `meta` in its schema."""
    return table.replace_schema_metadata({_META_KEY: json.dumps(meta.as_dict(), sort_keys=True).encode()})


def count_ignored(table: pa.Table) -> dict[str, int]:
    """How many rows without error each ignored field has."""
    other = table["kind"].to_numpy() == OTHER
    if not other.any():
        return {}
    rows = np.flatnonzero(other & table["error"].is_null().to_numpy())
    counts = Counter(name for name in table["field"].take(rows).to_pylist() if name)
    return dict(sorted(counts.items()))

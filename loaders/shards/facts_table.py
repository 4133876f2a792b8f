"""The facts table: one row per member of a shard, in shard order. Filled by the readers, read by the index.

Columns: `sample` (ordinal in the shard), `key`, `field`, `kind` (a code of `modalities.builtin.KINDS`, 255 for what is
none), `offset` and `size` of the content (Parquet: row number, bytes), `encoding`, `header0` and `header1` (what the
kind's probe says; 0 where it has none), `error`.

An error on a row of kind 255 is structural (a field given twice, a key that comes back, damage to the archive): it
makes the sample bad whatever a recipe asks for. An error on a row of another kind concerns that field alone.
A shard that cannot be read at all has one row: sample 0, key and field "", kind 255, and the reason.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.modalities.builtin import KINDS, NUM_FACTS, OTHER
from orchdata.loaders.modalities.modality import Header
from orchdata.loaders.shards.fields import NAMED, RAW
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
        *(pa.field(f"header{i}", pa.int64(), nullable=False) for i in range(NUM_FACTS)),
        pa.field("error", pa.string()),
    ]
)
_STRINGS = ("key", "field")
_NUMBERS = tuple(field.name for field in SCHEMA if field.name not in (*_STRINGS, "error"))
_ROW = ("sample", "key", "field", "kind", "offset", "size", "encoding")
HEADERS = tuple(f"header{i}" for i in range(NUM_FACTS))
NO_HEADER: Header = (0,) * NUM_FACTS


@dataclass(frozen=True, kw_only=True, slots=True)
class FactsMeta:
    """What the facts of a shard belong to.

    Attributes:
        url: as given by the user.
        size: bytes of the shard as stored (compressed, where it is).
        version: of its content, as `Storage.version`.
        checksum: of its size and its headers, hex.
        ignored: how many members of each ignored field.
        lost_samples: that damage hides, beside those that have a row, where the shard tells how many it had.
        lost_bytes: of the shard as stored, behind damage: what they held is not known.
        media: state of other files that its records name, as `JsonLinesShard.media_state`; empty without any.
        limits: fingerprint of the limits that were held.
        rules: RULES that it was scanned under.
    """

    url: str
    size: int
    version: str
    checksum: str
    limits: str
    ignored: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lost_samples: int = 0
    lost_bytes: int = 0
    media: str = ""
    rules: int = RULES

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe; the same as arguments make the same again."""
        return {name: getattr(self, name) for name in FactsMeta.__slots__}


@dataclass(slots=True)
class FactsTable:
    """Rows of facts, as one list a column: plain Python, since most shards of a large data set may be tiny.

    Attributes:
        sample, key, ... header1: as in SCHEMA, all of one length.
        errors: row -> what is wrong with it.
    """

    sample: list[int] = dataclasses.field(default_factory=list)
    key: list[str] = dataclasses.field(default_factory=list)
    field: list[str] = dataclasses.field(default_factory=list)
    kind: list[int] = dataclasses.field(default_factory=list)
    offset: list[int] = dataclasses.field(default_factory=list)
    size: list[int] = dataclasses.field(default_factory=list)
    encoding: list[int] = dataclasses.field(default_factory=list)
    header0: list[int] = dataclasses.field(default_factory=list)
    header1: list[int] = dataclasses.field(default_factory=list)
    errors: dict[int, str] = dataclasses.field(default_factory=dict)

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
        header: Header = NO_HEADER,
        error: str | None = None,
    ) -> None:
        """One row."""
        if error is not None:
            self.errors[len(self.sample)] = error
        for name, value in zip(_ROW, (sample, key, field, kind, offset, size, encoding), strict=True):
            getattr(self, name).append(value)
        for name, value in zip(HEADERS, header, strict=True):
            getattr(self, name).append(value)

    def extend(self, rows: Sequence[tuple[int, str, str, int, int, int, int]]) -> None:
        """Rows of (sample, key, field, kind, offset, size, encoding); `extend_headers` has to follow."""
        if rows:
            for name, values in zip(_ROW, zip(*rows, strict=True), strict=True):
                getattr(self, name).extend(values)

    def extend_headers(self, headers: NDArray[np.int64]) -> None:
        """Of the rows added since the last call, int64 (n, NUM_FACTS)."""
        for name, values in zip(HEADERS, headers.T.tolist(), strict=True):
            getattr(self, name).extend(values)

    def fail_structure(self, row: int, reason: str) -> None:
        """Make the sample of `row` bad whatever a recipe asks for; the first reason stays."""
        self.kind[row] = OTHER
        self.errors.setdefault(row, reason)

    def all_failed(self, reason: str) -> FactsTable:
        """The same rows, every sample bad for the same reason."""
        rows = range(len(self))
        return replace(self, kind=[OTHER for _ in rows], errors=dict.fromkeys(rows, reason))

    def ignored(self) -> dict[str, int]:
        """How many rows without error each ignored field has."""
        if OTHER not in self.kind:
            return {}
        errors = self.errors
        other = [row for row, kind in enumerate(self.kind) if kind == OTHER and row not in errors]
        counts = Counter(name for row in other if (name := self.field[row]))
        return dict(sorted(counts.items()))

    def arrow(self) -> pa.Table:
        """As a table of SCHEMA."""
        columns = [pa.array(getattr(self, field.name), field.type) for field in list(SCHEMA)[:-1]]
        errors = pa.array([self.errors.get(row) for row in range(len(self))], SCHEMA.field("error").type)
        return pa.Table.from_arrays([*columns, errors], schema=SCHEMA)

    def check(self) -> None:
        """Raise ValueError for what no reader finds: it may come from a file that somebody else wrote."""
        samples, kinds, encodings = self.sample, set(self.kind), set(self.encoding)
        if samples and (samples[0] < 0 or any(map(int.__gt__, samples, samples[1:]))):
            raise ValueError("samples are not in order")
        if not kinds <= {*range(len(KINDS)), OTHER} or not encodings <= set(range(RAW, NAMED + 1)):
            raise ValueError(f"members are of kinds {sorted(kinds)} and encodings {sorted(encodings)}")
        if samples and (min(self.offset) < 0 or min(self.size) < 0):
            raise ValueError(f"a member lies at {min(self.offset)}, or has {min(self.size)} bytes")

    @staticmethod
    def of_arrow(table: pa.Table) -> FactsTable:
        """The rows of a table of SCHEMA."""
        columns = {name: table.column(name).to_numpy().tolist() for name in _NUMBERS}
        columns |= {name: table.column(name).to_pylist() for name in _STRINGS}
        errors: dict[int, str] = {}
        if table.column("error").null_count < len(table):
            errors = {row: reason for row, reason in enumerate(table.column("error").to_pylist()) if reason is not None}
        return FactsTable(**columns, errors=errors)


class Facts(NamedTuple):
    """The facts of a shard, and what they belong to."""

    table: FactsTable
    meta: FactsMeta


def shard_failure(reason: str) -> FactsTable:
    """The facts of a shard that cannot be read at all."""
    table = FactsTable()
    table.append(0, "", "", error=reason)
    return table

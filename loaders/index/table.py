"""The columns of an index on disk: the body of a sealed file, with a layout that follows from nine numbers.

    columns of a row --offsets--> its parts, its members, its key (flat columns over all rows)

A row is a sample, or one piece of a split sample; pieces follow each other.

The body does not contain positions of its columns, so no value can make a reader leave it; offsets into other columns
are checked when they are used. `views` makes arrays of a body in memory or mapped; `TableWriter` writes one of any
size, table by table, in bounded memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.storage.atomic import Buffer, write_at

PARTS: Final[dict[str, Any]] = {
    "modality": np.uint8,
    "member": np.int32,
    "positions": np.int32,
    "tokens": np.int32,
    "rows": np.int32,
    "extent": np.int32,
}
MEMBERS: Final[dict[str, Any]] = {
    "field": np.int32,
    "kind": np.uint8,
    "encoding": np.uint8,
    "offset": np.int64,
    "size": np.int64,
    "header": np.int64,
}
WIDTHS: Final = {"part_extent": "extent_width", "member_header": "header_width"}
"""Columns of fixed-width lists, each the last of its kind, and the field of TableSize with their width."""

STRINGS: Final = {"key": "rows", "error_field": "bad", "error_reason": "bad"}
"""String columns, stored as offsets and bytes, and the field of TableSize with their number of strings."""

# Column -> its dtype, the field of TableSize with its length, and the number of additional values.
LAYOUT: Final[dict[str, tuple[Any, str, int]]] = {
    "shard": (np.int32, "rows", 0),
    "llm_tokens": (np.int32, "rows", 0),
    "loss_tokens": (np.int32, "rows", 0),
    "piece": (np.int32, "rows", 0),
    "cut_tokens": (np.int32, "rows", 0),
    "text_start": (np.int32, "rows", 0),
    "part_offsets": (np.int64, "rows", 1),
    **{f"part_{name}": (dtype, "parts", 0) for name, dtype in PARTS.items()},
    "member_offsets": (np.int64, "rows", 1),
    **{f"member_{name}": (dtype, "members", 0) for name, dtype in MEMBERS.items()},
    "bad_row": (np.int64, "bad", 0),
}
for _name, _of in STRINGS.items():
    LAYOUT[f"{_name}_offsets"] = (np.int64, _of, 1)
    LAYOUT[f"{_name}_bytes"] = (np.uint8, f"{_name}_bytes", 0)

# Offsets -> the column of the counted elements.
OFFSETS: Final = {
    "part_offsets": "part_modality",
    "member_offsets": "member_field",
    **{f"{name}_offsets": f"{name}_bytes" for name in STRINGS},
}
_ALIGNMENT = 8
MOST_BYTES = 1 << 60
"""Larger than any file."""
_FLUSH_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSize:
    """Lengths of all columns: n rows, p parts, m members, bad samples, and UTF-8 bytes of each string column; and the
    widths of the list columns, which depend on the recipe.
    """

    rows: int
    parts: int
    members: int
    bad: int
    key_bytes: int
    error_field_bytes: int
    error_reason_bytes: int
    extent_width: int
    header_width: int

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in TableSize.__slots__}

    @staticmethod
    def sum(sizes: Sequence[TableSize]) -> TableSize:
        """Return the size of all tables together; their widths are the same."""
        total = {name: sum(getattr(size, name) for size in sizes) for name in TableSize.__slots__}
        return TableSize(**total | {name: getattr(sizes[0], name) for name in WIDTHS.values()})

    def items(self, column: str) -> int:
        """Return the number of values in a column of this table."""
        _, of, more = LAYOUT[column]
        width = WIDTHS.get(column)
        return (int(getattr(self, of)) + more) * (1 if width is None else int(getattr(self, width)))


@dataclass(slots=True, eq=False)
class Columns:
    """All columns as arrays, one-dimensional but for part_extent and member_header.

    Strings are offsets and bytes: `<string>_offsets` int64, `<string>_bytes` uint8 (UTF-8).
    Errors are those of the rows `bad_row`, ascending, int64.
    """

    shard: NDArray[np.int32]
    llm_tokens: NDArray[np.int32]
    loss_tokens: NDArray[np.int32]
    piece: NDArray[np.int32]
    cut_tokens: NDArray[np.int32]
    text_start: NDArray[np.int32]
    part_offsets: NDArray[np.int64]
    part_modality: NDArray[np.uint8]
    part_member: NDArray[np.int32]
    part_positions: NDArray[np.int32]
    part_tokens: NDArray[np.int32]
    part_rows: NDArray[np.int32]
    part_extent: NDArray[np.int32]
    member_offsets: NDArray[np.int64]
    member_field: NDArray[np.int32]
    member_kind: NDArray[np.uint8]
    member_encoding: NDArray[np.uint8]
    member_offset: NDArray[np.int64]
    member_size: NDArray[np.int64]
    member_header: NDArray[np.int64]
    bad_row: NDArray[np.int64]
    key_offsets: NDArray[np.int64]
    key_bytes: NDArray[np.uint8]
    error_field_offsets: NDArray[np.int64]
    error_field_bytes: NDArray[np.uint8]
    error_reason_offsets: NDArray[np.int64]
    error_reason_bytes: NDArray[np.uint8]

    @property
    def size(self) -> TableSize:
        return TableSize(
            rows=self.shard.size,
            parts=self.part_modality.size,
            members=self.member_field.size,
            bad=self.bad_row.size,
            key_bytes=self.key_bytes.size,
            error_field_bytes=self.error_field_bytes.size,
            error_reason_bytes=self.error_reason_bytes.size,
            extent_width=self.part_extent.shape[1],
            header_width=self.member_header.shape[1],
        )

    def text(self, column: str, number: int) -> str:
        """Return one value of a string column; `number` is a row for `key`, an index in `bad_row` for errors.

        Raises:
            ValueError: its offsets are outside the column, or its bytes are not UTF-8.
        """
        offsets: NDArray[np.int64] = getattr(self, f"{column}_offsets")
        values: NDArray[np.uint8] = getattr(self, f"{column}_bytes")
        start, stop = offsets[number : number + 2].tolist()
        if not 0 <= start <= stop <= values.size:
            raise ValueError(f"the {column} of row {number} is said to be at {start} to {stop} of {values.size} bytes")
        return values[start:stop].tobytes().decode()

    def check_ends(self) -> None:
        """Check the first and last of all offsets, and the order of bad rows, without a full pass.

        Raises ValueError, naming the column.
        """
        for name, target in OFFSETS.items():
            first, last = getattr(self, name)[[0, -1]].tolist()
            if (first, last) != (0, getattr(self, target).size):
                raise ValueError(f"{name} run from {first} to {last}, and {target} has {getattr(self, target).size}")
        ends = np.concatenate([[-1], self.bad_row, [self.shard.size]])
        if (np.diff(ends) < 1).any():
            raise ValueError(f"bad rows are not in order, or outside of {self.shard.size} rows")


def pack(columns: Columns) -> bytes:
    """Return the body of a table that fits in memory."""
    pieces: list[Buffer] = []
    for name, (dtype, _, _) in LAYOUT.items():
        values = np.ascontiguousarray(getattr(columns, name), dtype)
        pieces.append(values.data)
        if padding := -values.nbytes % _ALIGNMENT:
            pieces.append(bytes(padding))
    return b"".join(pieces)


def body_bytes(size: TableSize) -> int:
    """Return the length of the body of a table of this size."""
    return _positions(size)[1]


def views(body: Buffer, size: TableSize) -> Columns:
    """Return the columns of a body, read-only if the body is.

    Raises:
        ValueError: its length is not that of a table of this size.
    """
    positions, total = _positions(size)
    if memoryview(body).nbytes != total:
        raise ValueError(f"a table of {size} has {total} bytes, there are {memoryview(body).nbytes}")
    arrays: dict[str, NDArray[Any]] = {
        name: np.frombuffer(body, dtype, size.items(name), positions[name]) for name, (dtype, _, _) in LAYOUT.items()
    }
    for name, width in WIDTHS.items():
        arrays[name] = arrays[name].reshape(getattr(size, LAYOUT[name][1]), getattr(size, width))
    return Columns(**arrays)


class TableWriter:
    """Writes the body of one table, piece by piece, in order.

    Args:
        fd: of the file; written with pwrite, so that a full disk raises an error, and no signal kills the process.
        start: offset of the body in the file.
        size: of the whole table.
    """

    def __init__(self, fd: int, start: int, size: TableSize) -> None:
        positions, total = _positions(size)
        self._fd = fd
        self._at = {name: start + position for name, position in positions.items()}
        self._waiting: list[tuple[memoryview, TableSize, int, Sequence[int]]] = []
        self._waiting_bytes = 0
        self._done = dict.fromkeys(("rows", *OFFSETS.values()), 0)
        os.ftruncate(fd, start + total)
        for name in OFFSETS:
            self._write(name, np.zeros(1, np.int64))

    def append(self, body: Buffer, size: TableSize, shard: int, field_numbers: Sequence[int]) -> None:
        """Append a packed table, with `shard` as the number of its first shard, and `field_numbers` of its fields."""
        view = memoryview(body)
        self._waiting.append((view, size, shard, field_numbers))
        self._waiting_bytes += view.nbytes
        if self._waiting_bytes > _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the waiting tables; call it at the end."""
        if not self._waiting:
            return
        bodies, sizes, shards, numbers = zip(*self._waiting, strict=True)
        slices = [_slices(size) for size in sizes]
        rows = self._shift("rows", [size.rows for size in sizes])
        for name, (dtype, of, _) in LAYOUT.items():
            counts = [getattr(size, of) for size in sizes]
            # Join the column of all tables, and check that its values stay inside of their table.
            pieces = [body[each[name]] for body, each in zip(bodies, slices, strict=True)]
            joined: NDArray[Any] = np.frombuffer(b"".join(pieces), dtype)
            if name in OFFSETS:
                self._check_last(name, joined, counts, [getattr(size, LAYOUT[OFFSETS[name]][1]) for size in sizes])
            elif name in ("member_field", "bad_row"):
                below = list(map(len, numbers)) if name == "member_field" else [size.rows for size in sizes]
                if (joined < 0).any() or (joined >= np.repeat(below, counts)).any():
                    raise ValueError(f"{name} of a table leads outside of it")

            # Shift its values to the numbers of the whole.
            if name == "member_field":
                bases = np.cumsum([0, *map(len, numbers[:-1])])
                joined = np.array([*chain(*numbers)], dtype)[joined + np.repeat(bases, counts)]
            elif name == "shard":
                joined = joined + np.repeat(np.array(shards, dtype), counts)
            elif name == "bad_row":
                joined = joined + np.repeat(rows, counts)
            elif name in OFFSETS:
                target = LAYOUT[OFFSETS[name]][1]
                joined = joined + np.repeat(
                    self._shift(OFFSETS[name], [getattr(size, target) for size in sizes]), counts
                )
            self._write(name, joined)
        self._waiting, self._waiting_bytes = [], 0

    def _check_last(self, name: str, joined: NDArray[np.int64], counts: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise ValueError if the offsets of a table do not end at the end of its column."""
        has_rows = np.array(counts) > 0
        last = joined[np.cumsum(counts)[has_rows] - 1]
        if (last != np.array(lengths)[has_rows]).any():
            raise ValueError(f"{name} of a table do not end with it")

    def _shift(self, column: str, lengths: Sequence[int]) -> NDArray[np.int64]:
        """Return the position in the whole column where each table begins."""
        ends = self._done[column] + np.cumsum(lengths, dtype=np.int64)
        self._done[column] = int(ends[-1])
        return ends - np.array(lengths, np.int64)

    def _write(self, name: str, values: NDArray[Any]) -> None:
        write_at(self._fd, np.ascontiguousarray(values, LAYOUT[name][0]).data, self._at[name])
        self._at[name] += values.size * _itemsize(LAYOUT[name][0])


def offsets_of(lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return running sums from 0: the start of each of `lengths`, and the end, int64 (len(lengths) + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.add.accumulate(lengths, out=offsets[1:], dtype=np.int64)
    return offsets


@cache
def _itemsize(dtype: Any) -> int:
    return int(np.dtype(dtype).itemsize)


@lru_cache(maxsize=1024)  # many small shards have the same size
def _slices(size: TableSize) -> dict[str, slice]:
    """Return the slice of each column in the body; for offsets without the first, which is 0."""
    slices: dict[str, slice] = {}
    for name, start in _positions(size)[0].items():
        dtype, _, more = LAYOUT[name]
        stop = start + size.items(name) * _itemsize(dtype)
        slices[name] = slice(start + more * _itemsize(dtype), stop)
    return slices


@lru_cache(maxsize=1024)
def _positions(size: TableSize) -> tuple[dict[str, int], int]:
    """Return the offset of each column in the body, and the length of the body."""
    positions: dict[str, int] = {}
    end = 0
    for name, (dtype, _, _) in LAYOUT.items():
        positions[name] = end
        end += size.items(name) * _itemsize(dtype)
        end += -end % _ALIGNMENT
    return positions, end

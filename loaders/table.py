"""The columns of an index on disk: one uncompressed Arrow record batch, mapped instead of read.

    columns of a sample --large_list offsets--> its parts, its members (flat columns over all samples)

`map_table` gives NumPy views of a mapped file without reading it. `allocate_table` writes a file of the right size and
gives writable views of it, so that a table of any size is filled piece by piece in bounded memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

FORMAT = 1
_METADATA = b"orchdata"

PARTS = {
    "modality": np.uint8,
    "member": np.int32,
    "positions": np.int32,
    "tokens": np.int32,
    "extent0": np.int32,
    "extent1": np.int32,
}
# header0, header1: width and height of an image, frames and rate of audio, else 0.
MEMBERS = {
    "field": np.int32,
    "kind": np.uint8,
    "encoding": np.uint8,
    "offset": np.int64,
    "size": np.int64,
    "header0": np.int64,
    "header1": np.int32,
}


def _list_of(children: Mapping[str, Any]) -> pa.DataType:
    fields = [pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in children.items()]
    return pa.large_list(pa.field("item", pa.struct(fields), nullable=False))


SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("llm_tokens", pa.int32(), nullable=False),
        pa.field("loss_tokens", pa.int32(), nullable=False),
        pa.field("parts", _list_of(PARTS), nullable=False),
        pa.field("members", _list_of(MEMBERS), nullable=False),
        pa.field("key", pa.large_string(), nullable=False),
        pa.field("error_field", pa.large_string()),
        pa.field("error_reason", pa.large_string()),
    ]
)
STRINGS = ("key", "error_field", "error_reason")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSize:
    """Lengths of all columns: n samples, p parts, m members, and the UTF-8 bytes of each string column."""

    samples: int
    parts: int
    members: int
    bad: int
    key_bytes: int
    error_field_bytes: int
    error_reason_bytes: int

    def __add__(self, other: TableSize) -> TableSize:
        names = self.__dataclass_fields__
        return TableSize(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(slots=True, eq=False)
class Columns:
    """All columns as arrays: views of a mapped file, or its buffers to be filled. Strings as offsets and bytes.

    `<string>_offsets` int64 (n + 1,), `<string>_bytes` uint8; `<string>_valid` is the bitmap of which values are set,
    empty where all are.
    """

    shard: NDArray[np.int32]
    llm_tokens: NDArray[np.int32]
    loss_tokens: NDArray[np.int32]
    part_offsets: NDArray[np.int64]
    part_modality: NDArray[np.uint8]
    part_member: NDArray[np.int32]
    part_positions: NDArray[np.int32]
    part_tokens: NDArray[np.int32]
    part_extent0: NDArray[np.int32]
    part_extent1: NDArray[np.int32]
    member_offsets: NDArray[np.int64]
    member_field: NDArray[np.int32]
    member_kind: NDArray[np.uint8]
    member_encoding: NDArray[np.uint8]
    member_offset: NDArray[np.int64]
    member_size: NDArray[np.int64]
    member_header0: NDArray[np.int64]
    member_header1: NDArray[np.int32]
    key_offsets: NDArray[np.int64]
    key_bytes: NDArray[np.uint8]
    error_field_valid: NDArray[np.uint8]
    error_field_offsets: NDArray[np.int64]
    error_field_bytes: NDArray[np.uint8]
    error_reason_valid: NDArray[np.uint8]
    error_reason_offsets: NDArray[np.int64]
    error_reason_bytes: NDArray[np.uint8]

    @property
    def size(self) -> TableSize:
        return TableSize(
            samples=self.shard.size,
            parts=self.part_modality.size,
            members=self.member_field.size,
            bad=int(self.bad_rows().size),
            key_bytes=int(self.key_offsets[-1]),
            error_field_bytes=int(self.error_field_offsets[-1]),
            error_reason_bytes=int(self.error_reason_offsets[-1]),
        )

    def bad_rows(self) -> NDArray[np.int64]:
        """Rows whose error is set, ascending, int64."""
        if not self.error_reason_valid.size:  # Arrow leaves the bitmap out where every value is set
            return np.arange(self.shard.size)
        return np.flatnonzero(np.unpackbits(self.error_reason_valid, bitorder="little", count=self.shard.size))

    def text(self, column: str, row: int) -> str:
        """One value of a string column."""
        offsets: NDArray[np.int64] = getattr(self, f"{column}_offsets")
        start, stop = offsets[row : row + 2].tolist()
        values: NDArray[np.uint8] = getattr(self, f"{column}_bytes")
        return values[start:stop].tobytes().decode()


def columns_of(batch: pa.RecordBatch, view: Callable[[pa.Buffer | None, Any, int], NDArray[Any]]) -> Columns:
    """Find every buffer of a batch of SCHEMA; `view(buffer, dtype, length)` makes it an array."""
    rows = batch.num_rows
    arrays: dict[str, NDArray[Any]] = {}
    for name in ("shard", "llm_tokens", "loss_tokens"):
        arrays[name] = view(batch.column(name).buffers()[1], np.int32, rows)
    for name, children in (("part", PARTS), ("member", MEMBERS)):
        column = batch.column(f"{name}s")
        buffers = column.buffers()  # list validity, offsets, struct validity, then validity and data of each child
        arrays[f"{name}_offsets"] = view(buffers[1], np.int64, rows + 1)
        for child, (field, dtype) in enumerate(children.items()):
            arrays[f"{name}_{field}"] = view(buffers[4 + 2 * child], dtype, len(column.values))
    for name in STRINGS:
        valid, offsets, data = batch.column(name).buffers()
        arrays[f"{name}_offsets"] = view(offsets, np.int64, rows + 1)
        # Not the length of the buffer: that is padded.
        arrays[f"{name}_bytes"] = view(data, np.uint8, int(arrays[f"{name}_offsets"][-1]) if rows else 0)
        if name != "key":
            arrays[f"{name}_valid"] = view(valid, np.uint8, (rows + 7) // 8 if valid is not None else 0)
    return Columns(**arrays)


def map_table(path: Path) -> tuple[Columns, dict[str, Any]]:
    """Map a table: read-only views (they keep the mapping alive) and its metadata. Reads no column.

    Raises:
        ValueError: not a table of this format.
    """
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            batch = reader.get_batch(0) if reader.num_record_batches == 1 else None
            metadata = json.loads((reader.schema.metadata or {}).get(_METADATA, b"{}"))
    except (pa.ArrowInvalid, ValueError) as error:
        raise ValueError(f"{path} is not an index: {error}") from error
    if batch is None or metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is an index of format {metadata.get('format')}, this version reads {FORMAT}")
    return columns_of(batch, _view), metadata


def _view(buffer: pa.Buffer | None, dtype: Any, length: int) -> NDArray[Any]:
    return np.zeros(0, dtype) if buffer is None or length == 0 else np.frombuffer(buffer, dtype, length)


def allocate_table(path: Path, size: TableSize, metadata: Mapping[str, Any]) -> Columns:
    """Write a table of zeros of this size, and give writable views of its columns; changes reach the file itself.

    The blocks are really written, so that a full disk is an error here and no SIGBUS later.
    """
    schema = SCHEMA.with_metadata({_METADATA: json.dumps({"format": FORMAT, **metadata}).encode()})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(_zeros(size), schema=schema))

    whole = np.memmap(path, np.uint8, "r+")
    with pa.memory_map(str(path)) as file:
        base = file.read_buffer(1).address
        file.seek(0)
        batch = pa.ipc.open_file(file).get_batch(0)

        def view(buffer: pa.Buffer | None, dtype: Any, length: int) -> NDArray[Any]:
            if buffer is None or length == 0:
                return np.zeros(0, dtype)
            start = buffer.address - base
            return whole[start : start + length * np.dtype(dtype).itemsize].view(dtype)

        return columns_of(batch, view)


def write_table(path: Path, columns: Columns, metadata: Mapping[str, Any]) -> None:
    """Write a table that fits in memory."""
    out = allocate_table(path, columns.size, metadata)
    for name in Columns.__slots__:
        target = getattr(out, name)
        if target.size:
            target[:] = getattr(columns, name)


def _zeros(size: TableSize) -> list[pa.Array]:
    """Columns of zeros over one shared, never touched stretch of memory (the kernel's zero page)."""
    n = size.samples
    longest = 8 * max(n + 1, size.parts, size.members, size.key_bytes, size.error_field_bytes, size.error_reason_bytes)
    zeros = pa.py_buffer(np.zeros(longest, np.uint8))

    def offsets(last: int) -> pa.Buffer:
        # Only the last offset counts when the writer cuts the values to what the offsets span.
        array = np.zeros(n + 1, np.int64)
        array[-1] = last
        return pa.py_buffer(array)

    def list_of(name: str, length: int) -> pa.Array:
        kind = SCHEMA.field(name).type
        children = [pa.Array.from_buffers(field.type, length, [None, zeros]) for field in kind.value_type]
        values = pa.Array.from_buffers(kind.value_type, length, [None], 0, children=children)
        return pa.Array.from_buffers(kind, n, [None, offsets(length)], 0, children=[values])

    def strings(length: int, bad: int | None) -> pa.Array:
        valid, nulls = (None, 0) if bad is None else (zeros, n - bad)
        return pa.Array.from_buffers(pa.large_string(), n, [valid, offsets(length), zeros], nulls)

    numbers = [pa.Array.from_buffers(pa.int32(), n, [None, zeros]) for _ in range(3)]
    errors = [strings(size.error_field_bytes, size.bad), strings(size.error_reason_bytes, size.bad)]
    lists = [list_of("parts", size.parts), list_of("members", size.members)]
    return [*numbers, *lists, strings(size.key_bytes, None), *errors]

"""Rows of the columns of record batches: only the bytes of these rows are read.

description of a batch --pyarrow--> arrays over memory that stays empty --where their buffers are--> bytes of the rows

A batch that is compressed, or has dictionaries or views, is read whole. A file is not mapped: one that is truncated
would end the process.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from orchdata.loaders.errors import one_line, pass_trouble
from orchdata.loaders.shards.arrow.layout import Layout, Message
from orchdata.loaders.shards.parquet.file import Refused
from orchdata.loaders.storage.storage import Storage

_NORESERVE: Final = 0x4000
"""MAP_NORESERVE of Linux: address space that takes no memory."""
_REMEMBERED: Final = 1024
_BAD: Final = (Refused, pa.ArrowException, OSError, ValueError, KeyError)
_LARGE: Final = frozenset((pa.large_binary().id, pa.large_string().id, pa.large_list(pa.null()).id))
_LISTS: Final = frozenset((pa.list_(pa.null()).id, pa.large_list(pa.null()).id))
_WITH_OFFSETS: Final = _LARGE | _LISTS | {pa.binary().id, pa.string().id}
_STRUCT, _FIXED_LIST, _NULL = pa.struct([]).id, pa.list_(pa.null(), 1).id, pa.null().id


BY_ROW, WHOLE, NEVER = range(3)
"""How values of a type are read: each row by itself, all of a batch, or not at all."""


class TooLarge(ValueError):
    """The rows take more memory than allowed: fewer rows may fit."""


class Place(NamedTuple):
    """Where a buffer is in its message."""

    offset: int
    size: int


class Node(NamedTuple):
    """An array of a batch, as pyarrow describes it.

    Attributes:
        array: with its values, if the batch was read whole.
        buffers: its own; where they are, unless the batch was read whole.
        children: of lists and structs.
    """

    array: pa.Array | None
    type: pa.DataType
    kind: int
    length: int
    buffers: list[pa.Buffer | Place | None]
    children: list[Node]


class Column(NamedTuple):
    """A column of a batch.

    Attributes:
        node: all its values.
        message: the batch.
    """

    node: Node
    message: Message


class Columns:
    """The columns of a file. Safe from many threads.

    Args:
        most_bytes: of one column of rows that are read together, and of a batch that is read whole.
    """

    def __init__(self, file: Storage, layout: Layout, most_bytes: int) -> None:
        self._file = file
        self._layout = layout
        self._most_bytes = most_bytes
        self._whole_names = {field.name for field in layout.schema if reading_of(field.type) == WHOLE}
        self._columns: dict[tuple[int, str], Column] = {}

    def is_whole(self, batch: int, names: Sequence[str]) -> bool:
        """Return whether a batch can only be read whole, for these columns."""
        if self._layout.batches[batch].packed or self._layout.dictionaries[batch]:
            return True
        return any(name in self._whole_names for name in names)

    def whole(self, batch: int, names: Sequence[str]) -> list[pa.Array]:
        """Read columns of a batch, decompressed and with their dictionaries.

        Raises Refused: the batch is damaged, or too large.
        """
        layout, message = self._layout, self._layout.batches[batch]
        parts = (layout.head, *layout.dictionaries[batch], message)
        options = pa.ipc.IpcReadOptions(
            use_threads=False, included_fields=[layout.schema.get_field_index(name) for name in names]
        )
        try:
            size = sum(part.stop - part.offset for part in parts)
            if size <= self._most_bytes:
                read = [self._file.read(part.offset, part.stop - part.offset) for part in parts]
                size = sum(part.unpacked_bytes(data) for part, data in zip(parts, read, strict=True))
            if size > self._most_bytes:
                raise Refused(f"its buffers take {size} bytes, above Limits.column_bytes={self._most_bytes}")
            table = pa.ipc.open_stream(b"".join(read), options=options).read_next_batch()
            columns = [Column(_node(table.column(name), message.num_rows), message) for name in names]
            return [self._taken(column, 0, message.num_rows) for column in columns]
        except _BAD as error:
            raise self._refused(batch, error) from None

    def take(self, batch: int, name: str, start: int, length: int) -> pa.Array:
        """Read values start to start + length of a column that need not be read whole.

        Raises Refused: the description of the batch is impossible; ValueError: its offsets point outside of it.
        """
        return self._taken(self._column(batch, name), start, length)

    def _column(self, batch: int, name: str) -> Column:
        column = self._columns.get((batch, name))
        if column is None:
            if len(self._columns) >= _REMEMBERED:
                self._columns.clear()
            column = self._columns[batch, name] = self._read_column(batch, name)
        return column

    def _read_column(self, batch: int, name: str) -> Column:
        message = self._layout.batches[batch]
        described = self._file.read(message.offset, message.body - message.offset)
        # Shared, so that a limit of the memory of a process does not count it; given back at once.
        memory = mmap.mmap(-1, message.stop - message.offset, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)
        memory[: len(described)] = described
        try:
            whole = pa.py_buffer(memory)
            array = pa.ipc.read_record_batch(whole, self._layout.schema).column(name)
            return Column(_node(array, message.num_rows, whole.address), message)
        except _BAD as error:
            raise self._refused(batch, error) from None

    def _refused(self, batch: int, error: Exception) -> Refused:
        pass_trouble(error)
        return Refused(f"batch {batch}, at byte {self._layout.batches[batch].offset}: {one_line(error)}")

    def _taken(self, column: Column, start: int, length: int) -> pa.Array:
        if length > self._most_bytes:  # for types of no bytes, or of bits
            raise TooLarge(f"{length} values, above Limits.column_bytes={self._most_bytes}")
        return _Rows(self._file, column, self._most_bytes).take(column.node, start, length)


class _Rows:
    """Reads rows of one column."""

    def __init__(self, file: Storage, column: Column, most_bytes: int) -> None:
        self._file = file
        self._column = column
        self._most_bytes = self._left = most_bytes

    def take(self, node: Node, start: int, length: int) -> pa.Array:
        kind, buffers, children = node.kind, node.buffers, node.children
        if not 0 <= start <= start + length <= node.length:
            raise ValueError(f"values {start} to {start + length} of {node.length}")
        if kind == _NULL or not length:
            return pa.nulls(length, node.type)
        read = [None if buffers[0] is None else self._bits(buffers[0], start, length)]
        below: list[pa.Array] = []
        if kind == _STRUCT:
            below = [self.take(child, start, length) for child in children]
        elif kind == _FIXED_LIST:
            each = node.type.list_size
            below = [self.take(children[0], start * each, length * each)]
        elif kind in _WITH_OFFSETS:
            offsets = self._offsets(buffers[1], kind in _LARGE, start, length)
            first, stop = int(offsets[0]), int(offsets[-1])
            read.append(pa.py_buffer(offsets - offsets[0]))
            if kind in _LISTS:
                below = [self.take(children[0], first, stop - first)]
            else:
                read.append(self._bytes(buffers[2], first, stop))
        elif node.array is not None and reading_of(node.type) == WHOLE:
            rows = node.array.slice(start, length)
            rows.validate(full=True)
            return rows
        elif node.type.bit_width == 1:
            read.append(self._bits(buffers[1], start, length))
        else:
            each = node.type.bit_width // 8
            read.append(self._bytes(buffers[1], start * each, (start + length) * each))
        return pa.Array.from_buffers(node.type, length, read, children=below or None)

    def _offsets(self, buffer: pa.Buffer | Place | None, is_large: bool, start: int, length: int) -> np.ndarray:
        dtype = np.dtype(np.int64 if is_large else np.int32)
        data = self._bytes(buffer, start * dtype.itemsize, (start + length + 1) * dtype.itemsize)
        offsets = np.frombuffer(data, dtype)
        # Compare, because differences can overflow.
        if int(offsets[0]) < 0 or (offsets[1:] < offsets[:-1]).any():
            raise ValueError("offsets that go backwards")
        return offsets

    def _bits(self, buffer: pa.Buffer | Place | None, start: int, length: int) -> pa.Buffer:
        first = start // 8
        data = np.frombuffer(self._bytes(buffer, first, -(-(start + length) // 8)), np.uint8)
        bits = np.unpackbits(data, bitorder="little")[start % 8 :][:length]
        return pa.py_buffer(np.packbits(bits, bitorder="little"))

    def _bytes(self, buffer: pa.Buffer | Place | None, start: int, stop: int) -> pa.Buffer:
        """Return bytes start to stop of a buffer."""
        size = 0 if buffer is None else buffer.size
        if not 0 <= start <= stop <= size:
            raise ValueError(f"bytes {start} to {stop} of a buffer of {size}")
        if buffer is None or start == stop:
            return pa.py_buffer(b"")
        if not isinstance(buffer, Place):
            return buffer[start:stop]
        message, at = self._column.message, buffer.offset
        if not message.body <= message.offset + at <= message.stop - size:
            raise ValueError("a buffer outside of its batch")
        self._left -= stop - start
        if self._left < 0:
            raise TooLarge(f"more than Limits.column_bytes={self._most_bytes} bytes in one column")
        data = self._file.read(message.offset + at + start, stop - start)
        if len(data) < stop - start:
            raise ValueError(f"cut: {len(data)} of {stop - start} bytes")
        return pa.py_buffer(data)


def _node(array: pa.Array, num_rows: int | None = None, address: int | None = None) -> Node:
    """Describe a column, or an array below it. Raises Refused or ArrowInvalid if buffers are too short for its rows.

    Args:
        num_rows: of the column.
        address: of the message in memory that has no values.
    """
    if num_rows is not None:
        array.validate()
        if len(array) != num_rows:
            raise Refused(f"{len(array)} values in {num_rows} rows")
    kind, below, buffers = array.type.id, [], array.buffers()[:3]
    if kind == _STRUCT:
        below = [array.field(number) for number in range(array.type.num_fields)]
    elif kind in _LISTS or kind == _FIXED_LIST:
        below = [array.values]
    children = [_node(child, None, address) for child in below]
    if address is None:
        return Node(array, array.type, kind, len(array), buffers, children)
    places = [None if each is None else Place(each.address - address, each.size) for each in buffers]
    return Node(None, array.type, kind, len(array), places, children)


def reading_of(type_: pa.DataType) -> int:
    """Return BY_ROW, WHOLE, or NEVER: how values of a type are read."""
    kinds = pa.types
    if kinds.is_union(type_) or kinds.is_map(type_) or kinds.is_run_end_encoded(type_):
        return NEVER
    if isinstance(type_, pa.BaseExtensionType):
        return NEVER
    has_views = kinds.is_string_view(type_) or kinds.is_binary_view(type_)
    has_views = has_views or kinds.is_list_view(type_) or kinds.is_large_list_view(type_)
    own = WHOLE if has_views or kinds.is_dictionary(type_) else BY_ROW
    return max([own, *(reading_of(type_.field(number).type) for number in range(type_.num_fields))])

"""Rows of a column of a batch: the bytes of those rows alone, checked, as an array of their own."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.shards.arrow.layout import Node, Span, has_offsets
from orchdata.loaders.storage.storage import Storage

_WIDE: Final = (pa.types.is_large_binary, pa.types.is_large_string, pa.types.is_large_list)


class RowsReader:
    """Rows of columns of a file.

    Args:
        file: it.
        most_bytes: that one buffer of what is asked for may take.
    """

    def __init__(self, file: Storage, most_bytes: int) -> None:
        self._file = file
        self._most_bytes = most_bytes

    def take(self, node: Node, start: int, length: int) -> pa.Array:
        """Values start to start + length. Raises ValueError where its numbers point outside of its buffers."""
        if not 0 <= start <= start + length <= node.length:
            raise ValueError(f"values {start} to {start + length} of {node.length}")
        type_ = node.type
        if pa.types.is_null(type_):
            return pa.nulls(length)
        valid = None if node.validity is None else self._bits(node.validity, start, length)
        if pa.types.is_struct(type_):
            children = [self.take(child, start, length) for child in node.children]
            return pa.Array.from_buffers(type_, length, [valid], children=children)
        if pa.types.is_fixed_size_list(type_):
            wide = type_.list_size
            child = self.take(node.children[0], start * wide, length * wide)
            return pa.Array.from_buffers(type_, length, [valid], children=[child])
        if pa.types.is_boolean(type_):
            return pa.Array.from_buffers(type_, length, [valid, self._bits(node.buffers[0], start, length)])
        if not has_offsets(type_) and not node.children:
            width = type_.bit_width // 8
            values = pa.py_buffer(self._read(node.buffers[0], start * width, length * width))
            return pa.Array.from_buffers(type_, length, [valid, values])
        offsets = self._offsets(node, start, length)
        first, last = int(offsets[0]), int(offsets[-1])
        held = pa.py_buffer((offsets - offsets[0]).astype(offsets.dtype))
        if node.children:
            child = self.take(node.children[0], first, last - first)
            return pa.Array.from_buffers(type_, length, [valid, held], children=[child])
        values = pa.py_buffer(self._read(node.buffers[1], first, last - first))
        return pa.Array.from_buffers(type_, length, [valid, held, values])

    def _offsets(self, node: Node, start: int, length: int) -> NDArray[np.int32] | NDArray[np.int64]:
        dtype = np.dtype(np.int64 if any(kind(node.type) for kind in _WIDE) else np.int32)
        if node.buffers[0].size == 0 and node.length == 0:
            return np.zeros(1, dtype)
        data = self._read(node.buffers[0], start * dtype.itemsize, (length + 1) * dtype.itemsize)
        offsets = np.frombuffer(data, dtype)
        if int(offsets[0]) < 0 or (np.diff(offsets) < 0).any():
            raise ValueError("offsets that go backwards")
        return offsets

    def _bits(self, span: Span, start: int, length: int) -> pa.Buffer:
        first = start // 8
        data = self._read(span, first, -(-(start + length) // 8) - first)
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[start % 8 :][:length]
        return pa.py_buffer(np.packbits(bits, bitorder="little"))

    def _read(self, span: Span, start: int, size: int) -> bytes:
        if size > self._most_bytes:
            raise ValueError(f"{size} bytes, above Limits.column_bytes={self._most_bytes}")
        if start < 0 or start + size > span.size:
            raise ValueError(f"bytes {start} to {start + size} of a buffer of {span.size}")
        data = self._file.read(span.offset + start, size) if size else b""
        if len(data) < size:
            raise ValueError(f"cut: {len(data)} of {size} bytes")
        return data

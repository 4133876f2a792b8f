"""Reading rows of a column of a batch: only the bytes of those rows, checked, as a new array.

The offsets of the rows are checked here: they must ascend, and end inside the buffer.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.shards.arrow.layout import Node, Span
from orchdata.loaders.storage.storage import Storage


class TooLarge(ValueError):
    """The rows take more memory than allowed: fewer rows may fit."""


class RowsReader:
    """Reads rows of one column of a file.

    Args:
        file: the Arrow file.
        most_bytes: most bytes of all buffers that this reader reads.
    """

    def __init__(self, file: Storage, most_bytes: int) -> None:
        self._file = file
        self._most_bytes = self._left = most_bytes

    def take(self, node: Node, start: int, length: int) -> pa.Array:
        """Read values start to start + length. Raises ValueError if its offsets point outside of its buffers."""
        if not 0 <= start <= start + length <= node.length:
            raise ValueError(f"values {start} to {start + length} of {node.length}")
        if length > self._most_bytes:  # for types of no bytes, or of bits
            raise TooLarge(f"{length} values, above Limits.column_bytes={self._most_bytes}")
        shape = node.shape
        if shape.is_null:
            return pa.nulls(length)
        buffers = [None if node.validity is None else self._bits(node.validity, start, length)]
        if shape.has_offsets:
            offsets = self._offsets(node, start, length)
            buffers.append(pa.py_buffer((offsets - offsets[0]).astype(offsets.dtype)))
            below, size = int(offsets[0]), int(offsets[-1]) - int(offsets[0])
            if not node.children:
                buffers.append(pa.py_buffer(self._read(node.buffers[1], below, size)))
            children = [self.take(child, below, size) for child in node.children]
        else:
            for span, (bits, _) in zip(node.buffers, shape.buffers, strict=True):
                buffers.append(self._values(span, start, length, bits))
            each = [times for _, times in shape.children]
            children = [
                self.take(child, start * times, length * times)
                for child, times in zip(node.children, each, strict=True)
            ]
        return pa.Array.from_buffers(shape.type, length, buffers, children=children or None)

    def _offsets(self, node: Node, start: int, length: int) -> NDArray[np.int32] | NDArray[np.int64]:
        dtype = np.dtype(np.int64 if node.shape.buffers[0][0] == 64 else np.int32)
        if node.length == 0:
            return np.zeros(1, dtype)
        data = self._read(node.buffers[0], start * dtype.itemsize, (length + 1) * dtype.itemsize)
        offsets = np.frombuffer(data, dtype)
        # Compare, because differences can overflow.
        if int(offsets[0]) < 0 or (offsets[1:] < offsets[:-1]).any():
            raise ValueError("offsets that go backwards")
        return offsets

    def _values(self, span: Span, start: int, length: int, bits: int) -> pa.Buffer:
        if bits == 1:
            return self._bits(span, start, length)
        return pa.py_buffer(self._read(span, start * bits // 8, length * bits // 8))

    def _bits(self, span: Span, start: int, length: int) -> pa.Buffer:
        first = start // 8
        data = self._read(span, first, -(-(start + length) // 8) - first)
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[start % 8 :][:length]
        return pa.py_buffer(np.packbits(bits, bitorder="little"))

    def _read(self, span: Span, start: int, size: int) -> bytes:
        if not 0 <= start <= start + size <= span.size:
            raise ValueError(f"bytes {start} to {start + size} of a buffer of {span.size}")
        self._left -= size
        if self._left < 0:
            raise TooLarge(f"more than Limits.column_bytes={self._most_bytes} bytes in one column")
        data = self._file.read(span.offset + start, size) if size else b""
        if len(data) < size:
            raise ValueError(f"cut: {len(data)} of {size} bytes")
        return data

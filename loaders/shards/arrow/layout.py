"""The layout of an Arrow stream, without reading its columns: file -> record batches -> offsets of buffers in the file.

The description of a batch gives the number of values of each array, and the offsets of its buffers in the bytes that
follow. Each length and each offset is checked against those bytes here, before it is used. pyarrow only reads the
schema, and never a batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from operator import length_hint
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from orchdata.loaders.shards.arrow.flatbuffer import Table
from orchdata.loaders.shards.arrow.schema import read_schema
from orchdata.loaders.shards.arrow.shapes import Shape, shape_of
from orchdata.loaders.shards.parquet.file import Refused
from orchdata.loaders.storage.storage import Storage

_MAGIC: Final = b"ARROW1"
_MAGIC_BYTES: Final = 8  # with two of padding
_CONTINUES: Final = 0xFFFFFFFF
_DESCRIPTION_BYTES: Final = 64 << 20
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_V4, _V5 = 3, 4
_MOST_ROWS: Final = int(np.iinfo(np.int64).max)
_ALIGNMENT: Final = 8
_OLD_COMPRESSION: Final = b"ARROW:experimental_compression"
"""How pyarrow 0.17 marked compressed buffers."""


class Span(NamedTuple):
    """A range of bytes of the file."""

    offset: int
    size: int


class Node(NamedTuple):
    """One array of a batch; its buffers are long enough for its values.

    Attributes:
        shape: of its type.
        length: number of values.
        validity: bits; None if all values are valid.
        buffers: the other buffers: offsets, values.
        children: of lists and structs.
    """

    shape: Shape
    length: int
    validity: Span | None
    buffers: tuple[Span, ...]
    children: tuple[Node, ...]


class Batch(NamedTuple):
    """One record batch: its readable columns, by name."""

    num_rows: int
    columns: dict[str, Node]


class _Message(NamedTuple):
    """A message, as described in the file.

    Attributes:
        offset: of its prefix.
        data: prefix and description.
        version: of the format.
        kind, header: its type, and the description for that type.
        body: the bytes that follow, all of them inside of the file.
    """

    offset: int
    data: bytes
    version: int
    kind: int
    header: Table
    body: Span


def read_layout(file: Storage) -> tuple[pa.Schema, list[Batch]]:
    """Return the schema of a stream or file, and the layout of its batches.

    Raises:
        Refused: it is not an Arrow file, cut, of a kind that cannot be read by position, or malformed.
    """
    schema: pa.Schema | None = None
    shapes: list[Shape] = []
    batches: list[Batch] = []
    num_rows = 0
    for message in _messages(file):
        if schema is None:
            schema = _schema(message)
            shapes = [shape_of(type_, old_unions=message.version < _V5) for type_ in schema.types]
        elif message.kind == _BATCH:
            try:
                batches.append(_Arrays(message).batch(schema.names, shapes))
            except Refused as error:
                raise Refused(f"batch {len(batches)}, at byte {message.offset}: {error}") from None
            num_rows += batches[-1].num_rows
            if num_rows > _MOST_ROWS:
                raise Refused(f"its batches claim {num_rows} rows")
        elif message.kind == _DICTIONARY:
            raise Refused("its columns are dictionary-encoded, which is not supported: write them as plain values")
        else:
            raise Refused(f"a message of kind {message.kind} at byte {message.offset}, where a batch should be")
    if schema is None:
        raise Refused("not an Arrow stream: it is empty")
    return schema, batches


def _messages(file: Storage) -> Iterator[_Message]:
    is_file = file.read(0, len(_MAGIC)) == _MAGIC
    if is_file and file.read(file.size - len(_MAGIC), len(_MAGIC)) != _MAGIC:
        raise Refused(f"cut: it begins with {_MAGIC.decode()}, as an Arrow file does, and does not end with it")
    offset = _MAGIC_BYTES if is_file else 0
    while offset < file.size:
        prefix = file.read(offset, 8)
        if len(prefix) < 8:
            raise Refused(f"cut: a message at byte {offset} has no end")
        mark, length = struct.unpack("<Ii", prefix)
        if mark != _CONTINUES:
            raise Refused(f"not an Arrow stream: no message begins at byte {offset}")
        if length == 0:
            return
        start = offset + 8
        if not 0 < length <= min(_DESCRIPTION_BYTES, file.size - start):
            raise Refused(
                f"the message at byte {offset} claims {length} bytes of description, {file.size - start} are left"
            )
        data = prefix + file.read(start, length)
        description = Table(data[8:])
        header, size = description.table(2), description.number(3, "<q")
        body = Span(start + length, size)
        if header is None or not 0 <= size <= file.size - body.offset:
            raise Refused(f"cut: the message at byte {offset} has {size} bytes, and the file ends before its end")
        yield _Message(offset, data, description.number(0, "<h"), description.number(1, "<B"), header, body)
        offset = body.offset + size


def _schema(message: _Message) -> pa.Schema:
    if message.kind != _SCHEMA:
        raise Refused("not an Arrow stream: it does not begin with a schema")
    if message.version not in (_V4, _V5):
        raise Refused(f"version {message.version + 1} of Arrow's format: write it with a newer pyarrow")
    return read_schema(message.data, message.header)


class _Arrays:
    """The arrays of the batch of a message, in the order of its description: schema order, parents first."""

    def __init__(self, message: _Message) -> None:
        batch = message.header
        if batch.table(3) is not None or _OLD_COMPRESSION in message.data:
            raise Refused("its buffers are compressed: write them plain, as `save_to_disk` does")
        self._num_rows = batch.number(0, "<q")
        self._body = message.body
        self._nodes = batch.items(1, "<qq")
        self._buffers = batch.items(2, "<qq")
        self._more = batch.items(4, "<q")
        self._end = 0  # of the last buffer

    def batch(self, names: Sequence[str], shapes: Sequence[Shape]) -> Batch:
        """Return the columns. Raises Refused if any length or offset is impossible."""
        columns: dict[str, Node] = {}
        for name, shape in zip(names, shapes, strict=True):
            try:
                node = self._node(shape, self._num_rows)
                if node.length != self._num_rows:
                    raise Refused(f"{node.length} values in {self._num_rows} rows")
            except Refused as error:
                raise Refused(f"column {name!r}: {error}") from None
            if shape.is_read:
                columns[name] = node
        arrays, buffers = length_hint(self._nodes), length_hint(self._buffers)
        if arrays or buffers:
            raise Refused(f"it has {arrays} arrays and {buffers} buffers more than its columns")
        return Batch(self._num_rows, columns)

    def _node(self, shape: Shape, least: int) -> Node:
        """Return the next array, of at least `least` values."""
        length, nulls = self._next(self._nodes, "array")
        if length < max(0, least):
            raise Refused(f"an array of {length} values, {least} are needed")
        if not -1 <= nulls <= length:  # -1: not counted
            raise Refused(f"{nulls} of {length} values are null")
        validity = self._validity(length, nulls) if shape.has_validity else None
        buffers = []
        for bits, more in shape.buffers:
            values = length + more if length else 0
            buffers.append(self._buffer(-(-values * bits // 8)))
        if shape.has_more:
            for _ in range(self._num_more()):
                self._buffer(0)
        children = tuple(self._node(child, length * each) for child, each in shape.children)
        return Node(shape, length, validity, tuple(buffers), children)

    def _validity(self, length: int, nulls: int) -> Span | None:
        bits = self._buffer(0)
        if nulls == 0 or (nulls < 0 and not bits.size):
            return None
        if bits.size < -(-length // 8):
            raise Refused(f"a validity buffer of {bits.size} bytes for {length} values")
        return bits

    def _buffer(self, least: int) -> Span:
        """Return the next buffer, of at least `least` bytes, as a range of the file."""
        offset, size = self._next(self._buffers, "buffer")
        if size < least:
            raise Refused(f"a buffer of {size} bytes, {least} are needed")
        if size == 0:
            return Span(self._body.offset, 0)
        # Buffers must follow one another: if they shared bytes, they would take more memory than the file has.
        if not self._end <= offset <= self._body.size - size or offset % _ALIGNMENT:
            raise Refused(
                f"a buffer at bytes {offset} to {offset + size} of {self._body.size}: it must begin at a multiple of "
                f"{_ALIGNMENT}, and after the previous one, which ends at {self._end}"
            )
        self._end = offset + size
        return Span(self._body.offset + offset, size)

    def _num_more(self) -> int:
        """Return the number of additional buffers of the next array of views."""
        (count,) = self._next(self._more, "number of buffers of views")
        left = length_hint(self._buffers)
        if not 0 <= count <= left:
            raise Refused(f"{count} buffers of views, {left} are left")
        return int(count)

    def _next(self, items: Iterator[tuple[Any, ...]], what: str) -> tuple[Any, ...]:
        item = next(items, None)
        if item is None:
            raise Refused(f"the batch describes too few items: no {what} is left")
        return item

"""Where columns of an Arrow stream lie, without reading them: file -> record batches -> buffers at places in the file.

A batch's description says how long its buffers are, one after another. pyarrow is given it with a body of memory that
nobody has touched, and tells by the addresses of what it makes of it where each buffer lies.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa

from orchdata.loaders.shards.parquet.file import Refused
from orchdata.loaders.storage.storage import Storage

_MAGIC: Final = b"ARROW1\0\0"
_CONTINUES: Final = 0xFFFFFFFF
_DESCRIPTION_BYTES: Final = 64 << 20
_COMPRESSED: Final = "its buffers are compressed or lie outside: write them plain, as `save_to_disk` does"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_NO_RESERVE: Final = 0x4000  # MAP_NORESERVE


class Span(NamedTuple):
    """Bytes of the file."""

    offset: int
    size: int


class Node(NamedTuple):
    """One array of a batch.

    Attributes:
        length: its values.
        validity: bits; None where all are valid.
        buffers: the others: offsets, values.
        children: of lists and structs.
    """

    type: pa.DataType
    length: int
    validity: Span | None
    buffers: tuple[Span, ...]
    children: tuple[Node, ...]


class Batch(NamedTuple):
    """One record batch: its columns by name."""

    num_rows: int
    columns: dict[str, Node]


def read_layout(file: Storage) -> tuple[pa.Schema, list[Batch]]:
    """The schema of a stream or file, and where its batches lie.

    Raises:
        Refused: it is none, cut, or of a kind that is not read by position.
        pa.ArrowException: a description that makes no sense.
    """
    schema: pa.Schema | None = None
    batches: list[Batch] = []
    for offset, head, kind, body in _messages(file):
        if schema is None:
            if kind != _SCHEMA:
                raise Refused("not an Arrow stream: it does not begin with a schema")
            schema = pa.ipc.read_schema(pa.py_buffer(head))
        elif kind == _BATCH:
            batches.append(_batch(offset, head, body, schema))
        elif kind == _DICTIONARY:
            raise Refused("its columns are dictionary-encoded, which are not read: write them as plain values")
    if schema is None:
        raise Refused("not an Arrow stream: it is empty")
    return schema, batches


def _messages(file: Storage) -> Iterator[tuple[int, bytes, int, int]]:
    """(offset, prefix and description, kind, bytes of the body) of each message."""
    offset = len(_MAGIC) if file.read(0, len(_MAGIC)) == _MAGIC else 0
    while offset < file.size:
        prefix = file.read(offset, 8)
        if len(prefix) < 8:
            raise Refused(f"cut: a message at byte {offset} has no end")
        mark, length = struct.unpack("<Ii", prefix)
        if mark != _CONTINUES:
            raise Refused(f"not an Arrow stream: no message begins at byte {offset}")
        if length == 0:
            return
        if not 0 < length <= _DESCRIPTION_BYTES:
            raise Refused(f"a message at byte {offset} is described in {length} bytes")
        description = file.read(offset + 8, length)
        kind, body = _described(description)
        if len(description) < length or offset + 8 + length + body > file.size:
            raise Refused(f"cut: the message at byte {offset} has {body} bytes, and the file ends before")
        yield offset, prefix + description, kind, body
        offset += 8 + length + body


def _described(data: bytes) -> tuple[int, int]:
    """Kind and length of the body of a message: two fields of its flatbuffer. Raises Refused."""
    try:
        table = struct.unpack_from("<I", data, 0)[0]
        fields = table - struct.unpack_from("<i", data, table)[0]
        size = struct.unpack_from("<H", data, fields)[0]
        places = [struct.unpack_from("<H", data, fields + at)[0] if at < size else 0 for at in (6, 10)]
        kind = struct.unpack_from("<B", data, table + places[0])[0] if places[0] else 0
        body = struct.unpack_from("<q", data, table + places[1])[0] if places[1] else 0
    except struct.error:
        raise Refused("not an Arrow stream: a message is described by what is no description") from None
    if body < 0:
        raise Refused(f"a message has {body} bytes")
    return int(kind), int(body)


def _batch(offset: int, head: bytes, body: int, schema: pa.Schema) -> Batch:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, len(head) + body, flags=flags)  # of which only the head is touched
    memory[: len(head)] = head
    held = pa.py_buffer(memory)
    message = pa.ipc.read_message(pa.BufferReader(held))
    try:
        batch = pa.ipc.read_record_batch(message, schema)
    except (pa.ArrowException, OSError) as error:
        if "compress" in str(error):  # there is nothing to decompress but memory that nobody touched
            raise Refused(_COMPRESSED) from None
        raise
    shift, first, last = offset - held.address, held.address + len(head), held.address + held.size

    def span(buffer: pa.Buffer | None) -> Span | None:
        if buffer is None or buffer.size == 0:
            return None
        if not first <= buffer.address <= buffer.address + buffer.size <= last:
            raise Refused(_COMPRESSED)
        return Span(buffer.address + shift, buffer.size)

    columns: dict[str, Node] = {}
    for number, name in enumerate(schema.names):
        array = batch.column(number)
        if can_be_read(array.type):
            columns[name] = _node(array, span)
    return Batch(batch.num_rows, columns)


def can_be_read(type_: pa.DataType) -> bool:
    """Whether values of a type can be had by position."""
    kinds = pa.types
    if kinds.is_struct(type_):
        return all(can_be_read(type_.field(i).type) for i in range(type_.num_fields))
    if kinds.is_list(type_) or kinds.is_large_list(type_) or kinds.is_fixed_size_list(type_):
        return can_be_read(type_.value_type)
    return has_offsets(type_) or kinds.is_null(type_) or kinds.is_boolean(type_) or _width(type_) > 0


def has_offsets(type_: pa.DataType) -> bool:
    """Whether values are stretches of bytes."""
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
    return any(kind(type_) for kind in kinds)


def _width(type_: pa.DataType) -> int:
    if pa.types.is_primitive(type_) or pa.types.is_fixed_size_binary(type_) or pa.types.is_decimal(type_):
        return int(type_.bit_width) // 8
    return 0


def _node(array: Any, span: Any) -> Node:
    kinds, type_ = pa.types, array.type
    if kinds.is_null(type_):
        return Node(type_, len(array), None, (), ())
    buffers = array.buffers()
    validity = span(buffers[0])
    if array.null_count and validity is None:
        raise Refused(f"{array.null_count} values of a column are said to be null, and not which")
    own = 1 if kinds.is_struct(type_) or kinds.is_fixed_size_list(type_) else 2
    own = 3 if has_offsets(type_) else own
    held = tuple(span(buffer) or Span(0, 0) for buffer in buffers[1:own])
    children: tuple[Node, ...] = ()
    if kinds.is_struct(type_):
        children = tuple(_node(array.field(i), span) for i in range(type_.num_fields))
    elif kinds.is_list(type_) or kinds.is_large_list(type_) or kinds.is_fixed_size_list(type_):
        children = (_node(array.values, span),)
    return Node(type_, len(array), validity, held, children)

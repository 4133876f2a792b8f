"""The messages of an Arrow stream or file, without its rows: file -> schema, and where each batch is.

pyarrow reads the descriptions themselves. We read of them what pyarrow does not show: which bytes of the file a batch
is, and how large its compressed buffers become.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from orchdata.loaders.errors import one_line, pass_trouble
from orchdata.loaders.shards.parquet.file import Refused
from orchdata.loaders.storage.storage import Storage

_MAGIC: Final = b"ARROW1"
_MAGIC_BYTES: Final = 8  # with two of padding
_CONTINUES: Final = 0xFFFFFFFF
_DESCRIPTION_BYTES: Final = 64 << 20
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_OLD_COMPRESSION: Final = b"ARROW:experimental_compression"
"""How pyarrow 0.17 marked compressed buffers."""


class Message(NamedTuple):
    """A message of a file.

    Attributes:
        offset, body, stop: where it, its body, and what follows it begin.
        kind: its type.
        num_rows: of a batch.
        packed: (offset, size) in the body of each buffer, if these are compressed.
    """

    offset: int
    body: int
    stop: int
    kind: int
    num_rows: int = 0
    packed: Sequence[tuple[int, int]] = ()

    def unpacked_bytes(self, data: bytes) -> int:
        """Return the bytes of the message, `data`, as its buffers say that they are once they are decompressed.

        Raises Refused for an offset or size that is impossible.
        """
        total, start = len(data), self.body - self.offset
        for offset, size in self.packed:
            if not 0 <= offset <= len(data) - start - 8 * bool(size):
                raise Refused(f"a compressed buffer at byte {offset} of {len(data) - start}")
            stated = struct.unpack_from("<q", data, start + offset)[0] if size else -1
            if stated < -1:  # -1: it is stored as it is
                raise Refused(f"a compressed buffer of {stated} bytes")
            total += max(0, stated)
        return total


class Layout(NamedTuple):
    """The messages of a file.

    Attributes:
        schema: of all columns.
        head: the message with the schema.
        batches: the record batches.
        dictionaries: of each batch, the dictionaries that it may use.
    """

    schema: pa.Schema
    head: Message
    batches: list[Message]
    dictionaries: list[list[Message]]


def read_layout(file: Storage) -> Layout:
    """Read the description of each message. Raises Refused: it is not an Arrow file, cut, or malformed."""
    is_file = file.read(0, len(_MAGIC)) == _MAGIC
    if is_file and file.read(file.size - len(_MAGIC), len(_MAGIC)) != _MAGIC:
        raise Refused(f"cut: it begins with {_MAGIC.decode()}, as an Arrow file does, and does not end with it")
    messages = _messages(file, _MAGIC_BYTES if is_file else 0)
    head = next(messages, None)
    if head is None or head.kind != _SCHEMA:
        raise Refused("not an Arrow stream: it does not begin with a schema")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(file.read(head.offset, head.stop - head.offset)))
    except Exception as error:  # noqa: BLE001 - extension types run code of other packages
        pass_trouble(error)
        raise Refused(f"its schema cannot be read: {one_line(error)}") from None
    batches: list[Message] = []
    dictionaries: list[Message] = []
    earlier: list[int] = []
    for message in messages:
        if message.kind == _BATCH:
            batches.append(message)
            earlier.append(len(dictionaries))
        elif message.kind == _DICTIONARY:
            dictionaries.append(message)
        else:
            raise Refused(f"a message of kind {message.kind} at byte {message.offset}, where a batch should be")
    # In a file, a batch may use a dictionary that follows it.
    return Layout(schema, head, batches, [dictionaries if is_file else dictionaries[:each] for each in earlier])


def _messages(file: Storage, offset: int) -> Iterator[Message]:
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
        try:
            message = _described(file.read(start, length), offset)
        except struct.error as error:
            raise Refused(f"the description of the message at byte {offset} is damaged: {error}") from None
        if not message.body <= message.stop <= file.size:
            size = message.stop - message.body
            raise Refused(f"cut: the message at byte {offset} has {size} bytes, and the file ends before its end")
        yield message
        offset = message.stop


def _described(data: bytes, offset: int) -> Message:
    """Return what a description says, a flatbuffer. Raises struct.error, and Refused."""
    root = struct.unpack_from("<I", data)[0]
    kind, header, body = _number(data, root, 1, "<B"), _below(data, root, 2), offset + 8 + len(data)
    stop = body + _number(data, root, 3, "<q")
    if kind == _SCHEMA and _number(data, header, 0, "<h"):
        raise Refused("its numbers are big-endian: write it on a little-endian machine")
    if kind not in (_BATCH, _DICTIONARY):
        return Message(offset, body, stop, kind)
    batch = header if kind == _BATCH else _below(data, header, 1)
    num_rows = _number(data, batch, 0, "<q")
    if num_rows < 0:
        raise Refused(f"a batch of {num_rows} rows at byte {offset}")
    packed: tuple[tuple[int, int], ...] = ()
    if _below(data, batch, 3) or _OLD_COMPRESSION in data:
        buffers = _below(data, batch, 2)
        (count,) = struct.unpack_from("<I", data, buffers)
        packed = tuple(struct.iter_unpack("<qq", data[buffers + 4 : buffers + 4 + 16 * count]))
    return Message(offset, body, stop, kind, num_rows, packed)


def _number(data: bytes, table: int, field: int, form: str) -> Any:
    """Return a number of a table, in a format of `struct`; 0 if the table does not have the field."""
    at = _place(data, table, field)
    return struct.unpack_from(form, data, at)[0] if at else 0


def _below(data: bytes, table: int, field: int) -> int:
    """Return where a table or vector of a table is; 0 if there is none."""
    at = _place(data, table, field)
    return at + int(struct.unpack_from("<I", data, at)[0]) if at else 0


def _place(data: bytes, table: int, field: int) -> int:
    fields = table - int(struct.unpack_from("<i", data, table)[0])
    (size,) = struct.unpack_from("<H", data, fields)
    entry = 4 + 2 * field
    offset = int(struct.unpack_from("<H", data, fields + entry)[0]) if entry < size else 0
    return table + offset if offset else 0

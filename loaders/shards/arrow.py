"""Arrow shards, as Hugging Face's `datasets` saves them on disk: one sample per row, read by row number.

    file --messages--> schema, and where each batch is
    description of a batch --pyarrow--> arrays over empty memory --where their buffers are--> bytes of the rows

pyarrow reads the descriptions. We read of them what it does not show: which bytes of the file a batch is, and how large
its compressed buffers become. Reading a row reads only its own bytes; a batch that is compressed, or has dictionaries
or views, is read whole. A file is not mapped: one that is truncated would end the process.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from orchdata.loaders.errors import one_line, pass_trouble
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.cells import Refused, field_clash
from orchdata.loaders.shards.columns import COLUMNS, ColumnShard, DecodedColumn, RowReader
from orchdata.loaders.shards.fields import ALL_AS_NAMED, ColumnRules
from orchdata.loaders.storage.storage import Storage

_MAGIC: Final = b"ARROW1"
_MAGIC_BYTES: Final = 8  # with two of padding
_CONTINUES: Final = 0xFFFFFFFF
_DESCRIPTION_BYTES: Final = 64 << 20
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_OLD_COMPRESSION: Final = b"ARROW:experimental_compression"
"""How pyarrow 0.17 marked compressed buffers."""


class Message(NamedTuple):
    """A message of a file: where it, its body, and what follows it begin; `packed` has (offset, size) in the body of
    each buffer, if these are compressed.
    """

    offset: int
    body: int
    stop: int
    kind: int
    num_rows: int = 0
    packed: Sequence[tuple[int, int]] = ()

    def unpacked_bytes(self, data: bytes) -> int:
        """Return the bytes of the message, `data`, with its buffers as large as they say that they become. Raises
        Refused.
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
    """The messages of a file: `head` has the schema; of each batch, the dictionaries that it may use."""

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


_NORESERVE: Final = 0x4000
"""MAP_NORESERVE of Linux: address space that takes no memory."""
_REMEMBERED: Final = 1024
_SCAN_ROWS: Final = 16
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
    """An array of a batch, as pyarrow describes it: with its values (`array`) if the batch was read whole, else with
    the places of its buffers.
    """

    array: pa.Array | None
    type: pa.DataType
    kind: int
    length: int
    buffers: list[pa.Buffer | Place | None]
    children: list[Node]


class ArrowReader(RowReader):
    """An Arrow file whose descriptions were read; a batch is a row group. Safe from many threads."""

    kind = "Arrow stream"

    def __init__(self, file: Storage, limits: Limits, rules: ColumnRules = ALL_AS_NAMED) -> None:
        """Read its layout. Raises Refused, or pyarrow's own errors."""
        self._file = file
        self._layout = layout = read_layout(file)
        super().__init__(file, limits, rules, layout.schema, [batch.num_rows for batch in layout.batches], 1)
        self._most_bytes = limits.column_bytes  # of rows of one column, and of a batch that is read whole
        self._whole_names = {field.name for field in layout.schema if reading_of(field.type) == WHOLE}
        self._nodes: dict[tuple[int, str], Node] = {}
        if (clash := field_clash(self.columns)) is not None:
            raise Refused(clash)
        # Columns of types that are not read are ignored, if only a function of the user's wants them.
        types = dict(zip(self.schema.names, self.schema.types, strict=True))
        for column in [each for each in self.columns if reading_of(types[each.name]) == NEVER]:
            if column.form != "words" or not column.has_nulls:
                raise Refused(
                    f"column {column.name!r} is {str(types[column.name])[:100]}, which is not supported: write it as "
                    "plain strings, bytes and lists, or leave it out"
                )
            self.columns.remove(column)
            self.ignored.append(column.name)
        counts = Counter(self.schema.names)
        for name in (*(column.name for column in self.columns), *(() if self.key is None else (self.key,))):
            if counts[name] > 1:
                raise Refused(f"two columns are called {name!r}: give each a different name")

    def check(self) -> None:
        super().check()
        if not self.plausible_rows():
            rows, size = self.promised_rows, self._size
            raise Refused(f"{rows} rows in a file of {size} bytes, above Limits.decompression_ratio")

    def batches(self, group: int, names: Sequence[str], *, scan: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a batch, a few at a time. Raises Refused if its offsets point outside of it."""
        rows, stored = self._layout.batches[group].num_rows, [self._stored_names.get(name, name) for name in names]
        whole = self._whole(group, stored) if rows and self._is_whole(group, stored) else None
        start, most = 0, _SCAN_ROWS
        while start < rows:
            length = min(most, rows - start)
            try:
                if whole is not None:
                    arrays = [array.slice(start, length) for array in whole]
                else:
                    arrays = [self._take(group, name, start, length) for name in stored]
            except (ValueError, pa.ArrowException) as error:
                if isinstance(error, TooLarge) and length > 1:
                    most = length // 2
                    continue
                raise Refused(f"batch {group}, rows {start} to {start + length}: {one_line(error)}") from None
            yield pa.RecordBatch.from_arrays(arrays, names=list(names))
            start += length
            most = min(_SCAN_ROWS, 2 * most)

    def cell(self, shard: int, group: int, name: str, row: int) -> pa.Scalar:
        """Read one cell of a batch; a column that is read whole is kept, under the number of the shard."""
        stored = self._stored_names.get(name, name)
        if not self._is_whole(group, [stored]):
            return self._take(group, stored, row, 1)[0]

        def decoded() -> tuple[DecodedColumn, int]:
            column, batch = DecodedColumn(self._whole(group, [stored])), self._layout.batches[group]
            return column, max(column.num_bytes, batch.stop - batch.offset)

        return COLUMNS.made((shard, group, name), decoded)[row]

    def _is_whole(self, batch: int, names: Sequence[str]) -> bool:
        """Return whether a batch can only be read whole, for these columns."""
        if self._layout.batches[batch].packed or self._layout.dictionaries[batch]:
            return True
        return any(name in self._whole_names for name in names)

    def _whole(self, batch: int, names: Sequence[str]) -> list[pa.Array]:
        """Read columns of a batch, decompressed and with their dictionaries. Raises Refused if it is damaged or too
        large.
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
            nodes = [_node(table.column(name), message.num_rows) for name in names]
            return [self._taken(message, node, 0, message.num_rows) for node in nodes]
        except _BAD as error:
            raise self._refused(message, error) from None

    def _take(self, batch: int, name: str, start: int, length: int) -> pa.Array:
        """Read values start to start + length of a column that need not be read whole. Raises Refused: the description
        of the batch is impossible; ValueError: its offsets point outside of it.
        """
        message, node = self._layout.batches[batch], self._nodes.get((batch, name))
        if node is None:
            if len(self._nodes) >= _REMEMBERED:
                self._nodes.clear()
            node = self._nodes[batch, name] = self._described(message, name)
        return self._taken(message, node, start, length)

    def _described(self, message: Message, name: str) -> Node:
        described = self._file.read(message.offset, message.body - message.offset)
        # Shared, so that a limit of the memory of a process does not count it; given back at once.
        memory = mmap.mmap(-1, message.stop - message.offset, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)
        memory[: len(described)] = described
        try:
            whole = pa.py_buffer(memory)
            array = pa.ipc.read_record_batch(whole, self._layout.schema).column(name)
            return _node(array, message.num_rows, whole.address)
        except _BAD as error:
            raise self._refused(message, error) from None

    def _refused(self, message: Message, error: Exception) -> Refused:
        pass_trouble(error)
        return Refused(f"batch {self._layout.batches.index(message)}, at byte {message.offset}: {one_line(error)}")

    def _taken(self, message: Message, node: Node, start: int, length: int) -> pa.Array:
        if length > self._most_bytes:  # for types of no bytes, or of bits
            raise TooLarge(f"{length} values, above Limits.column_bytes={self._most_bytes}")
        return _Rows(self._file, message, self._most_bytes).take(node, start, length)


class _Rows:
    """Reads rows of one column."""

    def __init__(self, file: Storage, message: Message, most_bytes: int) -> None:
        self._file = file
        self._message = message
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
        message, at = self._message, buffer.offset
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
    """Describe a column of so many rows, or an array below it; `address` is that of a message in memory that has no
    values. Raises Refused or ArrowInvalid if buffers are too short for the rows.
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


class ArrowShard(ColumnShard):
    """A file of an Arrow stream."""

    reader = ArrowReader

    def _scalar(self, reader: ArrowReader, group: int, name: str, row: int) -> pa.Scalar:
        cell = reader.cell(self._number, group, name, row)
        self._file.check_unchanged()
        return cell

"""Tables of a flatbuffer, read by position. Every offset is checked: the bytes may be hostile."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from orchdata.loaders.shards.parquet.file import Refused


class Table:
    """One table of a flatbuffer; fields are given by their number in the schema of the format.

    Args:
        data: the whole flatbuffer.
        at: offset of the table; None for the root.
    """

    def __init__(self, data: bytes, at: int | None = None) -> None:
        """Read the table's header. Raises Refused, like all methods, if an offset is outside of the data."""
        self._data = data
        self._at: int = self._unpack("<I", 0) if at is None else at
        self._fields: int = self._at - self._unpack("<i", self._at)
        self._fields_size: int = self._unpack("<H", self._fields)

    def number(self, field: int, form: str) -> int:
        """Return a number, in a format of `struct`; 0 if the table does not have the field."""
        offset = self._offset(field)
        return 0 if offset is None else int(self._unpack(form, offset))

    def table(self, field: int) -> Table | None:
        """Return a table, or None if there is none."""
        offset = self._offset(field)
        return None if offset is None else Table(self._data, offset + self._unpack("<I", offset))

    def tables(self, field: int) -> Iterator[Table]:
        """Yield the tables of a vector; none if there is no vector."""
        start, count = self._vector(field, 4)
        for at in range(start, start + 4 * count, 4):
            yield Table(self._data, at + self._unpack("<I", at))

    def items(self, field: int, form: str) -> Iterator[tuple[Any, ...]]:
        """Return the items of a vector, each in a format of `struct`; none if there is no vector."""
        size = struct.calcsize(form)
        start, count = self._vector(field, size)
        return struct.iter_unpack(form, memoryview(self._data)[start : start + size * count])

    def size(self, field: int, item_bytes: int = 1) -> int:
        """Return the bytes of a vector or string; 0 if there is none."""
        return item_bytes * self._vector(field, item_bytes)[1]

    def _vector(self, field: int, item_bytes: int) -> tuple[int, int]:
        """Return the offset of the items of a vector, and their number."""
        offset = self._offset(field)
        if offset is None:
            return 0, 0
        start = offset + self._unpack("<I", offset)
        count = self._unpack("<I", start)
        self._check(start + 4, item_bytes * count)
        return start + 4, count

    def _offset(self, field: int) -> int | None:
        entry = 4 + 2 * field
        offset = self._unpack("<H", self._fields + entry) if entry + 2 <= self._fields_size else 0
        return self._at + offset if offset else None

    def _unpack(self, form: str, at: int) -> Any:
        self._check(at, struct.calcsize(form))
        return struct.unpack_from(form, self._data, at)[0]

    def _check(self, at: int, size: int) -> None:
        if not 0 <= at <= len(self._data) - size:
            raise Refused(f"a description of {len(self._data)} bytes points to its bytes {at} to {at + size}")

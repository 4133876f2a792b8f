"""The schema of an Arrow stream: its description -> pyarrow's schema, after a check of the memory that it takes.

pyarrow checks that each part of a description is inside of it, but not that it is referenced only once: a field, a name
or a metadata entry that is listed a million times would be created a million times.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from orchdata.loaders.errors import one_line, pass_trouble
from orchdata.loaders.shards.arrow.flatbuffer import Table
from orchdata.loaders.shards.parquet.file import Refused

_FIELD_BYTES: Final = 16
"""A lower bound of the bytes of a field in a description."""
_NOTE_BYTES: Final = 8
_DEPTH: Final = 100
_TIMESTAMP, _UNION = 10, 14
_ITEM_BYTES: Final = {_TIMESTAMP: 1, _UNION: 4}
"""Bytes per item of the vector in field 1 of these types: the name of a time zone, codes."""


def read_schema(message: bytes, header: Table) -> pa.Schema:
    """Read the schema that a message describes.

    Args:
        message: the whole message.
        header: the description of the schema in it.

    Raises:
        Refused: it is malformed, or references parts of itself repeatedly.
    """
    if header.number(0, "<h"):
        raise Refused("its numbers are big-endian: write it on a little-endian machine")
    _Described(len(message)).add_fields(header, 1, 0)
    try:
        return pa.ipc.read_schema(pa.py_buffer(message))
    except Exception as error:  # noqa: BLE001 - extension types run code of other packages
        pass_trouble(error)
        raise Refused(f"its schema cannot be read: {one_line(error)}") from None


class _Described:
    """Counts the bytes that a schema describes, each part as often as it is referenced, up to those of its message."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._left = most_bytes

    def add_fields(self, table: Table, field: int, depth: int) -> None:
        """Count the fields of a schema, or below a field, and their metadata."""
        if depth > _DEPTH:
            raise Refused(f"its types are nested more than {_DEPTH} deep")
        for note in table.tables(field + 1):
            self._add(_NOTE_BYTES + note.size(0) + note.size(1))
        for child in table.tables(field):
            self._add(_FIELD_BYTES + child.size(0))
            type_ = child.table(3)
            kind = child.number(2, "<B")
            if type_ is not None and kind in _ITEM_BYTES:
                self._add(type_.size(1, _ITEM_BYTES[kind]))
            self.add_fields(child, 5, depth + 1)

    def _add(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise Refused(
                f"its schema describes more than fits in its {self._most_bytes} bytes, by repeated references"
            )

"""The schema of an Arrow stream: its description -> pyarrow's schema, once it is known to take no more than it should.

pyarrow checks that each part of a description lies inside of it, and not that it is named once: a field, a name or a
note that is listed a million times would be made as often.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from orchdata.loaders.errors import one_line, pass_trouble
from orchdata.loaders.shards.arrow.flatbuffer import Table
from orchdata.loaders.shards.parquet.file import Refused

_FIELD_BYTES: Final = 16
"""Less than any field takes in a description."""
_NOTE_BYTES: Final = 8
_DEPTH: Final = 100
_TIMESTAMP, _UNION = 10, 14
_OF_TYPES: Final = {_TIMESTAMP: 1, _UNION: 4}
"""Bytes of an item of what types of any length hold in their field 1: the name of a zone, codes."""


def read_schema(message: bytes, header: Table) -> pa.Schema:
    """The schema that a message describes.

    Args:
        message: all of it.
        header: the description of the schema in it.

    Raises:
        Refused: it makes no sense, or repeats itself.
    """
    if header.number(0, "<h"):
        raise Refused("its numbers are big-endian: write it on a little-endian machine")
    _Described(len(message)).add_fields(header, 1, 0)
    try:
        return pa.ipc.read_schema(pa.py_buffer(message))
    except Exception as error:  # noqa: BLE001 - types that extend Arrow are made by code of others
        pass_trouble(error)
        raise Refused(f"its schema cannot be read: {one_line(error)}") from None


class _Described:
    """What a schema describes, each part as often as it is named, held against the bytes in which it does."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._left = most_bytes

    def add_fields(self, table: Table, field: int, depth: int) -> None:
        """The fields of a schema, or below a field, and what is noted of either."""
        if depth > _DEPTH:
            raise Refused(f"its types are nested more than {_DEPTH} deep")
        for note in table.tables(field + 1):
            self._add(_NOTE_BYTES + note.size(0) + note.size(1))
        for child in table.tables(field):
            self._add(_FIELD_BYTES + child.size(0))
            type_ = child.table(3)
            kind = child.number(2, "<B")
            if type_ is not None and kind in _OF_TYPES:
                self._add(type_.size(1, _OF_TYPES[kind]))
            self.add_fields(child, 5, depth + 1)

    def _add(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise Refused(f"its schema describes more than {self._most_bytes} bytes can, by naming parts of it again")

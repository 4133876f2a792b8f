"""The layout of arrays of a type in a batch: type -> its buffers, their lengths, and its child arrays."""

from __future__ import annotations

from typing import Final, NamedTuple

import pyarrow as pa

from orchdata.loaders.shards.parquet.file import Refused

_OFFSETS: Final = {True: (64, 1), False: (32, 1)}


class Shape(NamedTuple):
    """The parts of an array of a type in a batch.

    Attributes:
        type: of its values.
        has_validity: whether its first buffer marks the values that are null.
        buffers: the others: bits per value, and the number of values more than the array has.
        has_more: whether additional buffers follow; the batch gives their number.
        children: child arrays, and the least number of values of each per value of the array.
        is_read: whether values can be read by position.
    """

    type: pa.DataType
    has_validity: bool
    buffers: tuple[tuple[int, int], ...]
    has_more: bool
    children: tuple[tuple[Shape, int], ...]
    is_read: bool

    @property
    def is_null(self) -> bool:
        """Whether all values are null, without any buffer."""
        return bool(pa.types.is_null(self.type))

    @property
    def has_offsets(self) -> bool:
        """Whether the first buffer has the offset of each value, in bytes or in a child array."""
        return bool(self.buffers) and self.buffers[0][1] > 0


def shape_of(type_: pa.DataType, *, old_unions: bool = False) -> Shape:
    """Return the shape of a type.

    Args:
        old_unions: whether unions have a validity buffer, as before version 5 of the format.

    Raises:
        Refused: its layout is unknown.
    """
    kinds = pa.types

    def shape(
        *buffers: tuple[int, int],
        validity: bool = True,
        more: bool = False,
        below: tuple[pa.DataType, ...] = (),
        each: int = 0,
        read: bool = False,
    ) -> Shape:
        children = tuple((shape_of(child, old_unions=old_unions), each) for child in below)
        return Shape(type_, validity, buffers, more, children, read and all(child.is_read for child, _ in children))

    # Types that are stored as another type.
    if isinstance(type_, pa.BaseExtensionType):
        return shape_of(type_.storage_type, old_unions=old_unions)._replace(type=type_, is_read=False)
    if kinds.is_dictionary(type_):
        return shape_of(type_.index_type)._replace(type=type_, is_read=False)

    # Types with child arrays, with offsets, and with views.
    if kinds.is_null(type_):
        return shape(validity=False, read=True)
    if kinds.is_struct(type_):
        return shape(below=_fields(type_), each=1, read=True)
    if kinds.is_union(type_):
        is_dense = type_.mode == "dense"
        buffers = ((8, 0), (32, 0)) if is_dense else ((8, 0),)
        return shape(*buffers, validity=old_unions, below=_fields(type_), each=0 if is_dense else 1)
    if kinds.is_fixed_size_list(type_):
        if type_.list_size < 0:
            raise Refused(f"lists of {type_.list_size} items")
        return shape(below=(type_.value_type,), each=type_.list_size, read=True)
    if kinds.is_list(type_) or kinds.is_large_list(type_) or kinds.is_map(type_):
        wide = bool(kinds.is_large_list(type_))
        return shape(_OFFSETS[wide], below=_fields(type_), read=not kinds.is_map(type_))
    if _is_any(type_, "binary", "string", "large_binary", "large_string"):
        return shape(_OFFSETS[_is_any(type_, "large_binary", "large_string")], (0, 0), read=True)
    if _is_any(type_, "list_view", "large_list_view"):
        width = 64 if _is_any(type_, "large_list_view") else 32
        return shape((width, 0), (width, 0), below=(type_.value_type,))
    if _is_any(type_, "binary_view", "string_view"):
        return shape((128, 0), more=True)
    if kinds.is_run_end_encoded(type_):
        return shape(validity=False, below=(type_.run_end_type, type_.value_type))
    return shape((_bits(type_), 0), read=_bits(type_) > 0)


def _fields(type_: pa.DataType) -> tuple[pa.DataType, ...]:
    return tuple(type_.field(i).type for i in range(type_.num_fields))


def _is_any(type_: pa.DataType, *kinds: str) -> bool:
    return any(getattr(pa.types, f"is_{kind}")(type_) for kind in kinds)


def _bits(type_: pa.DataType) -> int:
    """Return the bits of one value. Raises Refused if values have different lengths."""
    try:
        bits = int(type_.bit_width)
    except ValueError:
        bits = -1
    if bits < 0:
        raise Refused(f"a column is {str(type_)[:100]}, which is not supported: leave it out")
    return bits

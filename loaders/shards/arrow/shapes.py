"""How the arrays of a type lie in a batch: type -> which buffers, how long, and which arrays below."""

from __future__ import annotations

from typing import Final, NamedTuple

import pyarrow as pa

from orchdata.loaders.shards.parquet.file import Refused

_OFFSETS: Final = {True: (64, 1), False: (32, 1)}


class Shape(NamedTuple):
    """What a batch holds for an array of a type.

    Attributes:
        type: of its values.
        has_validity: whether its first buffer says which values are null.
        buffers: the others: bits of a value, and how many more values than the array has.
        has_more: whether any number of further buffers follows, as the batch counts them.
        children: arrays below it, and how many values each has at least for one of its own.
        is_read: whether values can be had by position.
    """

    type: pa.DataType
    has_validity: bool
    buffers: tuple[tuple[int, int], ...]
    has_more: bool
    children: tuple[tuple[Shape, int], ...]
    is_read: bool

    @property
    def is_null(self) -> bool:
        """Whether all values are null, and no buffer holds any."""
        return bool(pa.types.is_null(self.type))

    @property
    def has_offsets(self) -> bool:
        """Whether offsets say where each value begins, in bytes or in an array below."""
        return bool(self.buffers) and self.buffers[0][1] > 0


def shape_of(type_: pa.DataType, *, old_unions: bool = False) -> Shape:
    """The shape of a type.

    Args:
        old_unions: whether unions have a validity buffer, as they had before version 5 of the format.

    Raises:
        Refused: nobody knows how it lies.
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

    if isinstance(type_, pa.BaseExtensionType):
        return shape_of(type_.storage_type, old_unions=old_unions)._replace(type=type_, is_read=False)
    if kinds.is_dictionary(type_):
        return shape_of(type_.index_type)._replace(type=type_, is_read=False)
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
    """Of one value. Raises Refused where values are not all as long."""
    try:
        bits = int(type_.bit_width)
    except ValueError:
        bits = -1
    if bits < 0:
        raise Refused(f"a column is {str(type_)[:100]}, which is not known: leave it out")
    return bits

"""The user's own columns as an index has them: a type for all shards, and the bytes after the table of the index.

A column has integers, floats, strings or booleans, and nulls. Integers and floats together are floats. Other mixtures
are an error, because a comparison would silently leave out a part of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from orchdata.loaders.errors import one_line

MOST_BYTES: Final = 1024
"""Most bytes of a string."""
TYPES: Final = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.large_string(),
}
_KINDS: Final = {type_: kind for kind, type_ in TYPES.items()}


class Piece(NamedTuple):
    """The column of one shard.

    Attributes:
        url: of the shard.
        values: of one of the types.
        is_text: whether it is text that may stand for numbers, such as cells of CSV.
    """

    url: str
    values: pa.Array
    is_text: bool


def fields_of(columns: pa.RecordBatch) -> dict[str, dict[str, Any]]:
    """Return the type of each column, and the number of its nulls, JSON-safe."""
    return {
        name: {"type": _KINDS[column.type], "nulls": column.null_count}
        for name, column in zip(columns.schema.names, columns.columns, strict=True)
    }


def packed_columns(columns: pa.RecordBatch) -> tuple[dict[str, Any], pa.Buffer]:
    """Return what the head of an index says of columns, and their bytes, which end its body."""
    batch = columns.serialize()
    kinds = [_KINDS[type_] for type_ in columns.schema.types]
    return {"names": columns.schema.names, "kinds": kinds, "bytes": batch.size}, batch


def stored_columns(values: Mapping[str, Any], body: memoryview, *, check: bool) -> tuple[pa.RecordBatch | None, int]:
    """Return the columns at the end of the body of an index, and the number of their bytes; None and 0 if it has none.

    Args:
        values: of its head.
        check: check all offsets, and that strings are UTF-8.

    Raises:
        ValueError: they are not what `packed_columns` returned.
    """
    if "own" not in values:
        return None, 0
    try:
        names, kinds, size = (values["own"][name] for name in ("names", "kinds", "bytes"))
        if not 0 <= size <= len(body):
            raise ValueError(f"they have {size} bytes of {len(body)}")
        schema = pa.schema([(name, TYPES[kind]) for name, kind in zip(names, kinds, strict=True)])
        batch = pa.ipc.read_record_batch(pa.py_buffer(body[len(body) - size :]), schema)
        if batch.num_rows != values["size"]["rows"]:
            raise ValueError("they are of other rows")
        if check:
            batch.validate(full=True)
    except (ValueError, LookupError, TypeError, OSError, pa.ArrowException) as error:
        raise ValueError(f"columns of index_fields: {one_line(error)}") from error
    return batch, size


def column_of_values(values: Sequence[Any], url: str, keys: Sequence[str], name: str) -> pa.Array:
    """Return a column of Python values of one type. Raises ValueError."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds <= {bool, int, float, str} or (len(kinds) > 1 and kinds != {int, float}):
        raise _wrong(url, name, f"is {' and '.join(sorted(kind.__name__ for kind in kinds))}")
    try:
        return column_of_array(pa.array(values), (), url, keys, name)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise _wrong(url, name, f"cannot be kept: {one_line(error)}") from error


def column_of_array(array: pa.Array, labels: Sequence[str], url: str, keys: Sequence[str], name: str) -> pa.Array:
    """Return a column of a file, as one of the types. Names take the place of numbers of classes; times, dates and the
    like are strings as Python writes them. Raises ValueError.
    """
    import pyarrow.compute as pc

    if pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    type_, kinds, text = array.type, pa.types, TYPES["str"]
    try:
        if labels:
            numbers = pc.if_else(pc.less(array, 0), None, array)  # -1 is "no class"
            array = pa.array(list(labels), text).take(numbers)
        elif kinds.is_null(type_) or kinds.is_boolean(type_):
            return array
        elif kinds.is_integer(type_):
            return array.cast(TYPES["int"])
        elif kinds.is_floating(type_) or kinds.is_decimal(type_):
            return array.cast(TYPES["float"])
        elif kinds.is_string(type_) or kinds.is_large_string(type_) or kinds.is_string_view(type_):
            array.validate(full=True)
            array = array.cast(text)
        elif kinds.is_temporal(type_):
            array = pa.array([None if value is None else str(value) for value in array.to_pylist()], text)
        else:
            raise _wrong(url, name, f"is {str(type_)[:80]}")
    except (pa.ArrowException, ArithmeticError, UnicodeDecodeError) as error:
        raise _wrong(url, name, f"cannot be kept: {one_line(error)}") from error
    lengths = pc.fill_null(pc.binary_length(array), 0)
    most = pc.max(lengths).as_py() or 0
    if most > MOST_BYTES:
        at = pc.index(lengths, most).as_py()
        raise _wrong(f"{url}: sample {keys[at]!r}", name, f"has {most} bytes, above {MOST_BYTES}")
    return array


def joined(pieces: Sequence[Piece], name: str) -> list[pa.Array]:
    """Return the columns of all shards with one type. Raises ValueError, naming the shards whose types differ."""
    kinds = [_text_kind(piece.values) if piece.is_text else _KINDS[piece.values.type] for piece in pieces]
    if "str" in kinds:  # text stands for numbers only if all of it does, and all other shards have numbers
        kinds = ["str" if piece.is_text and kind != "null" else kind for piece, kind in zip(pieces, kinds, strict=True)]
    found = {kind: piece.url for piece, kind in zip(reversed(pieces), reversed(kinds), strict=True) if kind != "null"}
    if len(found) > 1 and found.keys() != {"int", "float"}:
        (one, first), (other, second) = sorted(found.items())[:2]
        raise ValueError(
            f"index_fields: {name!r} is {one} in {first} and {other} in {second}: write it with one type, or leave it "
            "out"
        )
    kind = "float" if len(found) > 1 else next(iter(found), "null")
    return [_converted(piece, kind, name) for piece in pieces]


def _converted(piece: Piece, kind: str, name: str) -> pa.Array:
    if kind == "null":
        return pa.nulls(len(piece.values))
    values = _stripped(piece.values) if piece.is_text else piece.values
    try:
        return values.cast(TYPES[kind])
    except pa.ArrowException as error:
        raise _wrong(piece.url, name, f"has an integer that no float equals: {one_line(error)}") from error


def _text_kind(texts: pa.Array) -> str:
    """Return the type that all of these texts can be read as. A number does not begin with a zero before digits."""
    import pyarrow.compute as pc

    texts = _stripped(texts)
    if texts.null_count == len(texts):
        return "null"
    if pc.any(pc.match_substring_regex(texts, r"^[+-]?0[0-9]")).as_py():
        return "str"
    for kind in ("int", "float"):
        try:
            texts.cast(TYPES[kind])
        except pa.ArrowException:
            continue
        return kind
    return "str"


def _stripped(texts: pa.Array) -> pa.Array:
    """Return texts without white space around them; empty ones are null."""
    import pyarrow.compute as pc

    if pa.types.is_null(texts.type):
        return texts
    texts = pc.utf8_trim_whitespace(texts)
    return pc.if_else(pc.equal(pc.binary_length(texts), 0), pa.scalar(None, texts.type), texts)


def _wrong(where: str, name: str, what: str) -> ValueError:
    return ValueError(
        f"index_fields: {where}: {name!r} {what}; the index keeps numbers, booleans and strings of up to {MOST_BYTES} "
        "bytes, of one type in all shards: leave it out of index_fields"
    )

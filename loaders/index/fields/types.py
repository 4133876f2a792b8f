"""Types of the user's own columns: values of one shard -> a column; columns of all shards -> one type.

A column has integers, floats, strings or booleans, and nulls. Integers and floats together are floats. Other mixtures
are an error, because a comparison would silently leave out a part of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
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
_NUMBERS: Final = frozenset(("int", "float"))
_PYTHON: Final = {bool: "bool", int: "int", float: "float", str: "str"}
_INT64: Final = range(-(1 << 63), 1 << 63)


class Piece(NamedTuple):
    """The column of one shard.

    Attributes:
        url: of the shard.
        values: of one of `TYPES`.
        is_text: whether it is text that may stand for numbers, such as cells of CSV.
    """

    url: str
    values: pa.Array
    is_text: bool


def column_of_values(values: Sequence[Any], url: str, keys: Sequence[str], name: str) -> pa.Array:
    """Return a column of Python values. Raises ValueError for other types, mixed types, and long strings."""
    kinds: dict[str, int] = {}  # and the first sample that has it
    for at, value in enumerate(values):
        if value is not None:
            kind = _PYTHON.get(type(value))
            if kind is None:
                raise _wrong(url, name, f"has {_article(type(value).__name__)} of JSON in it", keys[at])
            if kind == "int" and value not in _INT64:
                raise _wrong(url, name, "has an integer that does not fit 64 bits", keys[at])
            kinds.setdefault(kind, at)
    if len(kinds) > 1 and not kinds.keys() <= _NUMBERS:
        (one, _), (other, at) = sorted(kinds.items(), key=lambda item: item[1])[:2]
        raise _wrong(url, name, f"is {_article(other)}, and {_article(one)} in an earlier sample", keys[at])
    kind = "float" if len(kinds) > 1 else next(iter(kinds), "null")
    if kind == "str":
        return _strings(pa.array([_valid(value) for value in values], TYPES["str"]), url, keys, name)
    return pa.array(values, TYPES[kind])


def column_of_array(array: pa.Array, labels: Sequence[str], url: str, keys: Sequence[str], name: str) -> pa.Array:
    """Return a column of a file, as one of `TYPES`. Names take the place of numbers of classes; times, dates and the
    like are strings as Python writes them. Raises ValueError.
    """
    import pyarrow.compute as pc

    if pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    type_, kinds = array.type, pa.types
    try:
        if labels:
            numbers = pc.if_else(pc.less(array, 0), None, array)  # -1 is "no class"
            return _strings(pa.array(list(labels), TYPES["str"]).take(numbers), url, keys, name)
        if kinds.is_null(type_) or kinds.is_boolean(type_):
            return array
        if kinds.is_integer(type_):
            return array.cast(TYPES["int"])
        if kinds.is_floating(type_) or kinds.is_decimal(type_):
            return array.cast(TYPES["float"])
        if kinds.is_string(type_) or kinds.is_large_string(type_) or kinds.is_string_view(type_):
            array.validate(full=True)
            return _strings(array.cast(TYPES["str"]), url, keys, name)
        if kinds.is_temporal(type_):
            values = [None if value is None else str(value) for value in array.to_pylist()]
            return pa.array(values, TYPES["str"])
    except (pa.ArrowException, ArithmeticError, UnicodeDecodeError) as error:
        raise _wrong(url, name, f"cannot be kept: {one_line(error)}") from error
    raise _wrong(url, name, f"is {str(type_)[:80]}")


def joined(pieces: Sequence[Piece], name: str) -> list[pa.Array]:
    """Return the columns of all shards with one type. Raises ValueError, naming the shards whose types differ."""
    kinds = [_text_kind(piece.values) if piece.is_text else _KINDS[piece.values.type] for piece in pieces]
    stored = {kind for piece, kind in zip(pieces, kinds, strict=True) if not piece.is_text}
    # Text stands for numbers only if all of it does, and all other shards have numbers.
    texts = {kind for piece, kind in zip(pieces, kinds, strict=True) if piece.is_text}
    if "str" in texts or "str" in stored:
        kinds = ["str" if piece.is_text and kind != "null" else kind for piece, kind in zip(pieces, kinds, strict=True)]
    found = {kind: piece.url for piece, kind in zip(reversed(pieces), reversed(kinds), strict=True) if kind != "null"}
    if len(found) > 1 and not found.keys() <= _NUMBERS:
        (one, first), (other, second) = sorted(found.items())[:2]
        raise ValueError(
            f"index_fields: {name!r} is {one} in {first} and {other} in {second}: write it with one type, or leave it "
            "out"
        )
    kind = "float" if len(found) > 1 else next(iter(found), "null")
    return [_converted(piece, kind, name) for piece in pieces]


def kind_of(type_: pa.DataType) -> str:
    """Return the name of the type of a column."""
    return _KINDS[type_]


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


def _strings(array: pa.Array, url: str, keys: Sequence[str], name: str) -> pa.Array:
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False)
    if len(lengths) and int(lengths.max()) > MOST_BYTES:
        at = int(np.argmax(lengths > MOST_BYTES))
        raise _wrong(url, name, f"has {lengths[at]} bytes, above {MOST_BYTES}", keys[at])
    return array


def _valid(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def _wrong(url: str, name: str, what: str, key: str | None = None) -> ValueError:
    where = url if key is None else f"{url}: sample {key!r}"
    return ValueError(
        f"index_fields: {where}: {name!r} {what}; the index keeps numbers, booleans and strings of up to {MOST_BYTES} "
        "bytes, of one type in all shards: leave it out of index_fields"
    )


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"

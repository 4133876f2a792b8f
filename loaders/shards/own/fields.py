"""Fields of a sample of the user's container -> cells: the bytes of each field, and how it is read.

{"jpg": bytes, "caption": "a cat", "boxes": [[1, 2]]} --cells_of--> a Cell for each, by the rules of table columns
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.field_names import NULL
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import OTHER, TEXT
from orchdata.loaders.shards.fields import (
    GZIP,
    OWN_BYTES,
    OWN_JSON,
    OWN_TEXT,
    classify,
    classify_renamed,
    names_content,
    printable,
)
from orchdata.loaders.shards.own.shard import ByteRange
from orchdata.loaders.shards.parquet.cells import declared_kind, sniff
from orchdata.loaders.shards.tar import gunzip
from orchdata.loaders.text.chat_keys import has_strings, is_chat_context
from orchdata.loaders.text.messages import CHAT_KEYS
from orchdata.loaders.text.words import WORDS_SUFFIX, names_words

_TURNS = (frozenset(("role", "content")), frozenset(("from", "value")))
_RECORDS = ("json", "jsn", "jsonl")
_RESERVED = ("__key__", "__url__")
_ALLOWED = (
    "bytes (of an array: as numpy.save writes them, for a modality of yours), str, od.ByteRange, lists of bytes, None, "
    "or numbers, lists and dicts as in JSON"
)

Bytes: TypeAlias = bytes | bytearray | memoryview


class Cell(NamedTuple):
    """One field of a sample.

    Attributes:
        field: its name.
        kind: its modality, TEXT or OTHER; None if its first bytes say it.
        encoding: OWN_BYTES, OWN_TEXT, OWN_JSON, or for a range RAW or GZIP.
        value: its bytes, or where they are in the shard's file.
    """

    field: str
    kind: int | None
    encoding: int
    value: bytes | ByteRange

    def kind_by(self, head: bytes) -> int:
        """Return its kind by its first bytes, unless its name says it."""
        return sniff(head) if self.kind is None else self.kind


def cells_of(sample: Any, names: Mapping[str, str], limits: Limits, *, all_values: bool) -> list[Cell]:
    """Return the cells of a sample, in its order. Raises DecodeError, or FieldError for one field.

    Args:
        sample: as `Shard.sample` returned it.
        names: old name -> new name of renamed fields.
        all_values: a function of the user's gets all values: also nulls, and numbers as JSON.
    """
    if not isinstance(sample, Mapping):
        raise DecodeError(f"returned a {type(sample).__name__}: return a dict of name -> value of each field")
    cells: list[Cell] = []
    for stored, value in sample.items():
        if not isinstance(stored, str) or not stored:
            raise DecodeError(f"returned a field with the name {stored!r:.80}: names are strings that are not empty")
        if stored in _RESERVED:
            raise DecodeError(f"returned a field {stored!r}, which is reserved: Shard.keys() gives the keys")
        name = printable(names.get(stored, stored))
        cells += _cells(name, stored, value, limits, all_values=all_values)
        if len(cells) > limits.sample_parts:
            raise DecodeError(f"has more than {limits.sample_parts} fields, above Limits.sample_parts")
    twice = _first_repeated(cell.field for cell in cells)
    if twice is not None:
        raise DecodeError(f"returned two fields with the name {twice!r}, after columns= and the numbers of lists")
    return cells


def _cells(name: str, stored: str, value: Any, limits: Limits, *, all_values: bool) -> Iterator[Cell]:
    if value is None or (isinstance(value, float | np.floating) and np.isnan(value)):
        if all_values:
            yield Cell(name + NULL, TEXT, OWN_TEXT, b"")
        elif value is not None and names_content(name):
            raise FieldError(name, "NaN, and the name says text or media: return None if the sample has none")
    elif isinstance(value, Bytes | ByteRange):
        yield _bytes_cell(name, name, stored, value, limits)
    elif isinstance(value, list | tuple) and value and all(isinstance(item, Bytes | ByteRange) for item in value):
        for number, item in enumerate(value):
            yield _bytes_cell(f"{name}.{number}", name, stored, item, limits)
    elif isinstance(value, str):
        yield Cell(name, TEXT, OWN_TEXT, value.encode("utf-8", "surrogatepass"))
    else:
        kind, field = _kind_of_json(name, value, all_values=all_values)
        yield Cell(field, kind, OWN_JSON, _as_json(name, value))


def _bytes_cell(field: str, name: str, stored: str, value: Bytes | ByteRange, limits: Limits) -> Cell:
    kind, encoding = classify_renamed(stored.lower(), name.lower())
    known = kind if kind != OTHER else declared_kind(name, None)
    if isinstance(value, ByteRange):
        numbers = [number for number in value if isinstance(number, int | np.integer) and number >= 0]
        if len(numbers) < 2:
            raise FieldError(field, f"{value} is not an offset and a size, integers from 0")
        return Cell(field, None if known == OTHER else known, encoding, ByteRange(*map(int, value)))
    data = bytes(value)
    if encoding == GZIP:
        data = gunzip(data, field, limits)
    return Cell(field, None if known == OTHER else known, OWN_BYTES, data)


def _kind_of_json(name: str, value: Any, *, all_values: bool) -> tuple[int, str]:
    """Return the kind and field name of a value that becomes JSON."""
    is_nested = isinstance(value, Mapping | list | tuple)
    lowered = name.lower()
    if is_nested and (_is_chat(name, value) or lowered.endswith(_RECORDS)):
        return TEXT, name
    if is_nested and not all_values and classify(lowered)[0] not in (TEXT, OTHER):
        raise FieldError(
            name, f"a {type(value).__name__}, and the name says media: return bytes, od.ByteRange, or a list of these"
        )
    if all_values or names_content(name) or names_words(name) or (is_nested and has_strings(value)):
        return TEXT, name + WORDS_SUFFIX
    return OTHER, name


def _is_chat(name: str, value: Any) -> bool:
    if name in CHAT_KEYS or is_chat_context(name):
        return True
    turns = value if isinstance(value, list | tuple) else ()
    return bool(turns) and all(
        isinstance(turn, Mapping) and any(keys <= turn.keys() for keys in _TURNS) for turn in turns
    )


def _as_json(name: str, value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise FieldError(name, f"a {type(value).__name__} cannot be a field ({error}): return {_ALLOWED}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _first_repeated(names: Iterator[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]

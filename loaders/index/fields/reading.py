"""The user's own columns of one shard: from columns of Parquet and Arrow, keys of records, members of tars."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import pyarrow as pa

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.index.fields.types import MOST_BYTES, Piece, column_of_array, column_of_values
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.samples.members import has_keys
from orchdata.loaders.shards.arrow.shard import ArrowShard
from orchdata.loaders.shards.facts_table import FactsTable
from orchdata.loaders.shards.fields import TABLE_ROW
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.parquet.shard import ParquetShard
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.slow import here
from orchdata.loaders.text.conversation import parse_json
from orchdata.loaders.text.preprocessor import decode_utf8

_MOST_SEEN: Final = 40
_INTEGER: Final = re.compile(r"[+-]?(0|[1-9][0-9]{0,18})")


class ShardFields(NamedTuple):
    """Columns of a shard.

    Attributes:
        keys: of its samples; empty if it has none of the columns.
        columns: name -> values of the samples.
        seen: names that its samples have, some of them.
    """

    keys: Sequence[str]
    columns: Mapping[str, Piece]
    seen: Sequence[str]


def read_fields(shard: Shard, names: Sequence[str], table: Callable[[], FactsTable]) -> ShardFields:
    """Read the values of all samples of a shard. Samples that cannot be read have none.

    Args:
        table: returns the facts of the shard; called for records and members.

    Raises:
        ValueError: a value that the index does not keep, naming shard, key and field.
        ShardError, StorageError: the shard cannot be read.
    """
    if isinstance(shard, ParquetShard | ArrowShard):
        return _of_columns(shard, names)
    return _of_samples(shard, names, table())


def _of_columns(shard: ParquetShard | ArrowShard, names: Sequence[str]) -> ShardFields:
    values = shard.columns(names)
    columns = {
        name: Piece(shard.url, _combined(array, values.labels.get(name, ()), shard.url, values.keys, name), False)
        for name, array in values.columns.items()
    }
    return ShardFields(values.keys, columns, [*columns, *values.names[:_MOST_SEEN]])


def _combined(array: pa.ChunkedArray, labels: Sequence[str], url: str, keys: Sequence[str], name: str) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        array = pa.chunked_array([chunk.dictionary_decode() for chunk in array.chunks], array.type.value_type)
    if pa.types.is_string(array.type):
        array = array.cast(pa.large_string())  # many strings may be too many bytes for one array of 32-bit offsets
    return column_of_array(pa.concat_arrays(array.chunks), labels, url, keys, name)


class _Text(str):
    """A value that is text in its container, where numbers are text too."""

    __slots__ = ()


def _of_samples(shard: Shard, names: Sequence[str], table: FactsTable) -> ShardFields:
    keys: list[str] = []
    values: dict[str, list[Any]] = {name: [] for name in names}
    seen: dict[str, None] = {}
    of_sample = _record_values if isinstance(shard, JsonLinesShard) else _member_values
    current = here()
    start = 0
    for _, group in groupby(table.sample):
        rows = range(start, start + sum(1 for _ in group))
        start = rows.stop
        current.key = key = table.key[rows.start]
        current.fraction = rows.start / len(table)
        try:
            found = dict(of_sample(shard, names, table, rows, seen))  # type: ignore[arg-type]
        except (DecodeError, FieldError):
            found = {}  # the sample is bad
        keys.append(key)
        for name in names:
            values[name].append(found.get(name))
    current.key = None
    columns = {name: _piece(shard.url, keys, name, column) for name, column in values.items()}
    return ShardFields(keys, columns, list(seen))


def _piece(url: str, keys: Sequence[str], name: str, values: Sequence[Any]) -> Piece:
    """Return a column. It is text if all its values are; next to others, text that is a number is one."""
    kinds = {type(value) for value in values if value is not None}
    is_text = kinds == {_Text}
    if not is_text and _Text in kinds:
        values = [_number(value) if type(value) is _Text else value for value in values]
    plain = [str(value) if isinstance(value, _Text) else value for value in values] if is_text else values
    return Piece(url, column_of_values(plain, url, keys, name), is_text)


def _number(text: str) -> Any:
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        return float(text) if not re.match(r"[+-]?0[0-9]|.*_", text) else str(text)
    except ValueError:
        return str(text) or None


def _record_values(
    shard: JsonLinesShard, names: Sequence[str], table: FactsTable, rows: range, seen: dict[str, None]
) -> Iterator[tuple[str, Any]]:
    """Yield the values of a record. Raises DecodeError."""
    row = rows.start
    if row in table.errors:
        return
    record = shard.value(table.offset[row], table.size[row])
    if not isinstance(record, dict):
        return
    _see(seen, record)
    is_text = table.encoding[row] == TABLE_ROW
    for name in names:
        if name in record:
            value = record[name]
            seen[name] = None
            yield name, _Text(value) if is_text and isinstance(value, str) else value


def _member_values(
    shard: Shard, names: Sequence[str], table: FactsTable, rows: range, seen: dict[str, None]
) -> Iterator[tuple[str, Any]]:
    """Yield the values of a sample of members: the member of a name, else the key of a JSON member. Raises FieldError,
    DecodeError.
    """
    of_field = {_name(table, row): row for row in rows if row not in table.errors}
    _see(seen, of_field)
    missing = []
    for name in names:
        row = of_field.get(name.lower())
        if row is None:
            missing.append(name)
        elif table.size[row] > MOST_BYTES:
            raise ValueError(
                f"index_fields: {shard.url}: sample {table.key[row]!r}: the member {name!r} has {table.size[row]} "
                f"bytes, and the index keeps values of up to {MOST_BYTES}: leave it out of index_fields"
            )
        else:
            seen[name] = None
            yield name, _member_value(shard, name, table, row)
    for field, row in of_field.items() if missing else ():
        if table.kind[row] != TEXT or not has_keys(field):
            continue
        record = parse_json(_read(shard, table, row))
        if isinstance(record, dict):
            _see(seen, record)
            found = [name for name in missing if name in record]
            missing = [name for name in missing if name not in record]
            seen.update(dict.fromkeys(found))
            yield from ((name, record[name]) for name in found)


def _member_value(shard: Shard, name: str, table: FactsTable, row: int) -> Any:
    """Return the value of a member. Raises ValueError for bytes that are no text, FieldError if it cannot be read."""
    try:
        text = decode_utf8(_read(shard, table, row))
    except DecodeError as error:
        raise ValueError(
            f"index_fields: {shard.url}: sample {table.key[row]!r}: the member {name!r} is {error.reason}, and the "
            "index keeps no bytes: leave it out of index_fields"
        ) from error
    return _Text(text.strip())


def _name(table: FactsTable, row: int) -> str:
    field = table.field[row]
    return field.lower()


def _read(shard: Shard, table: FactsTable, row: int) -> bytes | memoryview:
    return shard.read(table.offset[row], table.size[row], table.encoding[row], table.field[row])


def _see(seen: dict[str, None], names: Mapping[str, Any]) -> None:
    if len(seen) < _MOST_SEEN:
        seen.update(dict.fromkeys(names))

"""The user's own columns of a data set: read from its shards, joined by keys, written after the table of its index.

    shard --_read--> keys, columns --joined, taken in the order of the index--> another index with the same rows

Nothing is measured again: the index says what its samples are, and the facts of shards are those of its build.

A column has integers, floats, strings or booleans, and nulls; one type for all shards. Integers and floats together are
floats. Other mixtures are an error, because a comparison would silently leave out a part of the samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orchdata.loaders.amounts import these
from orchdata.loaders.errors import (
    DamagedIndexError,
    DecodeError,
    FieldError,
    MissingIndexError,
    ShardError,
    StaleIndexError,
    one_line,
)
from orchdata.loaders.index.facts import load_facts
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.index_file import write_index
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.recipe import Recipe, digest
from orchdata.loaders.samples.members import has_keys
from orchdata.loaders.shards.arrow import ArrowShard
from orchdata.loaders.shards.children import measuring
from orchdata.loaders.shards.columns import ParquetShard
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.fields import TABLE_ROW
from orchdata.loaders.shards.lines import JsonLinesShard
from orchdata.loaders.shards.open import by_identity, open_indexed, rules_of
from orchdata.loaders.shards.shard import FactsTable, Shard, ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.paths import RECORD_SUFFIXES, suffix_of
from orchdata.loaders.text.conversation import parse_json
from orchdata.loaders.text.preprocessor import decode_utf8

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
    """The column of one shard, of one of the types; `is_text` if it may stand for numbers, such as cells of CSV."""

    url: str
    values: pa.Array
    is_text: bool


def fields_of(columns: pa.RecordBatch) -> dict[str, dict[str, Any]]:
    """Return the type of each column, and the number of its nulls, JSON-safe."""
    return {
        name: {"type": _KINDS[column.type], "nulls": column.null_count}
        for name, column in zip(columns.schema.names, columns.columns, strict=True)
    }


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
    if pa.types.is_null(texts.type):
        return texts
    texts = pc.utf8_trim_whitespace(texts)
    return pc.if_else(pc.equal(pc.binary_length(texts), 0), pa.scalar(None, texts.type), texts)


def _wrong(where: str, name: str, what: str) -> ValueError:
    return ValueError(
        f"index_fields: {where}: {name!r} {what}; the index keeps numbers, booleans and strings of up to {MOST_BYTES} "
        "bytes, of one type in all shards: leave it out of index_fields"
    )


class _Read(NamedTuple):
    """What was read of a shard: keys of its samples, and the columns that it has."""

    keys: Sequence[str]
    columns: Mapping[str, Piece]


def with_fields(
    index: Index,
    names: Sequence[str],
    recipe: Recipe,
    *,
    containers: Iterable[Container] = (),
    may_build: bool = True,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    files: Files = PLAIN_FILES,
) -> Index:
    """Return the index with the user's own columns; they are read from the shards if no such index is kept.

    Of several processes one reads them, and the others wait; `may_build` says whether to read shards, `force` to read
    all again. `progress` is called with the shards that are done, and the number of all.

    Raises ValueError for values that the index does not keep, columns of several types, or a name that no sample has;
    MissingIndexError if they are not kept, and `may_build` is false; StaleIndexError if a shard changed since it was
    indexed; StorageError.
    """
    if index.own is not None and {*names} <= {*index.own.schema.names} and not force:
        return index
    cache = CacheFolder()
    path = cache.root / "index" / f"{digest([index.path.name, list(names)])}.index"
    kept = None if force else _kept(path, index)
    if kept is None and not may_build:
        raise MissingIndexError(f"the index of {these(len(index.shards), 'shard')} lacks index_fields={tuple(names)}")
    if kept is None:
        cache.make("index")
        with cache.lock("index", str(path)):
            kept = None if force else _kept(path, index)
            if kept is None:
                read = partial(_read, names, recipe, by_identity(containers), cache, files)
                columns = _columns(index, names, _read_all(index, read, progress))
                values = {**index.head().values, "shards": [shard.as_list() for shard in index.shards]}
                write_index(path, [index], values, columns)
                index.check_unchanged()
                kept = Index(path)
    kept.fetch, kept.base = index.fetch, index.path  # its rows are the same
    return kept


def _kept(path: Path, index: Index) -> Index | None:
    try:
        kept = Index(path)
    except (FileNotFoundError, DamagedIndexError):
        return None
    return kept if (kept.build_id, kept.shards) == (index.build_id, index.shards) else None


def _read_all(index: Index, read: Callable[[ShardInfo], _Read], progress: Any) -> list[_Read]:
    """Return what is read of all shards. The first error ends it."""
    total = len(index.shards)
    found: list[_Read] = []

    def read_one(number: int) -> _Read:
        # A shard that could not be indexed has one row, without a key.
        start, stop = index.shard_rows[number : number + 2].tolist()
        is_readable = stop > start + 1 or (stop == start + 1 and bool(index.key(start)))
        return read(index.shards[number]) if is_readable else _Read((), {})

    workers = min(8, os.cpu_count() or 1, total)
    with measuring(), ThreadPoolExecutor(workers, thread_name_prefix="orchdata-fields") as pool:
        results: Any = pool.map(read_one, range(total))
        with closing(results):  # cancels the shards that have not begun
            for each in results:
                found.append(each)
                if progress is not None:
                    progress(len(found), total)
    return found


def _columns(index: Index, names: Sequence[str], read: Sequence[_Read]) -> pa.RecordBatch:
    """Return the columns of all shards, in the order of the index. Pieces of a sample have the values of the sample."""
    bad = index.bad_rows()
    rows = [_rows_of(index, number, keys, bad) for number, (keys, _) in enumerate(read)]
    columns = []
    for name in names:
        pieces = [
            of_shard.get(name) or Piece(info.url, pa.nulls(len(keys)), False)
            for info, (keys, of_shard) in zip(index.shards, read, strict=True)
        ]
        arrays = joined(pieces, name)
        if any(len(keys) for keys, _ in read) and not any(name in of_shard for _, of_shard in read):
            raise ValueError(f"index_fields names {name!r}, and no sample has a field of this name with a value")
        columns.append(pa.concat_arrays([array.take(mine) for array, mine in zip(arrays, rows, strict=True)]))
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def _rows_of(index: Index, number: int, keys: Sequence[str], bad: Any) -> pa.Array:
    """Return the number of the sample in its shard for each row of the index, null for none.

    Rows are found by their keys: a function of the user's may leave samples out, and a split sample has several rows.
    """
    start, stop = index.shard_rows[number : number + 2].tolist()
    offsets, data = index.keys(start, stop)
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(np.ascontiguousarray(data))]
    own = pa.Array.from_buffers(pa.large_binary(), stop - start, buffers)
    rows = pc.index_in(own, pa.array([key.encode("utf-8", "backslashreplace") for key in keys], pa.large_binary()))
    missing = start + np.flatnonzero(rows.is_null().to_numpy(zero_copy_only=False))
    if len(keys) and (good := missing[~np.isin(missing, bad)]).size:
        key = index.key(int(good[0]))
        raise StaleIndexError(index.shards[number].url, f"has no sample {key!r} any more: run `orchdata index --again`")
    return rows


def _read(
    names: Sequence[str],
    recipe: Recipe,
    containers: Mapping[str, Container],
    cache: CacheFolder,
    files: Files,
    info: ShardInfo,
) -> _Read:
    """Read the values of all samples of a shard. Samples that cannot be read have none. Raises as `with_fields`."""
    uses_record = info.container or suffix_of(info.url) in RECORD_SUFFIXES
    rules = rules_of(info, containers, recipe.record if uses_record else None)
    how: dict[str, Any] = {"record": rules.record, "containers": containers, "files": files}
    shard: Shard = open_indexed(info.url, info, limits=recipe.limits, cache=cache, **how)
    with closing(shard):
        try:
            if isinstance(shard, ParquetShard | ArrowShard):
                return _of_columns(shard, names)
            how = {"media_root": info.media_root or None, "rules": rules, "files": files}
            table = load_facts(info.url, lambda: shard, limits=recipe.limits, cache=cache, **how).table
            return _of_samples(shard, names, table)
        except StaleIndexError:
            raise
        except ShardError as error:
            raise ValueError(f"index_fields: {error}") from error


def _of_columns(shard: ParquetShard | ArrowShard, names: Sequence[str]) -> _Read:
    values = shard.columns(names)
    columns = {}
    for name, array in values.columns.items():
        if pa.types.is_dictionary(array.type):
            array = pa.chunked_array([chunk.dictionary_decode() for chunk in array.chunks], array.type.value_type)
        if pa.types.is_string(array.type):
            array = array.cast(pa.large_string())  # many strings may be too long for one array of 32-bit offsets
        whole = pa.concat_arrays(array.chunks)
        labels = values.labels.get(name, ())
        columns[name] = Piece(shard.url, column_of_array(whole, labels, shard.url, values.keys, name), False)
    return _Read(values.keys, columns)


def _of_samples(shard: Shard, names: Sequence[str], table: FactsTable) -> _Read:
    keys: list[str] = []
    values: dict[str, list[Any]] = {name: [] for name in names}
    texts, others = set[str](), set[str]()
    start = 0
    for _, group in groupby(table.sample):
        rows = range(start, start + sum(1 for _ in group))
        start = rows.stop
        text, own = dict[str, Any](), dict[str, Any]()
        try:
            if not isinstance(shard, JsonLinesShard):
                text, own = _of_members(shard, names, table, [row for row in rows if row not in table.errors])
            elif rows.start not in table.errors:
                record = shard.value(table.offset[rows.start], table.size[rows.start])
                if isinstance(record, dict):
                    own = {name: record[name] for name in names if name in record}
                if table.encoding[rows.start] == TABLE_ROW:  # where numbers are text too
                    text, own = own, text
        except (DecodeError, FieldError):
            text, own = {}, {}  # the sample is bad
        found = own | text
        texts |= text.keys()
        others |= {name for name, value in own.items() if value is not None}
        keys.append(table.key[rows.start])
        for name in names:
            values[name].append(found.get(name))
    columns = {
        name: Piece(shard.url, column_of_values(column, shard.url, keys, name), name in texts - others)
        for name, column in values.items()
        if any(value is not None for value in column)
    }
    return _Read(keys, columns)


def _of_members(
    shard: Shard, names: Sequence[str], table: FactsTable, rows: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a sample of members has: members with these names, which are text, and keys of JSON members."""
    members = {table.field[row].lower(): row for row in rows}
    text, own = dict[str, Any](), dict[str, Any]()

    def read(row: int) -> bytes | memoryview:
        return shard.read(table.offset[row], table.size[row], table.encoding[row], table.field[row])

    for name in names:
        if (row := members.get(name.lower())) is not None:
            where = f"index_fields: {shard.url}: sample {table.key[row]!r}: the member {name!r}"
            if table.size[row] > MOST_BYTES:
                raise ValueError(
                    f"{where} has {table.size[row]} bytes, above {MOST_BYTES}: leave it out of index_fields"
                )
            try:
                text[name] = decode_utf8(read(row)).strip()
            except DecodeError as error:
                raise ValueError(f"{where} is {error.reason}: leave it out of index_fields") from error
    for field, row in members.items():
        missing = [name for name in names if name not in text and name not in own]
        if missing and table.kind[row] == TEXT and has_keys(field):
            record = parse_json(read(row))
            if isinstance(record, dict):
                own |= {name: record[name] for name in missing if name in record}
    return text, own

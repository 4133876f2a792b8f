"""The user's own columns of a data set, one value for each row of its index, as one mapped file."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.errors import StaleIndexError
from orchdata.loaders.index.fields.layer import FOLDER, key_bytes
from orchdata.loaders.index.fields.reading import ShardFields
from orchdata.loaders.index.fields.types import TYPES, Piece, joined, kind_of
from orchdata.loaders.index.index import Index, digest
from orchdata.loaders.storage.atomic import replaced, write_at
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.opening import opened
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.sealed import Damaged, body_start, finish, head_of, verify_body
from orchdata.loaders.storage.verified import is_noted, note
from orchdata.loaders.versions import FIELDS_FORMAT
from orchdata.native.key_hash import hash_keys

KIND: Final = b"merg"
_MOST_NAMED: Final = 20

ShardLayer = tuple[pa.Array | None, ShardFields]
"""Keys of a shard's samples, None if it has none of the columns; and the columns."""


class FieldInfo(NamedTuple):
    """A column: its type ("int", "float", "str", "bool", or "null" if all values are), and the number of nulls."""

    kind: str
    nulls: int


class IndexFields:
    """The user's own columns, with a value for each row of an index; pieces of a sample have the value of the sample.

    Attributes:
        fields: name -> what it has.
    """

    def __init__(self, batch: pa.RecordBatch, fd: int) -> None:
        """Show a batch of a file that is open as `fd`, which is closed with this object."""
        weakref.finalize(self, os.close, fd)
        self._batch = batch
        self.fields: Mapping[str, FieldInfo] = {
            name: FieldInfo(kind_of(column.type), column.null_count)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }

    def column(self, name: str, start: int, stop: int) -> pa.Array:
        """Return the values of the rows [start, stop)."""
        return self._batch.column(name).slice(start, stop - start)


def fields_path(index: Index, names: Sequence[str], cache: CacheFolder) -> Path:
    """Return the path of the columns of an index."""
    return cache.root / FOLDER / f"{digest([index.path.name, list(names)])}.merged"


def open_merged(index: Index, names: Sequence[str], cache: CacheFolder) -> IndexFields | None:
    """Map the columns of an index; None if they are missing, damaged, or of an earlier index.

    The file is read completely, and checked, once per machine; see `storage.verified`. Raises StorageError.
    """
    path = fields_path(index, names, cache)

    def map_if_valid() -> IndexFields | None:
        try:
            return _mapped(path, index, names)
        except (FileNotFoundError, ValueError, KeyError, TypeError, pa.ArrowException):
            return None

    return tried(str(path), "cannot be read", map_if_valid)


def _mapped(path: Path, index: Index, names: Sequence[str]) -> IndexFields:
    with opened(path) as fd:
        status = os.fstat(fd)
        head = head_of(fd, KIND, FIELDS_FORMAT)
        if head.values["build_id"] != index.build_id:
            raise Damaged("it is of an earlier index")
        noted = is_noted(path, status)
        if not noted:
            verify_body(fd, head)
        mapped = memoryview(mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ))
        schema = _schema(names, head.values["kinds"])
        batch = pa.ipc.read_record_batch(pa.py_buffer(mapped[head.start :]), schema)
        if batch.num_rows != index.num_rows:
            raise Damaged("it has other rows than the index")
        if not noted:
            batch.validate(full=True)
            note(path, status)
        return IndexFields(batch, os.dup(fd))


def _schema(names: Sequence[str], kinds: Sequence[str]) -> pa.Schema:
    return pa.schema([pa.field(name, TYPES[kind]) for name, kind in zip(names, kinds, strict=True)])


def write_merged(index: Index, names: Sequence[str], layers: Sequence[ShardLayer], cache: CacheFolder) -> None:
    """Join the columns of all shards, in the order of the index, and write them.

    Raises:
        ValueError: types of shards that differ, or a name that no sample has.
        StaleIndexError: a shard has other samples than in the index.
        StorageError: the file cannot be written.
    """
    bad = index.bad_rows()
    rows = [_rows_of(index, number, keys, bad) for number, (keys, _) in enumerate(layers)]
    columns = []
    for name in names:
        pieces = [_piece(index.shards[number].url, layer, name) for number, (_, layer) in enumerate(layers)]
        if all(pa.types.is_null(piece.values.type) for piece in pieces):
            _check_known(name, names, [layer.seen for _, layer in layers])
        arrays = joined(pieces, name)
        kind = next((array.type for array in arrays), TYPES["null"])
        taken = [
            pa.nulls(len(mine), kind) if not len(array) else _take(array, mine)
            for array, mine in zip(arrays, rows, strict=True)
        ]
        columns.append(pa.concat_arrays(taken))
    kinds = [kind_of(column.type) for column in columns]
    body = pa.RecordBatch.from_arrays(columns, schema=_schema(names, kinds)).serialize()
    values: dict[str, Any] = {"build_id": index.build_id, "kinds": kinds}
    start = body_start(values, body.size)
    with replaced(fields_path(index, names, cache)) as fd:
        write_at(fd, memoryview(body), start)
        finish(fd, KIND, FIELDS_FORMAT, values, start, body.size)


def _piece(url: str, layer: ShardFields, name: str) -> Piece:
    return layer.columns.get(name) or Piece(url, pa.nulls(0), False)


def _take(array: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    if len(rows) == len(array) and (rows == np.arange(len(rows))).all():
        return array
    return array.take(pa.array(rows, mask=rows < 0))


def _rows_of(index: Index, number: int, keys: pa.Array | None, bad: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of the sample in its shard for each row of the index, -1 for none.

    Rows are found by their keys: a function of the user's may leave samples out, and a split sample has several rows.
    """
    start, stop = index.shard_rows[number : number + 2].tolist()
    if keys is None:
        return np.full(stop - start, -1, np.int64)
    own, theirs = _hashes(*index.keys(start, stop)), _hashes(*key_bytes(keys))
    if np.array_equal(own, theirs):
        return np.arange(stop - start)
    in_order = np.argsort(theirs, kind="stable")
    at = np.minimum(np.searchsorted(theirs[in_order], own), max(0, len(theirs) - 1))
    found = in_order[at] if len(theirs) else np.zeros(len(own), np.int64)
    rows: NDArray[np.int64] = np.where(theirs[found] == own, found, -1) if len(theirs) else found - 1
    missing = start + np.flatnonzero(rows < 0)
    if (good := missing[~np.isin(missing, bad)]).size:
        key = index.key(int(good[0]))
        raise StaleIndexError(index.shards[number].url, f"has no sample {key!r} any more: run `orchdata index --force`")
    return rows


def _hashes(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    hashes = np.empty(len(offsets) - 1, np.uint64)
    hash_keys(np.ascontiguousarray(offsets), np.array(data), np.uint64(0), hashes)
    return hashes


def _check_known(name: str, names: Sequence[str], seen: Sequence[Sequence[str]]) -> None:
    """Raise ValueError if no sample has a field of this name; with null alone it is a field."""
    known = list(dict.fromkeys(each for one in seen for each in one))
    if known and name not in known:  # none are known if no shard can be read
        others = ", ".join(map(repr, [each for each in known if each not in names][:_MOST_NAMED])) or "none"
        raise ValueError(f"index_fields names {name!r}, and no sample has a field of this name; there are {others}")

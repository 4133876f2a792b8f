"""The user's own columns of one shard, kept in the cache: a layer of its own next to facts and costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.index.fields.reading import ShardFields
from orchdata.loaders.index.fields.types import TYPES, Piece
from orchdata.loaders.limits import Limits, limits_fingerprint
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.sealed import Damaged, read_sealed, seal
from orchdata.loaders.storage.shared.access import Access, restrict
from orchdata.loaders.versions import FIELDS_FORMAT, RULES

FOLDER: Final = "fields"
KIND: Final = b"flds"
_KEY: Final = "key"


def layer_path(info: ShardInfo, names: Sequence[str], rules: FieldRules, limits: Limits, cache: CacheFolder) -> str:
    """Return the path of the file for these columns of a shard."""
    parts = [info.url, info.media_root, limits_fingerprint(limits), RULES, rules.identity(info.url), list(names)]
    name = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
    return f"{cache.root}/{FOLDER}/{name}.fields"


def write_layer(path: str, info: ShardInfo, fields: ShardFields, access: Access) -> None:
    """Write the columns of a shard. Raises StorageError."""
    keys = [key.encode("utf-8", "backslashreplace") for key in fields.keys]
    columns = {_KEY: pa.array(keys, pa.large_binary())}
    for number, piece in enumerate(fields.columns.values()):
        columns[str(number)] = piece.values
    batch = pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])
    values = {
        "shard": [info.url, info.size, info.version, info.checksum],
        "names": list(fields.columns),
        "texts": [name for name, piece in fields.columns.items() if piece.is_text],
        "seen": [str(name) for name in fields.seen],
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    write_whole(path, seal(KIND, FIELDS_FORMAT, values, [sink.getvalue()])[0], access)


def read_layer(path: str, info: ShardInfo, access: Access) -> tuple[pa.Array, ShardFields] | None:
    """Return the keys, and the columns, of a shard as it was indexed; None if they are not kept."""
    restrict(path, access)
    try:
        head, body = read_sealed(path, KIND, FIELDS_FORMAT)
        if head.values.get("shard") != [info.url, info.size, info.version, info.checksum]:
            return None
        with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
            (batch,) = stream
        batch.validate(full=True)
        names, texts = list(map(str, head.values["names"])), set(head.values["texts"])
        keys, *columns = batch.columns
        if keys.type != pa.large_binary() or len(columns) != len(names) or keys.null_count:
            raise Damaged("it has other columns than it names")
        if any(column.type not in TYPES.values() for column in columns):
            raise Damaged("it has columns of another type")
        pieces = {name: Piece(info.url, column, name in texts) for name, column in zip(names, columns, strict=True)}
        return keys, ShardFields((), pieces, list(map(str, head.values["seen"])))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None  # absent, damaged or of another version


def key_bytes(keys: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the offsets, int64 (n + 1,), and the bytes of keys."""
    _, offsets, data = keys.buffers()
    starts = np.frombuffer(offsets, np.int64)[keys.offset : keys.offset + len(keys) + 1] if len(keys) else np.zeros(1)
    starts = starts.astype(np.int64)
    content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return starts - starts[0], content[int(starts[0]) : int(starts[-1])]

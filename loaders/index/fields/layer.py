"""The user's own columns of one shard, kept in the cache: a layer of its own next to facts and costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.index.facts import topic_of
from orchdata.loaders.index.fields.reading import ShardFields
from orchdata.loaders.index.fields.types import TYPES, Piece, kind_of
from orchdata.loaders.limits import Limits, limits_fingerprint
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.sealed import Damaged, read_sealed, seal
from orchdata.loaders.versions import FIELDS_FORMAT, RULES

FOLDER: Final = "fields"
KIND: Final = b"flds"
_KEY: Final = "key"


def layer_path(info: ShardInfo, names: Sequence[str], rules: FieldRules, limits: Limits, cache: CacheFolder) -> str:
    """Return the path of the file for these columns of a shard."""
    scan = [limits_fingerprint(limits), RULES[topic_of(info.url, rules)], rules.identity(info.url)]
    parts = [info.url, info.media_root, *scan, list(names)]
    name = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
    return f"{cache.root}/{FOLDER}/{name}.fields"


def write_layer(path: str, info: ShardInfo, fields: ShardFields) -> None:
    """Write the columns of a shard. Raises StorageError."""
    keys = [key.encode("utf-8", "backslashreplace") for key in fields.keys]
    kinds = [kind_of(piece.values.type) for piece in fields.columns.values()]
    columns = [pa.array(keys, pa.large_binary()), *(piece.values for piece in fields.columns.values())]
    batch = pa.RecordBatch.from_arrays(columns, schema=_schema(kinds))
    values = {
        "shard": [info.url, info.size, info.version, info.checksum],
        "names": list(fields.columns),
        "kinds": kinds,
        "texts": [name for name, piece in fields.columns.items() if piece.is_text],
        "seen": [str(name) for name in fields.seen],
    }
    write_whole(path, seal(KIND, FIELDS_FORMAT, values, [batch.serialize()])[0])


def _schema(kinds: Iterable[str]) -> pa.Schema:
    columns = [pa.field(str(number), TYPES[kind]) for number, kind in enumerate(kinds)]
    return pa.schema([pa.field(_KEY, pa.large_binary(), nullable=False), *columns])


def read_layer(path: str, info: ShardInfo) -> tuple[pa.Array, ShardFields] | None:
    """Return the keys, and the columns, of a shard as it was indexed; None if they are not kept."""
    try:
        head, body = read_sealed(path, KIND, FIELDS_FORMAT)
        if head.values.get("shard") != [info.url, info.size, info.version, info.checksum]:
            return None
        names, texts = head.values["names"], set(head.values["texts"])
        batch = pa.ipc.read_record_batch(pa.py_buffer(body), _schema(head.values["kinds"]))
        batch.validate(full=True)
        keys, *columns = batch.columns
        if keys.null_count:
            raise Damaged("it has samples without a key")
        pieces = {name: Piece(info.url, column, name in texts) for name, column in zip(names, columns, strict=True)}
        return keys, ShardFields((), pieces, list(map(str, head.values["seen"])))
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException):
        return None  # absent, damaged or of another version


def key_bytes(keys: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the offsets, int64 (n + 1,), and the bytes of keys."""
    _, offsets, data = keys.buffers()
    starts = np.frombuffer(offsets, np.int64)[keys.offset : keys.offset + len(keys) + 1] if len(keys) else np.zeros(1)
    starts = starts.astype(np.int64)
    content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return starts - starts[0], content[int(starts[0]) : int(starts[-1])]

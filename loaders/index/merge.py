"""Many tables -> one index file: allocated by their sizes, then written one table after another.

Memory is bounded by one table and a few dozen MiB for any number of samples. The file gets its name when it is
complete; an interrupted build keeps the older index.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from orchdata.loaders.index.index import KIND, content_fingerprint
from orchdata.loaders.index.table import TableSize, TableWriter, body_bytes
from orchdata.loaders.index.totals import Totals, sum_totals
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.atomic import Buffer, replaced
from orchdata.loaders.storage.sealed import body_start, finish
from orchdata.loaders.versions import TABLE_FORMAT


class TableSource(Protocol):
    """The costs of one shard: sizes for the allocation, and the packed columns when they are written."""

    @property
    def shard(self) -> ShardInfo: ...
    @property
    def size(self) -> TableSize: ...
    @property
    def fields(self) -> Sequence[str]: ...
    @property
    def totals(self) -> Totals: ...
    def body(self) -> Buffer: ...


class RecipeIdentity(NamedTuple):
    """The part of a recipe that an index stores; `modalities` are names by their codes, text first."""

    fingerprint: str
    modalities: tuple[str, ...]
    description: dict[str, Any]


def merge_tables(
    path: Path,
    sources: Sequence[TableSource],
    recipe: RecipeIdentity,
    *,
    build_id: str = "",
) -> None:
    """Write the index of `sources`, in their order, to `path`.

    Args:
        path: of the index.
        sources: one table per shard.
        recipe: stored in the index.
        build_id: stored in the index, to recognize whether it was made from the same tables.

    Raises:
        StorageError: the disk is full, or not writable.
    """
    fields = {name: number for number, name in enumerate(dict.fromkeys(f for s in sources for f in s.fields))}
    size = TableSize.sum([source.size for source in sources])
    values = {
        "fingerprint": content_fingerprint([source.shard for source in sources], recipe.fingerprint),
        "build_id": build_id,
        "recipe": recipe.description,
        "shards": [source.shard.as_list() for source in sources],
        "shard_rows": np.cumsum([0, *(source.size.rows for source in sources)]).tolist(),
        "fields": list(fields),
        "modalities": list(recipe.modalities),
        "totals": sum_totals([source.totals for source in sources]),
        "size": size.as_dict(),
    }
    length = body_bytes(size)
    start = body_start(values, length)
    with replaced(path) as fd:
        writer = TableWriter(fd, start, size)
        for number, source in enumerate(sources):
            writer.append(source.body(), source.size, number, [fields[name] for name in source.fields])
        writer.flush()
        finish(fd, KIND, TABLE_FORMAT, values, start, length)

"""Column chunks of Parquet: how many bytes are read for each byte that samples use, before anything is trained on.

A sample of Parquet is read by the column chunks of its row group, which stay in memory for a while. Under an order that
jumps between row groups, a chunk is read for few samples.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import ShardError
from orchdata.loaders.index.index import Index
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.open import by_identity, open_indexed
from orchdata.loaders.shards.parquet.shard import COLUMNS, ParquetShard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.paths import ARROW_SUFFIXES, PARQUET_SUFFIXES
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.notices import warn_once
from orchdata.ranks.first_comer import done_by_first

MOST: Final = 2.0
"""Bytes read for each byte used, above which a loader warns."""
_SHARDS: Final = 4
_STRETCH: Final = 1 << 14
"""Positions of the order that are looked at: a window of the default shuffle."""


class Chunks(NamedTuple):
    """The column chunks of a data set's Parquet files, on average of some.

    Attributes:
        rows: of a row group.
        num_bytes: of the chunks of one row group that samples use, as stored.
        used: bytes that one sample uses.
    """

    rows: float
    num_bytes: float
    used: float

    @property
    def alone(self) -> float:
        """Bytes read for each byte used if each sample reads its chunks again."""
        return self.num_bytes / max(1.0, self.used)


class Positions(Protocol):
    """The part of an order that is used here."""

    def length(self, epoch: int) -> int: ...
    def rows(self, epoch: int, start: int, stop: int) -> tuple[Any, NDArray[np.int64]]: ...


class DataSet(Protocol):
    """The part of a data set, or of a mixture, that opens its shards."""

    @property
    def files(self) -> Files: ...
    @property
    def containers(self) -> tuple[Container, ...]: ...


def chunks_of(index: Index, dataset: DataSet, files: Files | None = None, *, remote: bool = False) -> Chunks | None:
    """Return the column chunks of the Parquet files of an index, from the footers of a few; None if it has none.

    Args:
        files: reads the footers; default: those of the data set.
        remote: of those in object storage alone.

    Raises StorageError.
    """
    numbers = [
        number
        for number, shard in enumerate(index.shards)
        if shard.url.endswith(PARQUET_SUFFIXES) and not shard.container and (is_remote(shard.url) or not remote)
    ]
    chosen = {numbers[at] for at in np.linspace(0, len(numbers) - 1, min(_SHARDS, len(numbers))).astype(int).tolist()}
    rows = groups = stored = used = samples = 0
    given: dict[str, Any] = {"containers": by_identity(dataset.containers)}
    for number in sorted(chosen):
        info = index.shards[number]
        good = np.setdiff1d(index.rows_of(number), index.bad_rows(), assume_unique=True)[:_STRETCH].tolist()
        fields = {spec[3] for row in good[:32] for spec in index.read_spec(row)}
        try:
            shard = open_indexed(
                info.url, info, limits=Limits(), cache=CacheFolder(), files=files or dataset.files, **given
            )
        except ShardError:
            continue  # the loader reports it
        with closing(shard):
            if not isinstance(shard, ParquetShard) or not good:
                continue
            for group_rows, num_bytes in shard.chunk_bytes(sorted(fields)):
                rows, groups, stored = rows + group_rows, groups + 1, stored + num_bytes
        used += sum(size for row in good for _, size, _, _ in index.read_spec(row))
        samples += len(good)
    return Chunks(rows / groups, stored / groups, used / samples) if groups and samples else None


def read_for_each_byte(index: Index, order: Positions, chunks: Chunks, num_ranks: int) -> float:
    """Return about how many bytes a rank reads for each byte that its samples use, from a stretch of the first epoch.

    A rank is taken to get every `num_ranks`-th position. Chunks that do not fit in memory together are read again.
    """
    length = order.length(0)
    rows = order.rows(0, 0, min(length, max(_STRETCH, num_ranks)))[1][::num_ranks]
    if not len(rows):
        return 1.0
    shard = np.asarray(index.shard)[rows].astype(np.int64)
    group = (rows - np.asarray(index.shard_rows)[shard]) // max(1, int(chunks.rows))
    places = shard * (1 << 40) + group
    touched, changes = len(np.unique(places)), 1 + int(np.count_nonzero(np.diff(places)))
    held = min(1.0, COLUMNS.max_bytes / max(1.0, touched * chunks.num_bytes))
    read = touched + (changes - touched) * (1.0 - held)
    return read * chunks.num_bytes / max(1.0, len(rows) * chunks.used)


def check_arrow(index: Index, files: Files) -> None:
    """Raise ValueError for Arrow files in object storage that no node keeps: each sample takes several requests."""
    urls = [
        shard.url
        for shard in index.shards
        if is_remote(shard.url) and shard.url.endswith(ARROW_SUFFIXES) and not shard.container
    ]
    if urls and files.cache is None:
        others = f" and {len(urls) - 1} more" if len(urls) > 1 else ""
        raise ValueError(
            f"{urls[0]}{others}: a loader reads no Arrow files from object storage, where each sample takes several "
            "requests. Write Parquet, as by datasets.load_from_disk(folder).to_parquet('train.parquet', "
            "batch_size=100), or keep whole shards on the node with cache=od.Cache(...)"
        )


def warn_of_column_reads(dataset: DataSet, index: Index, order: Positions, num_ranks: int, files: Files) -> None:
    """Warn once if reads of Parquet in object storage take far more bytes than samples use. One rank looks.

    Raises StorageError.
    """
    urls = [shard.url for shard in index.shards if is_remote(shard.url) and shard.url.endswith(PARQUET_SUFFIXES)]
    if not urls:
        return

    def find() -> float:
        chunks = chunks_of(index, dataset, files, remote=True)
        return 0.0 if chunks is None else read_for_each_byte(index, order, chunks, num_ranks)

    ratio = float(done_by_first(f"column reads/{index.build_id}", find))
    if ratio > MOST:
        others = f" and {len(urls) - 1} more" if len(urls) > 1 else ""
        warn_once(
            f"column reads of {index.fingerprint}",
            f"{urls[0]}{others}: about {ratio:.1f} bytes are read for each byte that samples use, "
            "because a sample of Parquet is read with the column chunks of its whole row group. Write smaller row "
            "groups (row_group_size= of pyarrow), keep a group's samples together with Balance(scope='grouped') and "
            "Shuffle(streams=<groups>), or keep whole shards on the node with cache=od.Cache(...)",
        )

"""Shards of another place that are compared whole: Parquet, Arrow and JSON Lines, once in a job, in the background.

first step asked for --a thread of one rank--> checksums --one differs--> an error at the next step of every rank
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from orchdata.loaders.errors import OrchdataError, StaleIndexError
from orchdata.loaders.index.index import Index
from orchdata.loaders.shards.builtin import TarContainer, builtin_of
from orchdata.loaders.shards.open import by_identity, open_shard, rules_of
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import FileVersion
from orchdata.ranks.first_comer import is_first, is_said, say
from orchdata.ranks.parallel import Rank

if TYPE_CHECKING:
    from orchdata.dataset.shard_dataset import ShardDataset

_LOOK_SECONDS: Final = 2.0


class _Part(NamedTuple):
    """The shards of an index that are compared, and the name of this work in the job."""

    dataset: ShardDataset
    shards: tuple[ShardInfo, ...]
    key: str


class WholeShards:
    """Compares shards of another place with what was indexed.

    Args:
        indexed: data sets of a loader, with their indexes.
        rank: the first data-parallel rank compares.
        clock: returns seconds.
    """

    def __init__(
        self,
        indexed: Sequence[tuple[ShardDataset, Index]],
        rank: Rank,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = [_Part(dataset, _compared_whole(index), f"compared/{index.build_id}") for dataset, index in indexed]
        self._parts = [part for part in parts if part.shards]
        self._compares = rank.rank == 0
        self._clock = clock
        self._look_at = 0.0
        self._error: OrchdataError | None = None
        self.thread: threading.Thread | None = None

    def check(self) -> None:
        """Begin to compare, at the first call. Raise StaleIndexError if a shard differs, as far as is known now, and
        StorageError if it cannot be read.
        """
        if not self._parts:
            return
        if self.thread is None and self._compares:
            self.thread = threading.Thread(target=self._compare, name="orchdata-compare", daemon=True)
            self.thread.start()
        if self._error is not None:
            raise self._error
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + _LOOK_SECONDS
            self._look()

    def _look(self) -> None:
        """Raise StaleIndexError if another rank has found a difference."""
        for part in self._parts:
            said = False
            with suppress(RuntimeError):  # the store of the job is gone: other ranks end, and so does this one
                said = is_said(part.key)
            if said and self._error is None:
                raise StaleIndexError(part.shards[0].url, f"this or a shard after it {_DIFFERS}")

    def _compare(self) -> None:
        for part in self._parts:
            try:
                if is_first(part.key):
                    for shard in part.shards:
                        _compare(part.dataset, shard)
            except OrchdataError as error:
                self._error = error
                with suppress(RuntimeError):
                    say(part.key)
                return
            except RuntimeError:
                return


_DIFFERS: Final = (
    "is not the one that was indexed in another place under this name and with this size: run `orchdata index` for "
    "this place"
)


def _compared_whole(index: Index) -> tuple[ShardInfo, ...]:
    """Return the shards that are neither known, nor compared sample by sample, nor when they are decompressed."""
    return tuple(
        shard
        for shard in index.shards
        if shard.unproven
        and not shard.packed
        and (shard.container or not isinstance(builtin_of(shard.url), TarContainer))
    )


def _compare(dataset: ShardDataset, indexed: ShardInfo) -> None:
    """Raise StaleIndexError if the content of a shard differs, StorageError if it cannot be read."""
    recipe, containers = dataset.recipe, by_identity(dataset.containers)
    how: dict[str, Any] = {"files": dataset.files, "rules": rules_of(indexed, containers, recipe.record), "whole": True}
    if is_remote(indexed.url):
        how |= {"known": FileVersion(indexed.size, indexed.version), "packed": False}
    with closing(open_shard(indexed.url, limits=recipe.limits, cache=CacheFolder(), **how)) as shard:
        if shard.checksum() != indexed.checksum:
            raise StaleIndexError(indexed.url, _DIFFERS)

"""Shards that an index file lacks: looked for once in a job, in the background, after the first step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchdata.loaders.amounts import counted
from orchdata.loaders.errors import StorageError
from orchdata.loaders.index.index import digest
from orchdata.notices import warn_once
from orchdata.ranks.first_comer import is_first
from orchdata.ranks.parallel import Rank

if TYPE_CHECKING:
    from orchdata.dataset.shard_dataset import ShardDataset

_log = logging.getLogger("orchdata")


class NewShards:
    """Looks whether the paths of data sets name shards that their index files lack.

    Args:
        datasets: of a loader; those without `index_file` are left out.
        rank: only the first data-parallel rank looks.
    """

    def __init__(self, datasets: Sequence[ShardDataset], rank: Rank) -> None:
        self._datasets = [each for each in datasets if each.index_file is not None] if rank.rank == 0 else []

    def begin(self) -> None:
        """Begin to look, unless that was done."""
        datasets, self._datasets = self._datasets, []
        if datasets:
            looking = threading.Thread(target=_look, args=(datasets,), name="orchdata-new-shards", daemon=True)
            looking.start()


def _look(datasets: Sequence[ShardDataset]) -> None:
    for dataset in datasets:
        try:
            _compare(dataset)
        except (StorageError, FileNotFoundError, RuntimeError, ValueError) as error:
            _log.info("shards that the index lacks cannot be looked for: %s", error)


def _compare(dataset: ShardDataset) -> None:
    if not is_first(f"new shards/{digest([dataset.index_file, *dataset.urls[:1]])}"):
        return
    known = set(dataset.urls)
    new = [url for url in dataset.listed() if url not in known]
    if new:
        what = f"{counted(len(new), 'shard')} (the first: {new[0]}) are not in the index {dataset.index_file}"
        how = f"and are not read; write it again: {dataset.index_command}"
        warn_once(f"new shards of {dataset.index_file}", f"{what}, {how}")

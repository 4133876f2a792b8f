"""Shards of which only the index exists: for what needs no byte of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchdata.dataset.indexed import Opened
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.shard import PLAIN


class IndexedShards(ShardDataset):
    """A data set by its index alone, as `synthetic_index` makes it."""

    def __init__(self, path: Path) -> None:
        self._urls, self.recipe, self.reading, self.index_fields = (str(path),), Recipe(), PLAIN, ()
        self._opened = Opened()

    def index(
        self,
        *,
        num_ranks: int = 1,
        rank: int | None = None,
        rebuild: bool = False,
        check: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Index:
        return Index(self.urls[0])

"""What a data set has open in a process: the index, the rows that it chooses, single shards."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.index.fields.merged import IndexFields
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_required
from orchdata.loaders.shards.open import OpenShards, by_identity
from orchdata.loaders.shards.own.shard import Container
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.remote.files import Files


class Chosen(NamedTuple):
    """Rows of samples, and the first of each sample, ascending, int64."""

    rows: NDArray[np.int64]
    first_rows: NDArray[np.int64]


class Opened:
    """The open files of a data set in this process.

    Attributes:
        index: the index, once it was requested.
        chosen: the rows of its samples.
        fields: the user's own columns, and the build id of their index.
    """

    def __init__(self, index: Index | None = None) -> None:
        self.lock = threading.RLock()
        self.index = index
        self.chosen: Chosen | None = None
        self.fields: tuple[str, IndexFields] | None = None
        self._shards: OpenShards | None = None

    def note(self, index: Index) -> None:
        """Use this index from now on."""
        with self.lock:
            if self.index is None or self.index.build_id != index.build_id:
                self.index, self.chosen, self._shards = index, None, None

    def open(self, recipe: Recipe, containers: Sequence[Container], files: Files) -> OpenShards:
        with self.lock:
            if self._shards is None:
                load_required(recipe)
                how: dict[str, Any] = {"containers": by_identity(containers), "files": files}
                self._shards = OpenShards(limits=recipe.limits, cache=CacheFolder(), **how)
            return self._shards

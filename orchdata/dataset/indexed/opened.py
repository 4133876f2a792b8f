"""What a data set has open in a process: the index, the rows that it chooses, single shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.amounts import counted
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_required
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.open import OpenShards, by_identity
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import Files


class Rows:
    """Rows of an index, ascending: all but some. The memory is that of the rows it has, or of those it lacks if they
    are fewer.

    Args:
        num_rows: of the index.
        without: the rows that it lacks, ascending, int64.
    """

    def __init__(self, num_rows: int, without: NDArray[np.int64]) -> None:
        self._count = num_rows - len(without)
        self._listed: NDArray[np.int64] | None = None
        if len(without) > self._count:
            has = np.ones(num_rows, np.bool_)
            has[without] = False
            self._listed, without = np.flatnonzero(has), without[:0]
        self._without = without
        self._before = without - np.arange(len(without))  # how many rows of it come before each that it lacks

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> int:
        """Return the row with this number; negative numbers count from the end. Raises IndexError."""
        if not -self._count <= number < self._count:
            raise IndexError(number)
        number %= self._count
        if self._listed is not None:
            return int(self._listed[number])
        return number + int(np.searchsorted(self._before, number, side="right"))

    def number_of(self, row: int) -> int | None:
        """Return the number of a row; None if the row is not among them."""
        known = self._without if self._listed is None else self._listed
        at = int(np.searchsorted(known, row))
        is_known = at < len(known) and int(known[at]) == row
        if self._listed is None:
            return None if is_known else row - at
        return at if is_known else None

    def listed(self) -> NDArray[np.int64]:
        """Return the rows."""
        return (
            np.delete(np.arange(self._count + len(self._without)), self._without)
            if self._listed is None
            else self._listed
        )

    def sum_of(self, column: NDArray[np.int32]) -> int:
        """Return the sum of a column of the index over these rows."""
        if self._listed is not None:
            return int(column[self._listed].sum())
        return int(column.sum()) - int(column[self._without].sum())


class Chosen(NamedTuple):
    """Rows of samples, and the first row of each sample."""

    rows: Rows
    first_rows: Rows


class Opened:
    """The open files of a data set in this process.

    Attributes:
        index: the index, once it was requested.
        chosen: the rows of its samples.
    """

    def __init__(self, index: Index | None = None) -> None:
        self.lock = threading.RLock()
        self.index = index
        self.chosen: Chosen | None = None
        self._shards: OpenShards | None = None

    def note(self, index: Index) -> None:
        """Use this index from now on."""
        with self.lock:
            if self.index is None or self.index.build_id != index.build_id:
                self.index, self.chosen, self._shards = index, None, None

    def absent(self, number: int, left_out: Callable[[Index], NDArray[np.int64]]) -> IndexError:
        """Return the error for a sample that does not exist; where none can be used, with the reason of the first.

        Args:
            left_out: returns the rows that filters and splits leave out.
        """
        assert self.index is not None and self.chosen is not None
        count = len(self.chosen.first_rows)
        text = f"sample {number} of {counted(count, 'sample')} does not exist"
        bad = self.index.bad_rows()[:0] if count else np.setdiff1d(self.index.bad_rows(), left_out(self.index))
        if len(bad):
            text += f": none of {counted(len(bad), 'sample')} can be used; the first: {self.index.failure(int(bad[0]))}"
        return IndexError(text)

    def open(self, recipe: Recipe, containers: Sequence[Container], files: Files) -> OpenShards:
        with self.lock:
            if self._shards is None:
                load_required(recipe)
                how: dict[str, Any] = {"containers": by_identity(containers), "files": files}
                self._shards = OpenShards(limits=recipe.limits, cache=CacheFolder(), **how)
            return self._shards

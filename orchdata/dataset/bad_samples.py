"""Samples of an index that cannot be used: their failures, what damage hides, and warnings about them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.delivery.policy import Unusable, reasons_of
from orchdata.loaders.errors import DataError
from orchdata.loaders.index.index import Index
from orchdata.notices import warn_once

Ints = NDArray[np.int64]


class IndexedFailures(Sequence[DataError]):
    """The failures of bad rows, created one at a time."""

    def __init__(self, index: Index, rows: Ints) -> None:
        self._index = index
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return IndexedFailures(self._index, self._rows[number])
        return self._index.failure(int(self._rows[number]))


def unusable_of(index: Index, bad: Ints, lost: Ints, unchosen: Ints, names: Sequence[str]) -> list[Unusable]:
    """Return what cannot be used of each source, or of the one data set.

    Args:
        bad: rows that cannot be used, ascending; without those that the user leaves out.
        lost: samples that damage hides in each shard, (num_shards,).
        unchosen: rows that filters and splits leave out, ascending.
        names: of the sources; "" for one data set.
    """
    failures = IndexedFailures(index, bad)
    shards = [0, *accumulate(len(each.shards) for each in index.indexes)]
    found = []
    for number, (name, each) in enumerate(zip(names, index.indexes, strict=True)):
        rows = index.first_rows[number : number + 2]
        start, end = np.searchsorted(bad, rows).tolist()
        out, out_end = np.searchsorted(unchosen, rows).tolist()
        num_lost = int(lost[shards[number] : shards[number + 1]].sum())
        left = each.num_samples - _num_samples(each, unchosen[out:out_end] - rows[0])
        found.append(Unusable(failures[start:end], num_lost, left + num_lost, name))
    return found


def warn_of_bad(index: Index, bad: Ints) -> None:
    """Warn once about samples that the index lists as bad, with the most frequent reasons."""
    if len(bad):
        warn_once(
            f"bad samples of {index.fingerprint}",
            f"{len(bad):,} of {index.num_samples:,} samples are left out under on_error='skip': "
            f"{reasons_of(IndexedFailures(index, bad))}. `orchdata index` lists them",
        )


def lost_samples(index: Index, bad: Ints) -> Ints:
    """Return the samples that damage hides in each shard, (num_shards,), and warn if there are such shards.

    A shard of which no row is in `bad` counts as 0: the user left it out.
    """
    if not len(bad):
        return np.zeros(len(index.shards), np.int64)
    is_counted = np.zeros(len(index.shards), bool)
    is_counted[np.searchsorted(index.shard_rows, bad, side="right") - 1] = True
    lost: Ints = np.where(is_counted, index.lost_samples(), 0)
    damaged = [number for number, shard in enumerate(index.shards) if shard.lost_bytes]
    if damaged:
        _warn_of_damage(index, damaged, int(lost.sum()))
    return lost


def _warn_of_damage(index: Index, damaged: Sequence[int], num_lost: int) -> None:
    """Warn about damaged shards: not every lost sample has a listed failure."""
    first = damaged[0]
    bad = np.intersect1d(index.bad_rows(), index.rows_of(first))
    if not bad.size:
        raise index.damaged(f"{index.shards[first].url} is marked as damaged, and none of its samples is bad")
    reason = index.failure(int(bad[-1])).reason
    warnings.warn(
        f"{len(damaged)} of {len(index.shards)} shards are damaged, and about {num_lost} of their samples "
        f"lost besides those listed; the first is {index.shards[first].url}: {reason}",
        stacklevel=2,
    )


def _num_samples(index: Index, rows: Ints) -> int:
    return int(np.count_nonzero(index.piece[rows] == 0))

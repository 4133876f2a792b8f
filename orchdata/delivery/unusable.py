"""Samples that cannot be used, known before anything is decoded: left out with a warning, or refused.

bad rows of the index --by source--> within the budget of the policy? --> a warning, or TooManyFailures
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.delivery.policy import ErrorPolicy, most_frequent, over_budget
from orchdata.loaders.errors import DataError, TooManyFailures
from orchdata.loaders.failures import reason_kind
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.notices import warn_once

Ints = NDArray[np.int64]
_EXPLAINED: Final = 1000
"""Bad samples with reasons that a warning or an error counts."""


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

    def __iter__(self) -> Iterator[DataError]:
        return (self._index.failure(int(row)) for row in self._rows)


class Unusable(NamedTuple):
    """Samples of one source that cannot be used.

    Attributes:
        failures: of those that are listed.
        num_lost: further ones, which damage hides.
        num_samples: of the source, with those that cannot be used.
        name: of the source in a mixture; empty for one data set.
    """

    failures: Sequence[DataError]
    num_lost: int
    num_samples: int
    name: str = ""

    @property
    def total(self) -> int:
        """All samples that cannot be used."""
        return len(self.failures) + self.num_lost


def unusable_of(index: Index, bad: Ints, lost: Ints, unchosen: Ints, names: Sequence[str] = ()) -> list[Unusable]:
    """Return what cannot be used of each source, or of the one data set.

    Args:
        bad: rows that cannot be used, ascending; without those that the user leaves out.
        lost: samples that damage hides in each shard, (num_shards,).
        unchosen: rows that filters and splits leave out, ascending.
        names: of the sources of a mixture.
    """
    failures = IndexedFailures(index, bad)
    if not isinstance(index, JoinedIndex):
        num_lost = int(lost.sum())
        return [Unusable(failures, num_lost, index.num_samples + num_lost - _num_samples(index, unchosen))]
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


def refuse_above_budget(sources: Sequence[Unusable], policy: ErrorPolicy) -> None:
    """Under "skip", raise TooManyFailures for more samples than allowed: a share of each source, or a count of all."""
    if policy.action == "raise":
        return
    if isinstance(policy.max_failures, int) and len(sources) > 1:
        failures = [failure for source in sources for failure in source.failures[:_EXPLAINED]]
        num_lost = sum(source.total for source in sources) - len(failures)
        sources = [Unusable(failures, num_lost, sum(source.num_samples for source in sources))]
    for source in sources:
        allowed = policy.budget(source.num_samples)
        if allowed is None or source.total <= allowed or not source.failures:
            continue
        of = f" of source {source.name!r}" if source.name else ""
        text = over_budget(
            policy,
            f"{source.total:,} of {source.num_samples:,} samples{of} cannot be used",
            count=source.total,
            num_samples=source.num_samples,
            reasons=f"{reasons_of(source.failures)}; the first: {source.failures[0]}",
        )
        raise TooManyFailures(text)


def reasons_of(failures: Sequence[DataError]) -> str:
    """Return the most frequent reasons with their counts."""
    reasons = Counter(reason_kind(failure.reason) for failure in failures[:_EXPLAINED])
    shown = most_frequent(reasons)
    return f"of the first {_EXPLAINED:,}: {shown}" if len(failures) > _EXPLAINED else shown


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

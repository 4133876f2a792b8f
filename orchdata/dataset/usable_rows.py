"""The usable samples that a state belongs to: their number, and digests of their (shard, key) in order.

    index, excluded rows --hashed once, when a state is first needed--> digests of 64 equal runs of usable rows
                                                                    --> one digest of all, and one of their tokens

The digests are of content: names of samples in their shards. Where they differ, the runs say in which shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.indexed import Rows, num_first_rows
from orchdata.loaders.index.index import Index
from orchdata.loaders.storage.storage import basename
from orchdata.loop.state import RowsDigest
from orchdata.order.mixture import AnyOrder
from orchdata.order.steps import Batches, TokenBatches
from orchdata.planning.windows import WindowBatches

if TYPE_CHECKING:
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset

Ints = NDArray[np.int64]

_RUNS = 64
_CHUNK_ROWS = 1 << 20
_DIGEST_BYTES = 8
_RUN_BYTES = 4  # stored of each run's digest: they only name shards
_NAMED = 3


@dataclass(frozen=True, eq=False)
class SourceRows:
    """The usable rows of a data set, or of a source of a mixture.

    Attributes:
        name: of the source; "" without a mixture.
        num_rows: rows of the index that the data set may choose from.
        excluded: those that do not come, ascending.
        excluded_digest: digest of them.
        by_tokens: whether steps or shares go by tokens, as pieces always do.
    """

    name: str
    dataset: ShardDataset
    index: Index
    num_rows: int
    excluded: Ints
    excluded_digest: str
    by_tokens: bool

    @property
    def called(self) -> str:
        """Its name in messages."""
        return f"source {self.name!r}" if self.name else "the data set"

    @property
    def same(self) -> tuple[str, int, str]:
        """Equal for equal rows of one index."""
        return str(self.index.path), self.num_rows, self.excluded_digest

    @property
    def num_usable(self) -> int:
        return self.num_rows - len(self.excluded)

    @cached_property
    def is_split(self) -> bool:
        """Whether any sample has several rows, its pieces."""
        return self.index.is_split and bool(np.any(self.index.piece[: self.num_rows]))

    @cached_property
    def digest(self) -> RowsDigest:
        """What a state stores of the rows."""
        runs = self._runs(self.num_usable)
        whole = _hasher()
        for run in runs:
            whole.update(run)
        starts = b"".join(run[:_RUN_BYTES] for run in runs)
        tokens = self._tokens() if self.by_tokens or self.is_split else None
        return RowsDigest(self.num_usable, whole.hexdigest(), starts, tokens)

    def change_since(self, then: RowsDigest) -> str:
        """Return how the rows differ from those of a state, in words; "" for equal ones."""
        now, count = self.digest, then.num_usable
        if then[:2] == now[:2]:
            is_same = then.tokens == now.tokens or None in (then.tokens, now.tokens)
            return "" if is_same else f"usable samples of {self.called} have other numbers of tokens than in the state"
        what = "pieces of samples" if self.is_split else "samples"
        words = f"usable {what} of {self.called} are others: {count:,} in the state and {self.num_usable:,} here"
        starts = [then.runs[_RUN_BYTES * k : _RUN_BYTES * (k + 1)] for k in range(_RUNS)]
        differing = [k for k, run in enumerate(self._runs(count)) if run[:_RUN_BYTES] != starts[k]]
        return f"{words}, first in {self._shards_of(differing[0], count)}" if differing else words

    def _shards_of(self, run: int, count: int) -> str:
        """Return the shards of a run, with the rows that are left out before, among and after its usable ones."""
        first, last = _bounds(count)[run : run + 2].tolist()
        start = min(self._row(first - 1) + 1 if first else 0, max(0, self.num_rows - 1))
        stop = self.num_rows if run == _RUNS - 1 else self._row(last)
        number, end = np.searchsorted(self.index.shard_rows, [start, max(start, stop - 1)], side="right").tolist()
        shards = self.index.shards[number - 1 : end]
        names = ", ".join(basename(shard.url) for shard in shards[:_NAMED])
        return names + (f" and {len(shards) - _NAMED:,} more shards" if len(shards) > _NAMED else "")

    def _row(self, number: int) -> int:
        """Return the row of a usable sample, by number; of one that is not there, the number of rows."""
        return Rows(self.num_rows, self.excluded)[number] if number < self.num_usable else self.num_rows

    def _runs(self, count: int) -> list[bytes]:
        """Return a digest of each run of usable rows: how many each shard has, their keys and numbers of pieces.

        Args:
            count: number of usable rows that bound the runs; rows beyond belong to the last one.
        """
        index, bounds = self.index, np.minimum(_bounds(count), self.num_usable)
        bounds[-1] = self.num_usable
        hashers = [[_hasher() for _ in range(3)] for _ in range(_RUNS)]
        before = 0
        for start, stop in _chunks(self.num_rows):
            usable = self._is_usable(start, stop)
            offsets, keys = index.keys(start, stop)
            lengths, pieces = np.diff(offsets), index.piece[start:stop]
            if not usable.all():
                keys, lengths, pieces = keys[np.repeat(usable, lengths)], lengths[usable], pieces[usable]
            ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
            columns = lengths.astype("<i4"), np.ascontiguousarray(keys), pieces.astype("<i4")
            cuts = np.clip(bounds - before, 0, len(lengths))
            for number in np.flatnonzero(np.diff(cuts)).tolist():
                low, high = cuts[number : number + 2].tolist()
                of_keys = slice(int(ends[low]), int(ends[high]))
                slices = slice(low, high), of_keys, slice(low, high if self.is_split else low)
                for hasher, column, part in zip(hashers[number], columns, slices, strict=True):
                    hasher.update(column[part])
            before += len(lengths)

        # Rows are in the order of their shards.
        shard_rows = np.minimum(index.shard_rows, self.num_rows)
        shard_ends = shard_rows - np.searchsorted(self.excluded, shard_rows)
        runs = []
        for number, of_rows in enumerate(hashers):
            low, high = bounds[number : number + 2].tolist()
            first, last = np.searchsorted(shard_ends, low, side="right"), np.searchsorted(shard_ends, high)
            whole = _hasher()
            if low < high:
                whole.update(np.append(first, np.minimum(shard_ends[first : last + 1], high) - low).astype("<i8"))
            for hasher in of_rows:
                whole.update(hasher.digest())
            runs.append(whole.digest())
        return runs

    def _tokens(self) -> str:
        """Return a digest of the tokens of the usable rows."""
        digest = _hasher()
        for start, stop in _chunks(self.num_rows):
            digest.update(self.index.llm_tokens[start:stop][self._is_usable(start, stop)].astype("<i4"))
        return str(digest.hexdigest())

    def _is_usable(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the rows [start, stop) are usable."""
        usable = np.ones(stop - start, bool)
        low, high = np.searchsorted(self.excluded, [start, stop])
        usable[self.excluded[low:high] - start] = False
        return usable


def rows_of(
    dataset: ShardDataset | Mixture, index: Index, order: AnyOrder, batches: Batches, excluded: Ints
) -> tuple[SourceRows, ...]:
    """Return the usable rows of the data set, or of each source, for states.

    Args:
        excluded: rows that do not come, of all sources, ascending.
    """
    by_tokens = isinstance(batches, TokenBatches | WindowBatches) or order.by == "tokens"
    found = []
    for (leaf, own, first), own_order in zip(dataset.parts(index), order.orders, strict=True):
        num_rows = num_first_rows(own, leaf.dataset.selections)
        rows = excluded[slice(*np.searchsorted(excluded, (first, first + num_rows)))] - first
        digest = own_order.excluded_digest
        found.append(SourceRows(leaf.name, leaf.dataset, own, num_rows, rows, digest, by_tokens))
    return tuple(found)


def _bounds(count: int) -> Ints:
    """Return where the runs of so many rows begin, and the end: int64 (_RUNS + 1,)."""
    return np.array([count * number // _RUNS for number in range(_RUNS + 1)], np.int64)


def _hasher() -> Any:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _CHUNK_ROWS, count)) for start in range(0, count, _CHUNK_ROWS))

"""Data sets of the first samples of shards: which samples an index must have, and what states say of their content.

    take(N), [:N] --> the first N good samples --> rows before the one after the N-th

What is said here is the same for the full index and for one of these samples alone, so a state loads with either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from orchdata.dataset.selection import Selection, Taken
from orchdata.loaders.index.index import Index, basename, shards_fingerprint
from orchdata.loaders.shards.shard import ShardInfo


def num_first_samples(selections: Sequence[Selection | Taken]) -> int | None:
    """Return the number of the first good samples that selections choose from; None: they may choose any."""
    first = selections[0] if selections else None
    if not isinstance(first, Taken) or not isinstance(first.numbers, range):
        return None
    return max(1, first.numbers[-1] + 1 if first.numbers else 1)


def num_first_rows(index: Index, selections: Sequence[Selection | Taken]) -> int:
    """Return the number of the first rows of an index that selections choose from."""
    count = num_first_samples(selections)
    if count is None:
        return index.num_rows
    bad = index.bad_rows()
    if index.is_split:
        good = np.setdiff1d(index.sample_rows(), bad, assume_unique=True)
        return index.rows_of_sample(int(good[count - 1])).stop if count <= len(good) else index.num_rows
    before = bad - np.arange(len(bad))  # good rows before each bad one
    return min(index.num_rows, count + int(np.searchsorted(before, count - 1, side="right")))


def is_partial(index: Index, urls: Sequence[str]) -> bool:
    """Return whether an index has the first samples of shards alone."""
    return len(index.shards) < len(urls) or any(shard.reach for shard in index.shards[-1:])


def chosen_shards(index: Index, selections: Sequence[Selection | Taken]) -> Sequence[ShardInfo]:
    """Return the shards that selections choose from: all, or those of the first samples."""
    if num_first_samples(selections) is None:
        return index.shards
    rows = num_first_rows(index, selections)
    return index.shards[: int(index.shard[rows - 1]) + 1] if rows else ()


def content_of(index: Index, selections: Sequence[Selection | Taken]) -> str:
    """Return the identity of the content that selections choose from, for states: of all shards, or of the rows of the
    first samples.
    """
    shards = chosen_shards(index, selections)
    if num_first_samples(selections) is None:
        return shards_fingerprint(shards)
    rows = num_first_rows(index, selections)
    digest = hashlib.blake2b(repr([(basename(shard.url), shard.size) for shard in shards]).encode(), digest_size=16)
    offsets, keys = index.keys(0, rows)
    for column in (np.diff(offsets), keys):
        digest.update(np.ascontiguousarray(column).data)
    return f"first {rows} rows {digest.hexdigest()}"

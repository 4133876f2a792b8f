"""The rows of a source when a state was written: from the state, or from the index of then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.resume.rows import SourceRows, rows_of_samples, text_ints, text_rows, within
from orchdata.loaders.errors import OrchdataError, StateError
from orchdata.loaders.index.index import Index, absolute
from orchdata.loaders.index.locations import index_path
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.versions import rules_digest

Ints = NDArray[np.int64]


class Former(NamedTuple):
    """The rows of then.

    Attributes:
        num_rows: number of all of them.
        excluded: those that were left out, ascending.
        rows: the row of now of each of them, -1 if there is none; empty if rows have kept their numbers.
        by_split: those that a split leaves out, ascending.
        made_by: the index of then, if it was read.
    """

    num_rows: int
    excluded: Ints
    rows: Ints
    by_split: Ints
    made_by: Index | None = None

    def now(self, rows: Ints) -> Ints:
        """Return the rows of now, or -1."""
        return self.rows[rows] if self.rows.size else rows

    @property
    def usable(self) -> Ints:
        """The rows that came."""
        mask = np.ones(self.num_rows, bool)
        mask[self.excluded] = False
        return np.flatnonzero(mask)


def former_of_state(entry: Mapping[str, Any], source: SourceRows) -> Former | None:
    """Return the rows of then as a state has them; None if it does not have them, or samples have other names."""
    if entry.get("samples", entry.get("usable")) != source.samples or entry.get("too_large"):
        return None
    num_rows, num_samples = entry["num_rows"], len(source.first_rows)
    pieces = text_ints(entry["pieces"]) if "pieces" in entry else np.ones(num_samples, np.int64)
    # Each number is compared before their sum, which wraps around for damaged ones.
    are_pieces = len(pieces) == num_samples and within(pieces, 1, np.iinfo(np.int32).max)
    if not are_pieces or int(pieces.sum()) != num_rows:
        raise StateError("the state is damaged: the rows of its samples are not those of its data set")
    excluded = text_rows(entry["excluded"], num_rows) if "excluded" in entry else np.zeros(0, np.int64)
    by_split = rows_of_samples(source.split_samples, pieces)
    excluded = np.union1d(excluded, by_split)
    if num_rows - len(excluded) != entry["num_usable"]:
        raise StateError("the state is damaged: its rows are not as many as it says")
    return Former(num_rows, excluded, _by_pieces(pieces, source.pieces), by_split)


def former_of_index(
    source: SourceRows, rules: Mapping[str, int], recipe: Mapping[str, Any], usable: str | None
) -> Former | None:
    """Return the rows of then from the index of then; None if it is gone, or is of other usable rows.

    Args:
        rules: under which it was made.
        recipe: description of the recipe of then.
        usable: digest of the rows of then, if it is known.
    """
    index = _open(source, rules, recipe)
    if index is None:
        return None
    try:
        excluded = source.exclude(index)
    except (OrchdataError, ValueError):
        return None
    then = SourceRows(**{**vars_of(source), "index": index, "excluded": excluded})
    if usable is not None and then.usable != usable:
        return None
    by_split = rows_of_samples(then.split_samples, then.pieces)
    return Former(index.num_rows, excluded, _by_keys(index, source.index), by_split, index)


def vars_of(source: SourceRows) -> dict[str, Any]:
    """Return the arguments that a source was made with."""
    return {name: getattr(source, name) for name in SourceRows.__dataclass_fields__}


def _open(source: SourceRows, rules: Mapping[str, int], recipe: Mapping[str, Any]) -> Index | None:
    """Open the index of then, which must have the shards of now."""
    dataset = source.dataset
    fingerprint = dataset.recipe.count_fingerprint(recipe)
    path = index_path(dataset.urls, fingerprint, CacheFolder(), dataset.reading, rules=rules_digest(rules))
    try:
        index = Index(path)
        index.check_urls([absolute(url) for url in dataset.urls])
    except (OSError, OrchdataError):
        return None
    same = [
        (one.size, one.checksum) == (other.size, other.checksum)
        for one, other in zip(index.shards, source.index.shards, strict=True)
    ]
    return index if all(same) else None


def _by_pieces(then: Ints, now: Ints) -> Ints:
    """Return the row of now of each row of then, where the same samples have other numbers of pieces."""
    if np.array_equal(then, now):
        return np.zeros(0, np.int64)
    first_then, first_now = np.cumsum(then) - then, np.cumsum(now) - now
    sample = np.repeat(np.arange(len(then)), then)
    piece = np.arange(int(then.sum())) - first_then[sample]
    return np.where(piece < now[sample], first_now[sample] + piece, -1)


def _by_keys(then: Index, now: Index) -> Ints:
    """Return the row of now of each row of then, by shard, key and piece."""
    rows = np.full(then.num_rows, -1, np.int64)
    for number in range(len(then.shards)):
        start, stop = then.shard_rows[number : number + 2].tolist()
        first, last = now.shard_rows[number : number + 2].tolist()
        same_keys = stop - start == last - first and all(
            np.array_equal(np.asarray(a), np.asarray(b))
            for a, b in zip(then.keys(start, stop), now.keys(first, last), strict=True)
        )
        if same_keys and np.array_equal(then.piece[start:stop], now.piece[first:last]):
            rows[start:stop] = np.arange(first, last)
            continue
        found = {name: row for row, name in _named(now, first, last)}
        for row, name in _named(then, start, stop):
            rows[row] = found.get(name, -1)
    return np.zeros(0, np.int64) if np.array_equal(rows, np.arange(now.num_rows)) else rows


def _named(index: Index, start: int, stop: int) -> list[tuple[int, tuple[str, int, int]]]:
    """Return (row, (key, how many samples before have the key, piece)) of the rows of a shard."""
    seen: Counter[str] = Counter()
    named = []
    for row in range(start, stop):
        key, piece = index.key(row), int(index.piece[row])
        seen[key] += piece == 0
        named.append((row, (key, seen[key], piece)))
    return named

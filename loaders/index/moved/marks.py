"""Marks of rows: marks of the members of a tar -> the mark by which each sample is recognized in another place.

The mark of a row is that of its first member in the tar. It follows the columns of a table: 8 bytes a row.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.index.table import Columns
from orchdata.loaders.shards.facts_table import Facts
from orchdata.loaders.shards.fields import SPARSE
from orchdata.loaders.shards.marks import NO_MARK

_PAST_ALL: Final = (1 << 63) - 1
_FEW_ROWS: Final = 16


def row_marks(facts: Facts, columns: Columns) -> bytes:
    """Return the marks of the rows of a shard, int64; empty if its members have none."""
    if not facts.marks or not columns.member_offset.size:
        return b""
    if len(facts.table) <= _FEW_ROWS:
        return _of_few(facts, columns)
    has_members = np.diff(columns.member_offsets) > 0
    first = first_offsets(columns)
    offsets, known = np.array(facts.table.offset, np.int64), np.frombuffer(facts.marks, np.int64)
    order = np.argsort(offsets, kind="stable")
    at = np.minimum(np.searchsorted(offsets, first, sorter=order), len(offsets) - 1)
    found = order[at]
    marks = np.zeros(len(has_members), np.int64)
    marks[has_members] = np.where(offsets[found] == first, known[found], NO_MARK)
    return marks.tobytes()


def _of_few(facts: Facts, columns: Columns) -> bytes:
    """Return the same, in less time for a shard of a few samples."""
    known = dict(zip(facts.table.offset, memoryview(facts.marks).cast("q"), strict=True))
    bounds, places = columns.member_offsets.tolist(), columns.member_offset.tolist()
    encodings = columns.member_encoding.tolist()
    marks = array("q")
    for start, stop in pairwise(bounds):
        pieces = [places[at] for at in range(start, stop) if encodings[at] != SPARSE]
        marks.append(known.get(min(pieces), NO_MARK) if pieces else NO_MARK)
    return marks.tobytes()


def first_offsets(columns: Columns) -> NDArray[np.int64]:
    """Return the offset of the first member of each row that has members, of those that are stored as one piece."""
    places = np.where(columns.member_encoding == SPARSE, _PAST_ALL, columns.member_offset)
    starts = columns.member_offsets[:-1][np.diff(columns.member_offsets) > 0]
    return np.minimum.reduceat(places, starts)

"""Marks of rows: marks of the members of a tar -> the mark by which each sample is recognized in another place.

The mark of a row joins those of its members. It follows the columns of a table: 8 bytes a row.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Final

import numpy as np

from orchdata.loaders.index.table import Columns
from orchdata.loaders.shards.facts_table import Facts
from orchdata.loaders.shards.fields import SPARSE
from orchdata.loaders.shards.marks import JOIN, NO_MARK, joined_mark

_FEW_ROWS: Final = 16


def row_marks(facts: Facts, columns: Columns) -> bytes:
    """Return the marks of the rows of a shard, int64; empty if its members have none.

    Args:
        facts: as scanned, without rows for parts inside members.
        columns: of all parts; one inside a member has its place, which counts once.
    """
    if not facts.marks or not columns.member_offset.size:
        return b""
    if len(facts.table) <= _FEW_ROWS:
        return _of_few(facts, columns)

    # The mark of each member of each row, in the order of the tar, each place once.
    counts = np.diff(columns.member_offsets)
    row, places = np.repeat(np.arange(len(counts)), counts), columns.member_offset.astype(np.int64)
    order = np.lexsort((places, row))
    order = order[columns.member_encoding[order] != SPARSE]
    row, places = row[order], places[order]
    is_new = np.ones(len(row), np.bool_)
    is_new[1:] = (np.diff(row) != 0) | (np.diff(places) != 0)
    row, places = row[is_new], places[is_new]
    offsets, known = np.array(facts.table.offset, np.int64), np.frombuffer(facts.marks, np.uint64)
    by_offset = np.argsort(offsets, kind="stable")
    found = by_offset[np.minimum(np.searchsorted(offsets, places, sorter=by_offset), len(offsets) - 1)]
    marks = np.where(offsets[found] == places, known[found], np.uint64(NO_MARK))

    # Joined as by `joined_mark`, the n-th member of all rows at a time.
    used = np.bincount(row, minlength=len(counts))
    starts = np.cumsum(used) - used
    joined = np.zeros(len(counts), np.uint64)
    for number in range(int(used.max(initial=0))):
        rows = np.flatnonzero(used > number)
        joined[rows] = joined[rows] * np.uint64(JOIN) + marks[starts[rows] + number]
    joined[(joined == 0) & (used > 0)] = 1
    joined[row[marks == NO_MARK]] = NO_MARK
    return joined.tobytes()


def _of_few(facts: Facts, columns: Columns) -> bytes:
    """Return the same, in less time for a shard of a few samples."""
    known = dict(zip(facts.table.offset, memoryview(facts.marks).cast("Q"), strict=True))
    bounds, places = columns.member_offsets.tolist(), columns.member_offset.tolist()
    encodings = columns.member_encoding.tolist()
    marks = array("q")
    for start, stop in pairwise(bounds):
        pieces = sorted({places[at] for at in range(start, stop) if encodings[at] != SPARSE})
        members = [known.get(place, NO_MARK) for place in pieces]
        marks.append(joined_mark(members) if pieces and NO_MARK not in members else NO_MARK)
    return marks.tobytes()

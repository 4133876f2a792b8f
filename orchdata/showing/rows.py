"""The samples that somebody asks to see, by key or by row --index--> rows."""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.index.index import Index, absolute
from orchdata.loaders.shards.fields import printable

_EXAMPLES: Final = 3


def rows_of_key(index: Index, unchosen: NDArray[np.int64], key: str, shard: str | None = None) -> list[int]:
    """Return the rows of the samples of a key.

    Args:
        unchosen: rows that the data set leaves out.
        shard: url, path or name of their shard; None for any.

    Raises:
        KeyError: no sample has this key, or the data set leaves it out.
        ValueError: several shards with that name have the key.
    """
    if shard is not None and os.sep in shard:
        shard = absolute(shard)
    found = index.find_all(shard, printable(key))
    if not found:
        where = "in these shards" if shard is None else f"in shard {shard!r}"
        like = ", ".join(repr(index.key(row)) for row in range(min(_EXAMPLES, index.num_rows)))
        raise KeyError(f"no sample {where} has the key {key!r}; keys here look like {like}")
    rows: list[int] = np.setdiff1d(found, unchosen).tolist()
    if not rows:
        raise KeyError(f"the sample {key!r} is left out by filter, split, take or select of its data set")
    return rows


def row_of_number(index: Index, number: int) -> int:
    """Return a row by its number; one below 0 counts from the end. Raises IndexError."""
    row = number + index.num_rows if number < 0 else number
    if not 0 <= row < index.num_rows:
        raise IndexError(f"row {number} is none of the {index.num_rows:,} rows of the index")
    return row

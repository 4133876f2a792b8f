"""The user's own order: rows of a data set, in the sequence of an array."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.storage.cache import MappedArray
from orchdata.order.order import Order


class ListedOrder(Order):
    """The same rows in the same sequence in every epoch. It pickles, with the rows as a mapped file.

    Args:
        listed: distinct rows, int64 (num_listed,).
        excluded: rows to leave out.
    """

    def __init__(self, listed: NDArray[np.int64], excluded: NDArray[np.int64]) -> None:
        rows = listed[~np.isin(listed, excluded)]
        super().__init__(len(rows), shuffle=None, seed=0)
        self._rows = MappedArray(rows)
        self._digest = hashlib.blake2b(np.ascontiguousarray(listed).tobytes(), digest_size=8).hexdigest()

    def located(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        source, indices = super().located(samples)
        return source, self._rows.array[indices]

    def describe(self) -> dict[str, object]:
        return super().describe() | {"rows": self._digest}

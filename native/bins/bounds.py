"""Bounds of bin packing: sizes (num_items,) and a capacity -> a lower bound of the bins of any packing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

MOST_PARTS = 16


@kernel
def martello_toth(sizes: NDArray[np.int64], capacity: int) -> int:
    """Return the bound L2 of Martello and Toth (1990).

    For each threshold: items that leave less room than it have a bin each, no two items above half share a bin, and the
    other items of at least the threshold need further bins for what exceeds the room in those.

    Args:
        sizes: int64 (num_items,), descending, each at most `capacity`, with a sum of at most 2**62.
    """
    num_items = sizes.shape[0]
    sums = np.zeros(num_items + 1, np.int64)
    for item in range(num_items):
        sums[item + 1] = sums[item] + sizes[item]
    large = 0  # Items above half of the capacity.
    while large < num_items and sizes[large] > capacity - sizes[large]:
        large += 1
    bound = max(np.int64(large), -(-sums[num_items] // capacity))
    alone = large  # Those of them that leave no room for an item of the threshold.
    for item in range(large, num_items):
        if item + 1 < num_items and sizes[item + 1] == sizes[item]:
            continue
        threshold = sizes[item]
        while alone > 0 and sizes[alone - 1] <= capacity - threshold:
            alone -= 1
        while alone < large and sizes[alone] > capacity - threshold:
            alone += 1
        room = (large - alone) * capacity - (sums[large] - sums[alone])
        rest = sums[item + 1] - sums[large] - room
        bound = max(bound, large + max(np.int64(0), -(-rest // capacity)))
    return bound


@kernel
def bins_bound(sizes: NDArray[np.int64], capacity: int) -> int:
    """Return the larger of L2 and the bounds u(k) of Fekete and Schepers (2001): k items above 1/(k+1) fill a bin.

    Args:
        sizes: as in `martello_toth`, and `capacity` at most 2**57.
    """
    bound = martello_toth(sizes, capacity)
    for parts in range(1, MOST_PARTS + 1):
        count = np.int64(0)
        for item in range(sizes.shape[0]):
            count += max(np.int64(1), -(-(parts + 1) * sizes[item] // capacity)) - 1
        bound = max(bound, -(-count // parts))
    return bound

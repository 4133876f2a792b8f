"""Node placement kernels: value of each item in each bin -> a bin for each item, within the bins' room, of high value.

Items are ranks, bins are nodes (or the ranks of one node). Integer arithmetic with a total order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel
from orchdata.native.sorting import descending_order


@kernel
def place_greedily(values: NDArray[np.int64], capacity: NDArray[np.int64]) -> NDArray[np.int32]:
    """Repeatedly take the largest value of an item without bin and a bin with room. Ties: the lower item, then bin.

    Args:
        values: int64 (num_items, num_bins), at least 0.
        capacity: int64 (num_bins,), most items of a bin, with a sum of at least num_items.

    Returns:
        int32 (num_items,): the bin of each item.
    """
    num_items, num_bins = values.shape
    room = capacity.copy()
    bins = np.full(num_items, np.int32(-1))
    left = num_items
    for pair in descending_order(values.reshape(-1)):
        if left == 0:
            break
        item = pair // num_bins
        chosen = pair % num_bins
        if bins[item] < 0 and room[chosen] > 0:
            bins[item] = chosen
            room[chosen] -= 1
            left -= 1
    return bins


@kernel
def swap_bins(values: NDArray[np.int64], bins: NDArray[np.int32], max_passes: int) -> int:
    """Exchange the bins of two items where that raises the sum of values, until no exchange does.

    Each item in turn takes its best exchange; ties go to the lower partner.

    Args:
        values: int64 (num_items, num_bins), at least 0.
        bins: int32 (num_items,), changed.
        max_passes: rounds over all items.

    Returns:
        The gain.
    """
    num_items = values.shape[0]
    gained = np.int64(0)
    for _ in range(max_passes):
        before = gained
        for item in range(num_items):
            own = bins[item]
            # Items of the same bin gain nothing: both differences are 0.
            best = np.int64(0)
            partner = -1
            for other in range(num_items):
                theirs = bins[other]
                gain = values[item, theirs] - values[item, own] + values[other, own] - values[other, theirs]
                if gain > best:
                    best = gain
                    partner = other
            if partner >= 0:
                bins[item] = bins[partner]
                bins[partner] = own
                gained += best
        if gained == before:
            break
    return gained

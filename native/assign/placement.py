"""Node placement kernels: value of each item in each bin -> a bin for each item, within the bins' room, of high value.

Items are ranks, bins are nodes (or the ranks of one node). Integer arithmetic with a total order.
"""

from __future__ import annotations

import numpy as np

from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import descending_order


@kernel
def place_greedily(values: Ints, capacity: Ints) -> Ints32:
    """Take the largest of values (num_items, num_bins) of an item without bin and a bin with room, again and again;
    ties: the lower item, then bin. Return the bin of each item; `capacity` is the most items of each bin.
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
def swap_bins(values: Ints, bins: Ints32, max_passes: int) -> int:
    """Exchange the bins of two items where that raises the sum of values, until no exchange does: each item in turn
    takes its best one, ties go to the lower partner. Return the gain.
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

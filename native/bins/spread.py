"""Spreading: items from the most costly -> the bin that costs least and has room, longest first (Graham 1969).

Bins are grouped into levels by their room, each level a heap by cost: an item compares the tops of the levels with room
for it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.bins.fill import Items, has_room
from orchdata.native.jit import kernel

LEVELS = 32


@kernel
def less(costs: NDArray[np.int64], first: int, second: int) -> bool:
    """Compare bins in their total order: by cost, then by number."""
    return costs[first] < costs[second] or (costs[first] == costs[second] and first < second)


@kernel
def push(heap: NDArray[np.int32], size: int, b: int, costs: NDArray[np.int64]) -> None:
    """Add a bin to a heap of `size` bins."""
    node = size
    while node > 0 and less(costs, b, heap[(node - 1) >> 1]):
        heap[node] = heap[(node - 1) >> 1]
        node = (node - 1) >> 1
    heap[node] = b


@kernel
def pop(heap: NDArray[np.int32], size: int, costs: NDArray[np.int64]) -> None:
    """Take the first bin off a heap of `size` bins."""
    last, node = heap[size - 1], 0
    while 2 * node + 1 < size - 1:
        child = 2 * node + 1
        if child + 1 < size - 1 and less(costs, heap[child + 1], heap[child]):
            child += 1
        if not less(costs, heap[child], last):
            break
        heap[node] = heap[child]
        node = child
    heap[node] = last


@kernel
def spread(
    items: Items,
    order: NDArray[np.int32],
    keys: NDArray[np.int64],
    work: NDArray[np.int64],
    bins: NDArray[np.int32],
    loads: NDArray[np.int64],
) -> None:
    """Put each item of `order` into the bin of least work that has room for it, in place.

    If none has room, put it into the first bin of the emptiest level, above its caps.

    Args:
        order: int32, some of the items.
        keys: int64 (num_items,), at least 0: work that each adds to its bin.
        work: int64 (num_bins,), ascending, work of the bins at the start.
        bins: int32 (num_items,), written.
        loads: int64 (num_bins, num_caps), zeros.
    """
    num_bins, num_caps = loads.shape
    units = np.empty(num_caps, np.int64)
    for k in range(num_caps):
        units[k] = -(-items.caps[k] // LEVELS)
    heaps = np.empty((LEVELS + 1, num_bins), np.int32)
    counts = np.zeros(LEVELS + 1, np.int64)
    for b in range(num_bins):
        heaps[LEVELS, b] = b
    counts[LEVELS] = num_bins
    for item in order:
        needed = np.int64(0)
        for k in range(num_caps):
            needed = max(needed, min(np.int64(LEVELS), -(-items.sizes[item, k] // units[k])))
        level = np.int64(-1)
        for other in range(max(np.int64(0), needed - 1), LEVELS + 1):
            if counts[other] == 0 or (level >= 0 and not less(work, heaps[other, 0], heaps[level, 0])):
                continue
            if has_room(loads[heaps[other, 0]], items.sizes[item], items.caps):
                level = other
        if level < 0:
            level = LEVELS
            while counts[level] == 0:
                level -= 1
        b = heaps[level, 0]
        pop(heaps[level], counts[level], work)
        counts[level] -= 1
        bins[item] = b
        work[b] += keys[item]
        room = np.int64(LEVELS)
        for k in range(num_caps):
            loads[b, k] += items.sizes[item, k]
            room = max(np.int64(0), min(room, (items.caps[k] - loads[b, k]) // units[k]))
        push(heaps[room], counts[room], b, work)
        counts[room] += 1

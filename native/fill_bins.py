"""Filling bins one at a time: items from the largest -> bin of each; the pair that leaves least room is preferred.

With `tries` 0 it is first-fit decreasing (Johnson 1973), bin by bin. With more, the next item of a bin is the first of
the pair that fills it best, like the minimum bin slack of Gupta and Ho (1999), limited to two items.

Dealing filled bins: costs (num_bins, num_phases) -> an order; `num_ranks` consecutive bins are a micro-step.

Bounds of bin packing: sizes (num_items,) and a capacity -> a lower bound of the bins of any packing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from orchdata.native.jit import Ints, Ints32, kernel

TABLE_BITS = 16
MISSES = 64  # Items that fit by their first size, to look at for one that fits by all.


class Items(NamedTuple):
    """Items to pack: sizes int64 (num_items, num_caps), first the column that decides; caps int64 (num_caps,), at
    least as large as every size; costs int64 (num_items,).
    """

    sizes: Ints
    caps: Ints
    costs: Ints


class Left(NamedTuple):
    """Items without a bin, among all items from the largest.

    Attributes:
        order: int32 (num_items,), from the largest first size; ties by position.
        sizes: int64 (num_items,), first sizes in that order.
        next: int64 (num_items + 1,): the position itself if its item is left, else a later one.
        table: int64, first position of each size or less, in steps of 1 << shift.
        shift: of sizes in the table.
    """

    order: Ints32
    sizes: Ints
    next: Ints
    table: Ints
    shift: int


@kernel
def all_left(order: Ints32, first_sizes: Ints) -> Left:
    """Return the state without packed items; `first_sizes` int64 (num_items,) are by item."""
    num_items = order.shape[0]
    sizes = np.empty(num_items, np.int64)
    for position in range(num_items):
        sizes[position] = first_sizes[order[position]]
    largest = sizes[0] if num_items > 0 else np.int64(0)
    shift = np.int64(0)
    while largest >> shift >= 1 << TABLE_BITS:
        shift += 1
    table = np.empty((largest >> shift) + 1, np.int64)
    position = np.int64(0)
    for step in range(table.shape[0] - 1, -1, -1):
        while position < num_items and sizes[position] >> shift > step:
            position += 1
        table[step] = position
    return Left(order, sizes, np.arange(num_items + 1), table, shift)


@kernel
def next_left(left: Left, position: int) -> int:
    """Return the first position from `position` with an item left, or the number of items; speeds up the next call."""
    free = position
    while left.next[free] != free:
        free = left.next[free]
    while left.next[position] != free:
        left.next[position], position = free, left.next[position]
    return free


@kernel
def next_at_most(left: Left, room: int, position: int) -> int:
    """Return the first position from `position` with an item left of at most `room`."""
    step = room >> left.shift
    if step < left.table.shape[0]:
        position = max(position, left.table[step])
        while position < left.sizes.shape[0] and left.sizes[position] > room:
            position += 1
    return next_left(left, position)


@kernel
def has_room(loads: Ints, sizes: Ints, limits: Ints) -> bool:
    room = True
    for k in range(limits.shape[0]):
        room &= loads[k] + sizes[k] <= limits[k]
    return room


@kernel
def best_next(items: Items, left: Left, loads: Ints, limits: Ints, tries: int) -> int:
    """Return the position of the item that a bin takes next, -1 for none: among `tries` sizes, from the largest that
    fits, the one that leaves least room with a second item.
    """
    num_items = left.order.shape[0]
    room = limits[0] - loads[0]
    if room < 0:
        return np.int64(-1)
    best, filled = np.int64(-1), np.int64(-1)
    position = next_at_most(left, room, np.int64(0))
    looked, missed = 0, 0
    while looked <= tries and missed <= MISSES and position < num_items and 2 * left.sizes[position] > filled:
        size = left.sizes[position]
        if has_room(loads, items.sizes[left.order[position]], limits):
            second = next_at_most(left, room - size, position + 1) if tries > 0 else num_items
            together = size + (left.sizes[second] if second < num_items else np.int64(0))
            if together > filled:
                best, filled = position, together
            if filled == room or tries == 0 or size == 0:
                break
            looked += 1
            position = next_at_most(left, size - 1, position + 1)
        else:  # Another item of this size may fit by its other columns.
            missed += 1
            position = next_left(left, position + 1)
    return best


@kernel
def fill_bins(items: Items, left: Left, limits: Ints, turns: Ints, tries: int, bins: Ints32, loads: Ints) -> int:
    """Fill bins in the order of `turns` within `limits`, at most the caps, in place. Return the number of bins visited
    until no item was left, or that of all bins.
    """
    num_items = left.order.shape[0]
    for turn in range(turns.shape[0]):
        if next_left(left, np.int64(0)) >= num_items:
            return turn
        b = turns[turn]
        while True:
            position = best_next(items, left, loads[b], limits, tries)
            if position < 0:
                break
            put(items, left, position, b, bins, loads)
    return turns.shape[0]


@kernel
def put(items: Items, left: Left, position: int, b: int, bins: Ints32, loads: Ints) -> None:
    """Put the item at `position` into bin `b`."""
    item = left.order[position]
    bins[item] = b
    left.next[position] = position + 1
    for k in range(loads.shape[1]):
        loads[b, k] += items.sizes[item, k]


MOST_SWAPS = 64
PAIRS = 1 << 22  # The most pairs to look at.


@kernel
def waits(costs: Ints, bins: Ints, num_ranks: int) -> int:
    """Return the sum over micro-steps and phases of the largest cost, with bins in this order."""
    total = np.int64(0)
    for first in range(0, bins.shape[0], num_ranks):
        for p in range(costs.shape[1]):
            largest = np.int64(0)
            for position in range(first, min(first + num_ranks, bins.shape[0])):
                largest = max(largest, costs[bins[position], p])
            total += largest
    return total


@kernel
def peaks_without(costs: Ints, bins: Ints, first: int, stop: int, position: int, added: int) -> int:
    """Return the sum over phases of the largest cost in a micro-step with one bin replaced by `added`."""
    total = np.int64(0)
    for p in range(costs.shape[1]):
        largest = costs[added, p]
        for each in range(first, stop):
            if each != position:
                largest = max(largest, costs[bins[each], p])
        total += largest
    return total


@kernel
def deal(costs: Ints, num_ranks: int) -> Ints:
    """Return bins, (num_bins,), in an order in which those of a micro-step are alike. They are sorted by descending
    cost; with several phases by their sum or by one: the order in which ranks wait least. Then the bin with the largest
    cost of a micro-step is exchanged with another while ranks wait less.
    """
    num_bins, num_phases = costs.shape
    together = np.zeros(num_bins, np.int64)
    for p in range(num_phases):
        together += costs[:, p]
    by_sum = np.argsort(-together, kind="mergesort")
    best, least = by_sum, waits(costs, by_sum, num_ranks)
    if num_phases == 1 or num_bins <= num_ranks:
        return best
    for p in range(num_phases):
        order = by_sum[np.argsort(-costs[by_sum, p], kind="mergesort")]
        waiting = waits(costs, order, num_ranks)
        if waiting < least:
            best, least = order, waiting
    return swapped(costs, best, num_ranks)


@kernel
def swapped(costs: Ints, bins: Ints, num_ranks: int) -> Ints:
    """Swap bins between micro-steps to lower what ranks wait for: the best swap of each peak, a few at most."""
    num_bins, num_phases = costs.shape
    room = np.int64(PAIRS)
    for _ in range(MOST_SWAPS):
        gain, one, two = np.int64(0), np.int64(-1), np.int64(-1)
        for first in range(0, num_bins, num_ranks):
            stop = min(first + num_ranks, num_bins)
            here = waits(costs, bins[first:stop], num_ranks)
            for p in range(num_phases):
                peak = first
                for position in range(first, stop):
                    if costs[bins[position], p] > costs[bins[peak], p]:
                        peak = position
                for start in range(0, num_bins, num_ranks):
                    if start == first:
                        continue
                    end = min(start + num_ranks, num_bins)
                    there = waits(costs, bins[start:end], num_ranks)
                    room -= (end - start) * (stop - first + end - start)
                    if room < 0:
                        return bins
                    for other in range(start, end):
                        less = here + there
                        less -= peaks_without(costs, bins, first, stop, peak, bins[other])
                        less -= peaks_without(costs, bins, start, end, other, bins[peak])
                        if less > gain:
                            gain, one, two = less, peak, other
        if gain == 0:
            break
        bins[one], bins[two] = bins[two], bins[one]
    return bins


MOST_PARTS = 16


@kernel
def martello_toth(sizes: Ints, capacity: int) -> int:
    """Return the bound L2 of Martello and Toth (1990) of descending sizes. For each threshold: items that leave less
    room than it have a bin each, no two above half share a bin, and the other items of at least the threshold need
    further bins for what exceeds the room in those.
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
def bins_bound(sizes: Ints, capacity: int) -> int:
    """Return the larger of L2 and the bounds u(k) of Fekete and Schepers (2001): k items above 1/(k+1) fill a bin;
    `capacity` is at most 2**57.
    """
    bound = martello_toth(sizes, capacity)
    for parts in range(1, MOST_PARTS + 1):
        count = np.int64(0)
        for item in range(sizes.shape[0]):
            count += max(np.int64(1), -(-(parts + 1) * sizes[item] // capacity)) - 1
        bound = max(bound, -(-count // parts))
    return bound

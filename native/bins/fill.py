"""Filling bins one at a time: items from the largest -> bin of each, the pair that leaves least room preferred.

With `tries` 0 it is first-fit decreasing (Johnson 1973), bin by bin. With more, the next item of a bin is the first of
the pair that fills it best, after the minimum bin slack of Gupta and Ho (1999), cut off at two items.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

TABLE_BITS = 16
MISSES = 64  # Items that fit by their first size alone, looked at for one that fits by all.


class Items(NamedTuple):
    """Items to pack: sizes int64 (num_items, num_caps), the column that is packed by first; caps int64 (num_caps,), at
    least as large as every size; costs int64 (num_items,).
    """

    sizes: NDArray[np.int64]
    caps: NDArray[np.int64]
    costs: NDArray[np.int64]


class Left(NamedTuple):
    """Items that are in no bin yet, among all from the largest.

    Attributes:
        order: int32 (num_items,), from the largest first size; ties by position.
        sizes: int64 (num_items,), first sizes in that order.
        next: int64 (num_items + 1,): the place itself where its item is left, else a later one.
        table: int64, first place of sizes of at most so much, in steps of 1 << shift.
        shift: what sizes are divided by in the table.
    """

    order: NDArray[np.int32]
    sizes: NDArray[np.int64]
    next: NDArray[np.int64]
    table: NDArray[np.int64]
    shift: int


@kernel
def all_left(order: NDArray[np.int32], first_sizes: NDArray[np.int64]) -> Left:
    """Nothing is packed yet; `first_sizes` int64 (num_items,) are by item."""
    num_items = order.shape[0]
    sizes = np.empty(num_items, np.int64)
    for place in range(num_items):
        sizes[place] = first_sizes[order[place]]
    largest = sizes[0] if num_items > 0 else np.int64(0)
    shift = np.int64(0)
    while largest >> shift >= 1 << TABLE_BITS:
        shift += 1
    table = np.empty((largest >> shift) + 1, np.int64)
    place = np.int64(0)
    for step in range(table.shape[0] - 1, -1, -1):
        while place < num_items and sizes[place] >> shift > step:
            place += 1
        table[step] = place
    return Left(order, sizes, np.arange(num_items + 1), table, shift)


@kernel
def next_left(left: Left, place: int) -> int:
    """The first place from `place` on whose item is left, or their number; shortens the way for the next call."""
    found = place
    while left.next[found] != found:
        found = left.next[found]
    while left.next[place] != found:
        left.next[place], place = found, left.next[place]
    return found


@kernel
def next_at_most(left: Left, room: int, place: int) -> int:
    """The first place from `place` on whose item is left and at most `room` large."""
    step = room >> left.shift
    if step < left.table.shape[0]:
        place = max(place, left.table[step])
        while place < left.sizes.shape[0] and left.sizes[place] > room:
            place += 1
    return next_left(left, place)


@kernel
def has_room(loads: NDArray[np.int64], sizes: NDArray[np.int64], limits: NDArray[np.int64]) -> bool:
    room = True
    for k in range(limits.shape[0]):
        room &= loads[k] + sizes[k] <= limits[k]
    return room


@kernel
def best_next(items: Items, left: Left, loads: NDArray[np.int64], limits: NDArray[np.int64], tries: int) -> int:
    """The place of the item that a bin takes next, -1 for none.

    Of several sizes, the largest that fit first, the one that with a second item leaves least room; so many are tried.
    """
    num_items = left.order.shape[0]
    room = limits[0] - loads[0]
    if room < 0:
        return np.int64(-1)
    best, filled = np.int64(-1), np.int64(-1)
    place = next_at_most(left, room, np.int64(0))
    looked, missed = 0, 0
    while looked <= tries and missed <= MISSES and place < num_items and 2 * left.sizes[place] > filled:
        size = left.sizes[place]
        if has_room(loads, items.sizes[left.order[place]], limits):
            second = next_at_most(left, room - size, place + 1) if tries > 0 else num_items
            together = size + (left.sizes[second] if second < num_items else np.int64(0))
            if together > filled:
                best, filled = place, together
            if filled == room or tries == 0 or size == 0:
                break
            looked += 1
            place = next_at_most(left, size - 1, place + 1)
        else:  # another item of this size may fit by its other columns
            missed += 1
            place = next_left(left, place + 1)
    return best


@kernel
def fill_bins(
    items: Items,
    left: Left,
    limits: NDArray[np.int64],
    turns: NDArray[np.int64],
    tries: int,
    bins: NDArray[np.int32],
    loads: NDArray[np.int64],
) -> int:
    """Fill bins in the order of `turns` within `limits`, in place.

    Args:
        left: changed in place too.
        limits: int64 (num_caps,), at most the caps.
        tries: pairs that are looked at for each item.
        bins: int32 (num_items,), written.
        loads: int64 (num_bins, num_caps).

    Returns:
        How many bins were looked at before nothing was left; their number where something is left.
    """
    num_items = left.order.shape[0]
    for turn in range(turns.shape[0]):
        if next_left(left, np.int64(0)) >= num_items:
            return turn
        b = turns[turn]
        while True:
            place = best_next(items, left, loads[b], limits, tries)
            if place < 0:
                break
            put(items, left, place, b, bins, loads)
    return turns.shape[0]


@kernel
def put(items: Items, left: Left, place: int, b: int, bins: NDArray[np.int32], loads: NDArray[np.int64]) -> None:
    """Put what is left at `place` into bin `b`."""
    item = left.order[place]
    bins[item] = b
    left.next[place] = place + 1
    for k in range(loads.shape[1]):
        loads[b, k] += items.sizes[item, k]

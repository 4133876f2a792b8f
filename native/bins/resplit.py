"""Sharing out two bins again: the excess of one, in size or cost, goes to another, until no bin can be helped."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.native.bins.fill import Items
from orchdata.native.jit import kernel

MOVABLE = 10  # Up to this number of items of two bins, all ways to share them out are tried.
MOST_ITEMS = 512  # Two bins with more items are not changed.
PARTNERS = 8
ROUNDS = 8
ANY_COST = np.int64((1 << 63) - 1)


class Held(NamedTuple):
    """The items of bins. numba's caches on disk refer to this class by its name, and older ones must stay readable.

    Attributes:
        bins: int32 (num_items,), the bin of each item.
        loads, costs: int64 (num_bins, num_caps) and (num_bins,), sums over the items of a bin.
        first, next: int32 (num_bins,) and (num_items,), the first item of a bin and the one after each; -1 for none.
    """

    bins: NDArray[np.int32]
    loads: NDArray[np.int64]
    costs: NDArray[np.int64]
    first: NDArray[np.int32]
    next: NDArray[np.int32]


@kernel
def contents_of(items: Items, bins: NDArray[np.int32], num_bins: int) -> Held:
    num_items, num_caps = items.sizes.shape
    contents = Held(
        bins,
        np.zeros((num_bins, num_caps), np.int64),
        np.zeros(num_bins, np.int64),
        np.full(num_bins, np.int32(-1)),
        np.full(num_items, np.int32(-1)),
    )
    for item in range(num_items - 1, -1, -1):
        b = bins[item]
        contents.costs[b] += items.costs[item]
        for k in range(num_caps):
            contents.loads[b, k] += items.sizes[item, k]
        contents.next[item], contents.first[b] = contents.first[b], item
    return contents


@kernel
def excess(loads: NDArray[np.int64], caps: NDArray[np.int64]) -> int:
    """Return the load of a bin above its caps, summed over them."""
    above = np.int64(0)
    for k in range(caps.shape[0]):
        above += max(np.int64(0), loads[k] - caps[k])
    return above


@kernel
def pooled(items: Items, at: Held, one: int, other: int, pool: NDArray[np.int32]) -> int:
    """Write the items of two bins from the most costly, ties by position. Return their number, -1 if above the pool."""
    count = 0
    for turn in range(2):
        item = at.first[one if turn == 0 else other]
        while item >= 0:
            if count == pool.shape[0]:
                return -1
            position = count
            while position > 0:
                before = pool[position - 1]
                if items.costs[before] > items.costs[item]:
                    break
                if items.costs[before] == items.costs[item] and before < item:
                    break
                pool[position] = before
                position -= 1
            pool[position] = item
            count += 1
            item = at.next[item]
    return count


@kernel
def resplit(items: Items, at: Held, one: int, other: int, goal: int, pool: NDArray[np.int32]) -> tuple[bool, int]:
    """Share out the items of two bins again, so that less is above the caps, or else the larger cost is smaller.

    All ways to share out `MOVABLE` of them, spread over their costs, are tried, up to the first within the caps and
    `goal`. Ties: the first way.

    Returns:
        (whether one is better, the number of ways tried).
    """
    count = pooled(items, at, one, other, pool)
    if count < 0:
        return False, MOST_ITEMS
    num_caps, movable = items.caps.shape[0], min(count, MOVABLE)
    first, second = at.loads[one].copy(), at.loads[other].copy()
    first_cost, second_cost = at.costs[one], at.costs[other]
    above = least_above = excess(first, items.caps) + excess(second, items.caps)
    largest = least = max(first_cost, second_cost)
    sides = np.int64(0)  # A bit for each movable item: set in the other bin.
    for position in range(movable):
        if at.bins[pool[position * count // movable]] == other:
            sides |= np.int64(1) << position
    chosen, looked = np.int64(-1), 0
    for code in range(1, 1 << movable):
        looked += 1
        turned = 0  # Gray code: each way differs from the one before in one item
        while code >> turned & 1 == 0:
            turned += 1
        item = pool[turned * count // movable]
        sign = np.int64(1) if sides >> turned & 1 else np.int64(-1)
        sides ^= np.int64(1) << turned
        first_cost += sign * items.costs[item]
        second_cost -= sign * items.costs[item]
        for k in range(num_caps):
            first[k] += sign * items.sizes[item, k]
            second[k] -= sign * items.sizes[item, k]
        cost = max(first_cost, second_cost)
        if least_above == 0 and cost >= least:
            continue
        both_above = excess(first, items.caps) + excess(second, items.caps)
        if both_above < least_above or (both_above == least_above and cost < least):
            least_above, least, chosen = both_above, cost, sides
            if both_above == 0 and cost <= goal:
                break
    # A gain below a thousandth of the cost does not count.
    if chosen < 0 or (above == 0 and least > largest - (largest >> 10)):
        return False, looked + count
    for position in range(movable):
        move(items, at, pool[position * count // movable], other if chosen >> position & 1 else one)
    at.first[one] = at.first[other] = -1
    for position in range(count):
        item = pool[position]
        b = at.bins[item]
        at.next[item], at.first[b] = at.first[b], item
    return True, looked + count


@kernel
def move(items: Items, at: Held, item: int, b: int) -> None:
    """Count an item in another bin; the lists do not change."""
    old = at.bins[item]
    if old == b:
        return
    at.bins[item] = b
    at.costs[old] -= items.costs[item]
    at.costs[b] += items.costs[item]
    for k in range(items.caps.shape[0]):
        at.loads[old, k] -= items.sizes[item, k]
        at.loads[b, k] += items.sizes[item, k]


@kernel
def costliest(items: Items, at: Held, b: int) -> int:
    """Return the largest cost of an item in a bin."""
    largest, item = np.int64(0), at.first[b]
    while item >= 0:
        largest = max(largest, items.costs[item])
        item = at.next[item]
    return largest


@kernel
def is_done(items: Items, at: Held, b: int, goal: int) -> bool:
    """Return whether a bin keeps the caps (`goal` ANY_COST), or costs at most `goal` or about its largest item."""
    if goal == ANY_COST:
        return excess(at.loads[b], items.caps) == 0
    if at.costs[b] <= goal:
        return True
    largest = costliest(items, at, b)
    return at.costs[b] <= largest + (largest >> 7)


@kernel
def settle(items: Items, at: Held, goals: NDArray[np.int64], num_ranks: int, budget: int) -> int:
    """Lower the excess of bins, from the worst, with the help of the bins that have least, in place.

    Args:
        goals: int64, descending, the allowed cost of the most costly `num_ranks` bins, the next, and so on; all
            ANY_COST to bring bins within their caps.
        num_ranks: bins that run at the same time.
        budget: ways of sharing out two bins to try.

    Returns:
        The rest of the budget.
    """
    num_bins, num_caps = at.loads.shape
    pool = np.empty(MOST_ITEMS, np.int32)
    for _ in range(ROUNDS):
        key = np.empty(num_bins, np.float64)
        to_caps = goals[0] == ANY_COST
        for b in range(num_bins):
            key[b] = at.costs[b]
            if to_caps:
                key[b] = 0.0
                for k in range(num_caps):
                    key[b] = max(key[b], at.loads[b, k] / items.caps[k])
        ascending = np.argsort(key, kind="mergesort")
        helped, light = 0, 0
        for position in range(num_bins - 1, 0, -1):
            heavy = ascending[position]
            goal = goals[(num_bins - 1 - position) // num_ranks]
            if (key[heavy] <= 1.0 if to_caps else at.costs[heavy] <= goals[-1]) or budget <= 0:
                break
            if is_done(items, at, heavy, goal):
                continue
            for turn in range(min(PARTNERS, position)):
                other = ascending[(light + turn) % position]
                if not to_caps and at.costs[other] >= at.costs[heavy]:
                    continue
                better, looked = resplit(items, at, heavy, other, goal, pool)
                budget -= looked
                if better:
                    helped += 1
                    if is_done(items, at, heavy, goal):
                        break
            light = (light + 1) % position
        if helped == 0 or budget <= 0:
            break
    return budget

"""Packing items into a given number of bins: several starts, each brought within the caps, then levelled in cost.

the costly part spread by cost, the small rest filled in --+
all filled in, bin by bin (first-fit decreasing) ----------+-- settle: caps --> settle: costs --> the cheapest
all spread by size ----------------------------------------+
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.bins.fill import Items, Left, all_left, fill_bins, next_left, put
from orchdata.native.bins.resplit import ANY_COST, Held, contents_of, excess, settle
from orchdata.native.bins.spread import spread
from orchdata.native.jit import kernel
from orchdata.native.sorting import descending_order

# Share of the whole size, in thousandths, of the smallest items, which are filled in; and pairs to try for each.
STARTS = ((50, 8), (1000, 8), (1000, 0), (0, 0), (250, 8))
FEW_ITEMS = 8192  # Up to this number all starts are tried; above it the first that keeps the caps is taken.
BUDGET, BUDGET_AN_ITEM = 400_000, 16  # Ways to share out two bins, for all starts together.


@kernel
def levels(keys: NDArray[np.int64], num_bins: int, num_ranks: int) -> NDArray[np.int64]:
    """Return the least cost of the bins of each micro-step, the most costly first: int64 (num_micro_steps,).

    A micro-step waits for its largest item, so the largest items meet in the first micro-steps, where other bins may
    cost as much. The others are level.

    Args:
        keys: int64 (num_items,), costs in descending order.
    """
    num_steps = -(-num_bins // num_ranks)
    step_costs = np.zeros(num_steps, np.int64)
    left, rest = -(-keys.sum() // num_ranks), num_steps
    for step in range(num_steps):
        first = keys[step * num_ranks] if step * num_ranks < keys.shape[0] else np.int64(0)
        if first * rest <= left or rest == 1:
            step_costs[step:] = max(first, -(-left // rest))
            break
        step_costs[step] = first
        left, rest = max(np.int64(0), left - first), rest - 1
    return step_costs


@kernel
def excess_costs(items: Items, left: Left, cut: int) -> NDArray[np.int64]:
    """Return the costs of the items before `cut` above the average cost of the rest for that size, at least 0.

    The fuller a bin is, the less it gets of the rest: balancing these costs makes full bins even.
    """
    num_items = left.order.shape[0]
    size, cost = np.int64(0), np.int64(0)
    for position in range(cut, num_items):
        size += left.sizes[position]
        cost += items.costs[left.order[position]]
    shift = np.int64(0)
    while cost >> shift >= 1 << 31:
        shift += 1
    keys = items.costs.copy()
    if size > 0 and left.sizes[0] < 1 << 31:
        for item in range(num_items):
            keys[item] = max(np.int64(0), keys[item] - (((cost >> shift) * items.sizes[item, 0] // size) << shift))
    return keys


@kernel
def started(items: Items, left: Left, filled: int, tries: int, num_bins: int, num_ranks: int) -> NDArray[np.int32]:
    """Return a first packing, which may be above the caps, by one of `STARTS`."""
    num_items, num_caps = items.sizes.shape
    total = left.sizes.sum()
    cut, rest = num_items, np.int64(0)
    while cut > 0 and rest + left.sizes[cut - 1] <= total // 1000 * filled + total % 1000 * filled // 1000:
        cut -= 1
        rest += left.sizes[cut]
    bins = np.zeros(num_items, np.int32)
    loads = np.zeros((num_bins, num_caps), np.int64)
    if cut > 0:
        keys = excess_costs(items, left, cut) if filled > 0 else items.sizes[:, 0].copy()
        mine = np.empty(cut, np.int64)
        for position in range(cut):
            mine[position] = keys[left.order[position]]
            left.next[position] = position + 1
        order = descending_order(mine)
        work = np.zeros(num_bins, np.int64)
        if filled > 0:
            at_best = levels(mine[order], num_bins, num_ranks)
            for b in range(num_bins):
                work[b] = at_best[-1] - at_best[b // num_ranks]
        spread(items, left.order[order], keys, work, bins, loads)
    if cut < num_items:
        limits = items.caps.copy()
        if cut > 0:  # Leave some room at first: bins with room are easier to level.
            for k in range(num_caps):
                even = min(items.caps[k], items.sizes[:, k].sum() // num_bins)
                limits[k] = even + (items.caps[k] - even) // 4
        turns = np.argsort(-loads[:, 0], kind="mergesort")
        for _ in range(2):
            fill_bins(items, left, limits, turns, tries, bins, loads)
            limits = items.caps
        emptiest = np.argsort(loads[:, 0], kind="mergesort")
        position, turn = next_left(left, np.int64(0)), 0
        while position < num_items:
            put(items, left, position, emptiest[turn % num_bins], bins, loads)
            position, turn = next_left(left, position), turn + 1
    return bins


@kernel
def is_within(items: Items, at: Held) -> bool:
    for b in range(at.loads.shape[0]):
        if excess(at.loads[b], items.caps) > 0:
            return False
    return True


@kernel
def price_of(costs: NDArray[np.int64], num_ranks: int) -> int:
    """Return the sum over blocks of `num_ranks` bins of the largest cost, with bins from the most costly."""
    descending = -np.sort(-costs)
    total = np.int64(0)
    for first in range(0, descending.shape[0], num_ranks):
        total += descending[first]
    return total


@kernel
def pack(items: Items, num_bins: int, num_ranks: int) -> tuple[NDArray[np.int32], bool]:
    """Pack items into bins within the caps, so that bins which run at the same time cost about the same.

    Args:
        items: sums of sizes and costs at most 2**62.
        num_ranks: bins that run at the same time.

    Returns:
        (bins int32 (num_items,), whether the caps are kept).
    """
    num_items = items.sizes.shape[0]
    order = descending_order(items.sizes[:, 0].copy())
    left = all_left(order, items.sizes[:, 0])
    goals = levels(items.costs[descending_order(items.costs)], num_bins, num_ranks)
    goals += goals >> 8
    within = np.full(goals.shape[0], ANY_COST)
    budget = np.int64(BUDGET + BUDGET_AN_ITEM * num_items)
    best, least = np.zeros(num_items, np.int32), np.int64(-1)
    for filled, tries in STARTS:
        left.next[:] = np.arange(num_items + 1)
        at = contents_of(items, started(items, left, filled, tries, num_bins, num_ranks), num_bins)
        share = budget // 3 if num_items > FEW_ITEMS else np.int64((BUDGET + BUDGET_AN_ITEM * num_items) // 8)
        if not is_within(items, at):
            budget -= share - settle(items, at, within, num_ranks, share)
        if not is_within(items, at):
            continue
        settle(items, at, goals, num_ranks, budget if num_items > FEW_ITEMS else share)
        price = price_of(at.costs, num_ranks)
        if least < 0 or price < least:
            best, least = at.bins, price
        if num_items > FEW_ITEMS:
            break
    return best, least >= 0


@kernel
def first_fit_bins(items: Items) -> int:
    """Return a number of bins that `pack` always succeeds with, at least 1: that of filling one bin at a time."""
    num_items = items.sizes.shape[0]
    left = all_left(descending_order(items.sizes[:, 0].copy()), items.sizes[:, 0])
    bins, least = np.empty(num_items, np.int32), max(1, num_items)
    for filled, tries in STARTS:
        if filled == 1000:
            left.next[:] = np.arange(num_items + 1)
            loads = np.zeros((num_items, items.sizes.shape[1]), np.int64)
            turns = np.arange(num_items)
            least = max(1, min(least, fill_bins(items, left, items.caps, turns, tries, bins, loads)))
    return least

"""Packing items into a given number of bins: several starts, each brought within the caps, then levelled in cost.

the costly part spread by cost, the small rest filled in --+
all filled in, bin by bin (first-fit decreasing) ----------+-- settle: caps --> settle: costs --> the cheapest
all spread by size ----------------------------------------+

To settle, two bins share out their items again: the excess of one goes to another, until no bin can be helped. To
spread, items go to the bin that costs least and has room, longest first (Graham 1969). Bins are then grouped into
levels by their room, each a heap by cost: an item compares the tops of the levels with room for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from orchdata.native.fill_bins import Items, Left, all_left, fill_bins, has_room, next_left, put
from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import descending_order

# Share of the whole size, in thousandths, of the smallest items, which are filled in; and pairs to try for each.
STARTS = ((50, 8), (1000, 8), (1000, 0), (0, 0), (250, 8))
FEW_ITEMS = 8192  # Up to this number all starts are tried; above it the first that keeps the caps is taken.
BUDGET, BUDGET_AN_ITEM = 400_000, 16  # Ways to share out two bins, for all starts together.


@kernel
def levels(keys: Ints, num_bins: int, num_ranks: int) -> Ints:
    """Return the least cost of the bins of each micro-step, the most costly first, of descending `keys`. A micro-step
    waits for its largest item, so the largest meet in the first ones, where other bins may cost as much. The others are
    level.
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
def excess_costs(items: Items, left: Left, cut: int) -> Ints:
    """Return the costs of the items before `cut` above the average of the rest for that size, at least 0. The fuller a
    bin is, the less it gets of the rest: balancing these costs makes full bins even.
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
def started(items: Items, left: Left, filled: int, tries: int, num_bins: int, num_ranks: int) -> Ints32:
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
def price_of(costs: Ints, num_ranks: int) -> int:
    """Return the sum over blocks of `num_ranks` bins of the largest cost, with bins from the most costly."""
    descending = -np.sort(-costs)
    total = np.int64(0)
    for first in range(0, descending.shape[0], num_ranks):
        total += descending[first]
    return total


@kernel
def pack(items: Items, num_bins: int, num_ranks: int) -> tuple[Ints32, bool]:
    """Pack items so that `num_ranks` bins, which run at the same time, cost about the same. Return (bins, whether caps
    are kept).
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

    bins: Ints32
    loads: Ints
    costs: Ints
    first: Ints32
    next: Ints32


@kernel
def contents_of(items: Items, bins: Ints32, num_bins: int) -> Held:
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
def excess(loads: Ints, caps: Ints) -> int:
    """Return the load of a bin above its caps, summed over them."""
    above = np.int64(0)
    for k in range(caps.shape[0]):
        above += max(np.int64(0), loads[k] - caps[k])
    return above


@kernel
def pooled(items: Items, at: Held, one: int, other: int, pool: Ints32) -> int:
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
def resplit(items: Items, at: Held, one: int, other: int, goal: int, pool: Ints32) -> tuple[bool, int]:
    """Share out the items of two bins again, so that less is above the caps, or else the larger cost is smaller: all
    ways for `MOVABLE` of them, spread over their costs, up to the first within the caps and `goal`. Return (whether one
    is better, the number of ways tried).
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
def settle(items: Items, at: Held, goals: Ints, num_ranks: int, budget: int) -> int:
    """Lower the excess of bins, from the worst, with the help of the bins that have least, in place. Return the rest of
    the budget. `goals`: the allowed cost of the most costly `num_ranks` bins, the next, and so on; all ANY_COST for the
    caps.
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


LEVELS = 32


@kernel
def less(costs: Ints, first: int, second: int) -> bool:
    """Compare bins in their total order: by cost, then by number."""
    return costs[first] < costs[second] or (costs[first] == costs[second] and first < second)


@kernel
def push(heap: Ints32, size: int, b: int, costs: Ints) -> None:
    """Add a bin to a heap of `size` bins."""
    node = size
    while node > 0 and less(costs, b, heap[(node - 1) >> 1]):
        heap[node] = heap[(node - 1) >> 1]
        node = (node - 1) >> 1
    heap[node] = b


@kernel
def pop(heap: Ints32, size: int, costs: Ints) -> None:
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
def spread(items: Items, order: Ints32, keys: Ints, work: Ints, bins: Ints32, loads: Ints) -> None:
    """Put each item of `order` into the bin of least work that has room, else into the first of the emptiest level,
    above its caps; in place. `keys`: the work that each item adds; `work`, ascending, is that of the bins at the start.
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

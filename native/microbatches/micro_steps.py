"""Bin packing kernels: sizes (num_items, num_caps) and costs (num_items, num_phases) of items -> bin of each.

Several ranks share a bin: it takes, in each phase, its largest item or an even share of all, whichever is more. So
large items of a phase belong together, and small ones into the gaps.

Bin packing kernels for one rank: sizes (num_items, num_caps) -> bin of each item, within every cap.

An item above a cap is oversize: it must be alone in its bin. The first bins may hold other items already: `held`, int64
(bins, 2 + num_caps) or empty, has their cost, number and sizes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import descending_order

KEY_BITS = 22  # Two passes of the radix sort.
LEVELS = 64  # Levels of the fullness of a rank.
NOTHING_HELD = np.empty((0, 0, 0), np.int64)  # Not None, which would compile every kernel twice.


@kernel
def descending_floats(values: NDArray[np.float64]) -> Ints32:
    """Return indices of values, at least 0, from the largest; values within 2**-22 of the largest keep their order."""
    keys = np.empty(values.shape[0], np.int64)
    scale = np.float64(1 << KEY_BITS) - 1
    largest = values.max() if values.shape[0] > 0 else 0.0
    for index in range(values.shape[0]):
        keys[index] = np.int64(values[index] / largest * scale) if largest > 0 else 0
    return descending_order(keys)


@kernel
def packing_orders(costs: Ints, sizes: Ints, primary: int) -> Ints32:
    """Return orders in which items are packed, int32 (num_orders, num_items): large items of one phase first, then the
    rest by the primary phase, for each phase; all phases one after another, those with the highest total first; by the
    largest share of a phase's total; and by cost for each unit of size.
    """
    num_items, num_phases = costs.shape
    totals = np.empty(num_phases, np.int64)
    by_phase = np.empty((num_phases, num_items), np.int32)
    for p in range(num_phases):
        totals[p] = costs[:, p].sum()
        by_phase[p] = descending_floats(costs[:, p].astype(np.float64))
    sequences = np.full((num_phases + 1, num_phases), np.int64(-1))
    for p in range(num_phases):
        sequences[p, 0] = p
    ranked = np.argsort(-totals, kind="mergesort")
    sequences[num_phases, :] = ranked
    num_orders = num_phases + (3 if num_phases > 1 else 1)
    orders = np.empty((num_orders, num_items), np.int32)
    used = np.zeros(num_items, np.bool_)
    count = 0
    for s in range(num_phases + 1 if num_phases > 2 else num_phases):
        used[:] = False
        size = 0
        for turn in range(num_phases + 1):
            p = sequences[s, turn] if turn < num_phases else primary
            if p < 0 or (turn < num_phases and p == primary and s == num_phases):
                continue
            for item in by_phase[p]:
                if not used[item] and (costs[item, p] > 0 or p == primary):
                    used[item] = True
                    orders[count, size] = item
                    size += 1
        count += 1
    key = np.zeros(num_items, np.float64)
    for item in range(num_items):
        for p in range(num_phases):
            key[item] += costs[item, p]
        key[item] /= max(np.int64(1), sizes[item, 0])
    orders[count] = descending_floats(key)
    count += 1
    if num_phases > 1:
        for item in range(num_items):
            key[item] = 0.0
            for p in range(num_phases):
                key[item] = max(key[item], costs[item, p] / max(np.int64(1), totals[p]))
        orders[count] = descending_floats(key)
        count += 1
    return orders[:count]


@kernel
def first_fit(order: Ints32, sizes: Ints, limits: Ints, num_bins: int, bins: Ints32) -> None:
    """Put each item, in `order`, into the first bin that has room below `limits`, else into the emptiest."""
    num_caps = sizes.shape[1]
    loads = np.zeros((num_bins, num_caps), np.int64)
    smallest = np.empty(num_caps, np.int64)
    for k in range(num_caps):
        smallest[k] = sizes[:, k].min() if sizes.shape[0] > 0 else 0
    first = 0  # Bins before it are full.
    for item in order:
        chosen = -1
        while first < num_bins and not fits(loads[first], smallest, limits, False):
            first += 1
        for b in range(first, num_bins):
            room = True
            for k in range(num_caps):
                room &= loads[b, k] + sizes[item, k] <= limits[k]
            if room:
                chosen = b
                break
        if chosen < 0:
            least = np.inf
            for b in range(num_bins):
                share = 0.0
                for k in range(num_caps):
                    share = max(share, loads[b, k] / limits[k])
                if share < least:
                    chosen, least = b, share
        bins[item] = chosen
        for k in range(num_caps):
            loads[chosen, k] += sizes[item, k]


@kernel
def bins_cost(costs: Ints, bins: Ints32, num_bins: int, ranks_per_bin: int) -> int:
    """Return a lower bound of what the bins take: in each phase the largest item, or an even share of all its items."""
    num_items, num_phases = costs.shape
    largest = np.zeros((num_bins, num_phases), np.int64)
    loads = np.zeros((num_bins, num_phases), np.int64)
    for item in range(num_items):
        for p in range(num_phases):
            largest[bins[item], p] = max(largest[bins[item], p], costs[item, p])
            loads[bins[item], p] += costs[item, p]
    total = np.int64(0)
    for b in range(num_bins):
        for p in range(num_phases):
            total += max(largest[b, p], -(-loads[b, p] // ranks_per_bin))
    return total


@kernel
def relink(heads: Ints32, after: Ints32, before: Ints32, rank: int, old: int, new: int) -> None:
    """Move a rank from the list of level `old` to the front of the list of level `new`."""
    if before[rank] >= 0:
        after[before[rank]] = after[rank]
    else:
        heads[old] = after[rank]
    if after[rank] >= 0:
        before[after[rank]] = before[rank]
    after[rank] = heads[new]
    before[rank] = -1
    if heads[new] >= 0:
        before[heads[new]] = rank
    heads[new] = rank


@kernel
def deal_cells(
    order: Ints32,
    sizes: Ints,
    caps: Ints,
    room: Ints,
    num_bins: int,
    num_ranks: int,
    bins: Ints32,
    rank: Ints32,
    held: Ints,
) -> int:
    """Put each item, in `order`, into the first bin with `room` in which a rank has room within `caps`, and there on
    the fullest that has, next to what is `held`. Write bins and ranks, -1 for no place. Return the number of these.
    Ranks are listed by levels of fullness, so a few steps find each: best fit up to the width of a level.
    """
    num_caps = caps.shape[0]
    loads = held.copy() if len(held) > 0 else np.zeros((num_bins, num_ranks, num_caps), np.int64)
    totals = np.zeros((num_bins, num_caps), np.int64)
    # The first rank of each level; for each rank the next and the previous one of its level.
    heads = np.full((num_bins, LEVELS + 1), np.int32(-1))
    after = np.empty((num_bins, num_ranks), np.int32)
    before = np.full((num_bins, num_ranks), np.int32(-1))
    level = np.zeros((num_bins, num_ranks), np.int32)
    for b in range(num_bins):
        for r in range(num_ranks - 1, -1, -1):
            for k in range(num_caps if len(held) > 0 else 0):
                totals[b, k] += loads[b, r, k]
                level[b, r] = max(level[b, r], min(LEVELS, -(-loads[b, r, k] * LEVELS // caps[k])))
            after[b, r] = heads[b, level[b, r]]
            if after[b, r] >= 0:
                before[b, after[b, r]] = r
            heads[b, level[b, r]] = r
    left = 0
    for item in order:
        bins[item] = -1
        rank[item] = -1
        highest = LEVELS
        for k in range(num_caps):
            highest = min(highest, max(np.int64(0), caps[k] - sizes[item, k]) * LEVELS // caps[k])
        for b in range(num_bins):
            if not fits(totals[b], sizes[item], room, False):
                continue
            chosen = np.int32(-1)
            for step in range(highest, -1, -1):
                if heads[b, step] >= 0 and fits(loads[b, heads[b, step]], sizes[item], caps, False):
                    chosen = heads[b, step]
                    break
            if chosen < 0:
                continue
            r, old, new = chosen, level[b, chosen], 1
            for k in range(num_caps):
                loads[b, r, k] += sizes[item, k]
                totals[b, k] += sizes[item, k]
                new = max(new, min(LEVELS, -(-loads[b, r, k] * LEVELS // caps[k])))
            relink(heads[b], after[b], before[b], r, old, new)
            level[b, r] = new
            bins[item], rank[item] = b, r
            break
        left += bins[item] < 0
    return left


@kernel
def pack_in_orders(
    orders: Ints32, costs: Ints, sizes: Ints, limits: Ints, num_bins: int, ranks_per_bin: int
) -> tuple[Ints32, Ints]:
    """First fit in each of `orders`: (bins int32 (num_orders, num_items), `bins_cost` of each)."""
    num_orders, num_items = orders.shape
    bins = np.empty((num_orders, num_items), np.int32)
    prices = np.empty(num_orders, np.int64)
    for number in range(num_orders):
        first_fit(orders[number], sizes, limits, num_bins, bins[number])
        prices[number] = bins_cost(costs, bins[number], num_bins, ranks_per_bin)
    return bins, prices


SEARCH_NODES = 20_000


@kernel
def fits(load: Ints, size: Ints, caps: Ints, empty: bool) -> bool:
    """Return whether an item may join a bin; an empty bin takes anything."""
    room = True
    for k in range(caps.shape[0]):
        room &= load[k] + size[k] <= caps[k]
    return empty or room


@kernel
def fullness(load: Ints, caps: Ints) -> float:
    """Return the largest share of a cap that a bin's load, or an item's size, takes."""
    share = 0.0
    for k in range(caps.shape[0]):
        share = max(share, load[k] / caps[k])
    return share


@kernel
def by_fullness(sizes: Ints, caps: Ints) -> Ints:
    """Return items from the one that takes the largest share of a cap; ties by position."""
    num_items = sizes.shape[0]
    shares = np.empty(num_items, np.float64)
    for item in range(num_items):
        shares[item] = -fullness(sizes[item], caps)
    return np.argsort(shares, kind="mergesort")


@kernel
def bins_needed(sizes: Ints, caps: Ints) -> int:
    """Return a lower bound of the number of bins: oversize items have one each, the others share by each cap, and no
    two items above half of a cap share a bin.
    """
    num_items, num_caps = sizes.shape
    total = np.zeros(num_caps, np.int64)
    large = np.zeros(num_caps, np.int64)
    alone = 0
    for item in range(num_items):
        oversize = False
        for k in range(num_caps):
            oversize |= sizes[item, k] > caps[k]
        if oversize:
            alone += 1
            continue
        for k in range(num_caps):
            total[k] += sizes[item, k]
            large[k] += sizes[item, k] > caps[k] // 2
    shared = np.int64(0)
    for k in range(num_caps):
        shared = max(shared, (total[k] + caps[k] - 1) // caps[k], large[k])
    if alone < num_items:
        shared = max(shared, np.int64(1))
    return alone + shared


@kernel
def hold(held: Ints, work: Ints, counts: Ints32, loads: Ints) -> None:
    """Write the cost, number and sizes of what bins hold already."""
    if len(held) > 0:
        for b in range(held.shape[0]):
            work[b], counts[b] = held[b, 0], held[b, 1]
            loads[b] = held[b, 2:]


@kernel
def greedy_fit(
    costs: Ints, sizes: Ints, caps: Ints, order: Ints, num_bins: int, fullest: bool, bins: Ints32, held: Ints
) -> bool:
    """Put each item, in `order`, into the fullest bin that has room (best fit), else into that of least cost (LPT):
    write `bins`. Return False if an item does not fit anywhere.
    """
    loads = np.zeros((num_bins, caps.shape[0]), np.int64)
    counts = np.zeros(num_bins, np.int32)
    work = np.zeros(num_bins, np.int64)
    hold(held, work, counts, loads)
    share = np.zeros(num_bins, np.float64)
    for item in order:
        chosen = -1
        for b in range(num_bins):
            preferred = chosen < 0 or (share[b] > share[chosen] if fullest else work[b] < work[chosen])
            if preferred and fits(loads[b], sizes[item], caps, counts[b] == 0):
                chosen = b
        if chosen < 0:
            return False
        bins[item] = chosen
        counts[chosen] += 1
        for k in range(caps.shape[0]):
            loads[chosen, k] += sizes[item, k]
        if fullest:
            share[chosen] = fullness(loads[chosen], caps)
        else:
            work[chosen] += costs[item]
    return True


@kernel
def search_fit(sizes: Ints, caps: Ints, order: Ints, num_bins: int, bins: Ints32, held: Ints) -> bool:
    """Search depth-first for a packing, in a bounded number of steps. Return False if none was found. Only one of
    several empty bins is tried for an item, as they are equal.
    """
    num_items = order.shape[0]
    loads = np.zeros((num_bins, caps.shape[0]), np.int64)
    counts = np.zeros(num_bins, np.int32)
    turn = np.arange(num_bins)
    if len(held) > 0:
        hold(held, np.zeros(num_bins, np.int64), counts, loads)
        turn = np.argsort(counts == 0, kind="mergesort")  # Bins that hold something come first.
        loads, counts = loads[turn], counts[turn]
    choice = np.full(num_items, -1, np.int64)
    depth = 0
    for _step in range(SEARCH_NODES):
        if depth == num_items:
            break
        item = order[depth]
        previous = choice[depth]
        was_empty = False
        if previous >= 0:
            loads[previous] -= sizes[item]
            counts[previous] -= 1
            was_empty = counts[previous] == 0
        chosen = -1
        # Bins are opened in order, so after an empty one all are empty.
        if not was_empty:
            for b in range(previous + 1, num_bins):
                if fits(loads[b], sizes[item], caps, counts[b] == 0):
                    chosen = b
                    break
                if counts[b] == 0:
                    break
        choice[depth] = chosen
        if chosen < 0:
            if depth == 0:
                return False
            depth -= 1
            continue
        bins[item] = chosen
        loads[chosen] += sizes[item]
        counts[chosen] += 1
        depth += 1
    for item in range(num_items):
        bins[item] = turn[bins[item]]
    return bool(depth == num_items)


@kernel
def level(costs: Ints, sizes: Ints, caps: Ints, num_bins: int, bins: Ints32, held: Ints) -> None:
    """Lower the most costly bin by moves and swaps that keep the caps, in place, until none helps."""
    num_items = costs.shape[0]
    loads = np.zeros((num_bins, caps.shape[0]), np.int64)
    counts = np.zeros(num_bins, np.int32)
    work = np.zeros(num_bins, np.int64)
    hold(held, work, counts, loads)
    for item in range(num_items):
        loads[bins[item]] += sizes[item]
        counts[bins[item]] += 1
        work[bins[item]] += costs[item]
    for _step in range(4 * num_items):
        heavy = np.argmax(work)
        gain = np.int64(0)
        best_item = -1
        best_other = -1
        best_bin = -1
        for item in range(num_items):
            if bins[item] != heavy:
                continue
            # The partner num_items + b stands for a move into bin b.
            for other in range(num_items + num_bins):
                target = bins[other] if other < num_items else other - num_items
                if target == heavy:
                    continue
                difference = costs[item] - (costs[other] if other < num_items else 0)
                lowered = min(difference, work[heavy] - work[target] - difference)
                if lowered <= gain:
                    continue
                if other < num_items:
                    allowed = fits(loads[target] - sizes[other], sizes[item], caps, counts[target] == 1) and fits(
                        loads[heavy] - sizes[item], sizes[other], caps, counts[heavy] == 1
                    )
                else:
                    allowed = fits(loads[target], sizes[item], caps, counts[target] == 0)
                if allowed:
                    gain, best_item, best_other, best_bin = lowered, item, other, target
        if best_item < 0:
            return
        loads[heavy] -= sizes[best_item]
        loads[best_bin] += sizes[best_item]
        bins[best_item] = best_bin
        difference = costs[best_item]
        if best_other < num_items:
            loads[best_bin] -= sizes[best_other]
            loads[heavy] += sizes[best_other]
            bins[best_other] = heavy
            difference -= costs[best_other]
        else:
            counts[heavy] -= 1
            counts[best_bin] += 1
        work[heavy] -= difference
        work[best_bin] += difference


@kernel
def pack_rank(costs: Ints, sizes: Ints, caps: Ints, num_bins: int, bins: Ints32, held: Ints) -> bool:
    """Pack one rank's samples, from the most costly, into `num_bins` microbatches. Return False if that fails."""
    if num_bins == 1 and len(held) == 0:
        bins[:] = 0
        return bins_needed(sizes, caps) == 1
    if greedy_fit(costs, sizes, caps, np.arange(costs.shape[0]), num_bins, False, bins, held):
        return True
    order = by_fullness(sizes, caps)
    if greedy_fit(costs, sizes, caps, order, num_bins, True, bins, held):
        return True
    return search_fit(sizes, caps, order, num_bins, bins, held)


@kernel
def rename(costs: Ints, samples: Ints, num_bins: int, bins: Ints32, by_cost: bool) -> None:
    """Number one rank's microbatches by descending cost, else by their first sample; empty ones last. In place."""
    work = np.zeros(num_bins, np.int64)
    first = np.full(num_bins, np.int64((1 << 63) - 1))
    for item in range(costs.shape[0]):
        work[bins[item]] += costs[item]
        first[bins[item]] = min(first[bins[item]], samples[item])
    order = np.empty(num_bins, np.int64)
    # Insertion sort: far faster than a sort of arrays for few elements.
    for b in range(num_bins):
        number = b
        while number > 0:
            other = order[number - 1]
            tie = not by_cost or work[b] == work[other]
            if not (first[b] < first[other] if tie else work[b] > work[other]):
                break
            order[number] = other
            number -= 1
        order[number] = b
    name = np.empty(num_bins, np.int32)
    for number in range(num_bins):
        name[order[number]] = number
    for item in range(costs.shape[0]):
        bins[item] = name[bins[item]]

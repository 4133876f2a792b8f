"""Balancing a micro-step within caps: costs of several phases and capped sizes -> one owner of each sample.

caps that bind little --balanced without them--> brought within
caps that bind --large samples first, each to the rank of the least load in its own phase that has room--> refined

If ranks have few samples that nearly fill them, an assignment that ignores the caps cannot be brought within them.

Rough prices of micro-steps: costs (num_items, num_phases) and bin of each item -> about what ranks wait for.

The price of a packing into micro-steps is known only after each is balanced, which takes long. Two numbers estimate it
quickly: the bounds of the phases are below any assignment, and longest first is above the result of a search.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.bounds import phase_bounds
from orchdata.native.assign.phase_refine import phase_loads, phase_peaks
from orchdata.native.assign.phases import (
    above_caps,
    dominant_phases,
    longest_first_by_phase,
    order_by_phase,
    refine_within,
    solve_barrier,
    sum_of_peaks,
)
from orchdata.native.assign.refine import bit_length
from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import descending_order

LARGE = (4, 8)  # Samples above this part of a cap come first; more of them if some find no room.
FEW = 6  # Up to this number of samples a rank both ways are tried,
BINDING = 1 << 15  # or the second alone, if longest first exceeds the caps by this much a rank, in 1 / 2**20.
VISITS = 256  # Nodes of the tree of ranks to look at for a sample.
NO_ROOM = np.int64(-(1 << 62))
STEPS = 1 << 16  # Steps of a cap in which large sizes are ordered.


@kernel
def large_first(order: Ints32, sizes: Ints, caps: Ints, part: int) -> Ints32:
    """Return samples larger than 1 / `part` of a cap from the largest, then the others in `order`."""
    num_samples = order.shape[0]
    keys = np.zeros(num_samples, np.int64)
    for sample in range(num_samples):
        for k in range(caps.shape[0]):
            share = min(1.0, sizes[sample, k] / caps[k])
            if share * part > 1.0:
                keys[sample] = max(keys[sample], np.int64(share * STEPS))
    ordered = descending_order(keys)
    count = 0
    while count < num_samples and keys[ordered[count]] > 0:
        count += 1
    for sample in order:
        if keys[sample] == 0:
            ordered[count] = sample
            count += 1
    return ordered


@kernel
def fits_into(room: Ints, size: Ints) -> bool:
    """Return whether the size fits into the room, by each cap."""
    fits = True
    for k in range(size.shape[0]):
        fits &= room[k] >= size[k]
    return fits


@kernel
def least_with_room(loads: Ints, room: Ints, size: Ints, stack: Ints) -> int:
    """Return the leaf with the least load of the visited ones with room; else the one with most room by the first cap.
    `loads` is a tree of minima, (2 * leaves,), `room` trees of maxima, `stack` scratch, twice as long as they are deep.
    """
    leaves = loads.shape[0] // 2
    best, least = np.int64(-1), np.int64((1 << 63) - 1)
    stack[0] = 1
    depth, visits = 1, 0
    while depth > 0 and visits < VISITS:
        depth -= 1
        visits += 1
        node = stack[depth]
        if loads[node] >= least or not fits_into(room[:, node], size):
            continue
        if node >= leaves:
            best, least = node, loads[node]
            continue
        # Visit the side with the smaller load first; on a tie the left one.
        near = 2 * node if loads[2 * node] <= loads[2 * node + 1] else 2 * node + 1
        stack[depth] = near ^ 1
        stack[depth + 1] = near
        depth += 2
    if best < 0:
        best = np.int64(1)
        while best < leaves:
            best = 2 * best if room[0, 2 * best] >= room[0, 2 * best + 1] else 2 * best + 1
    return best


@kernel
def longest_first_within(
    costs: Ints, order: Ints32, phase: Ints32, sizes: Ints, caps: Ints, num_ranks: int, pinned: Ints32
) -> tuple[Ints32, int]:
    """Give each sample, in `order`, to the rank with the least load in the sample's own `phase`, int32 (num_samples,),
    that has room for it. Return (rank of each, number of samples without room).
    """
    num_phases, num_caps = costs.shape[1], caps.shape[0]
    depth = bit_length(num_ranks - 1)
    leaves = np.int64(1) << depth
    loads = np.zeros((num_phases, 2 * leaves), np.int64)
    room = np.full((num_caps, 2 * leaves), NO_ROOM)  # leaves without a rank: less room than any rank above its cap
    owner = np.full(costs.shape[0], np.int32(-1))
    for k in range(num_caps):
        room[k, leaves : leaves + num_ranks] = caps[k]
    if len(pinned) > 0:
        owner[:] = pinned
        loads[:, leaves : leaves + num_ranks] = phase_loads(costs, pinned, num_ranks).T
        room[:, leaves : leaves + num_ranks] -= phase_loads(sizes, pinned, num_ranks).T
        order = order[pinned[order] < 0]
    for node in range(leaves - 1, 0, -1):
        for p in range(num_phases):
            loads[p, node] = min(loads[p, 2 * node], loads[p, 2 * node + 1])
        for k in range(num_caps):
            room[k, node] = max(room[k, 2 * node], room[k, 2 * node + 1])
    stack = np.empty(2 * depth + 4, np.int64)
    missed = np.int64(0)
    for sample in order:
        leaf = least_with_room(loads[phase[sample]], room, sizes[sample], stack)
        missed += not fits_into(room[:, leaf], sizes[sample])
        owner[sample] = leaf - leaves
        for p in range(num_phases):
            loads[p, leaf] += costs[sample, p]
        for k in range(num_caps):
            room[k, leaf] -= sizes[sample, k]
        node = leaf >> 1
        while node > 0:
            for p in range(num_phases):
                loads[p, node] = min(loads[p, 2 * node], loads[p, 2 * node + 1])
            for k in range(num_caps):
                room[k, node] = max(room[k, 2 * node], room[k, 2 * node + 1])
            node >>= 1
    return owner, missed


@kernel
def brought_within(
    costs: Ints, sizes: Ints, caps: Ints, rank: Ints32, num_ranks: int, budget: int, pinned: Ints32
) -> bool:
    """Move samples of ranks above caps, in place, with unchanged largest loads. Return whether the caps are kept."""
    if above_caps(sizes, caps, rank, num_ranks) == 0:
        return True
    targets = phase_peaks(costs, rank, num_ranks)
    refine_within(costs, sizes, caps, rank, num_ranks, targets, costs.shape[0], budget, pinned)
    return above_caps(sizes, caps, rank, num_ranks) == 0


@kernel
def start_within(
    costs: Ints, sizes: Ints, caps: Ints, num_ranks: int, primary: int, budget: int, pinned: Ints32
) -> tuple[Ints32, bool]:
    """Return an assignment, longest first, and whether it is within the caps. Exchanges make room for the few samples
    without.
    """
    phase = dominant_phases(costs, primary)
    by_phase = order_by_phase(costs, phase, primary)
    best, fewest = np.empty(0, np.int32), np.int64(costs.shape[0] + 1)
    for part in LARGE:
        order = large_first(by_phase, sizes, caps, part)
        owner, missed = longest_first_within(costs, order, phase, sizes, caps, num_ranks, pinned)
        if missed < fewest:
            best, fewest = owner, missed
        if fewest == 0:
            break
    return best, brought_within(costs, sizes, caps, best, num_ranks, budget, pinned)


@kernel
def solve_within(
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    given: Ints32,
    within: Ints32,
    offsets: Ints,
    group_sizes: Ints,
    primary: int,
    good_part: int,
    pairs: float,
    pinned: Ints32,
) -> Ints32:
    """Return one rank for each sample within the caps: lower the sum over phases of the largest load, group by group.
    `within` keeps the caps, `given` maybe not; the others as in `solve_joint`.
    """
    ranks = np.empty(costs.shape[0], np.int32)
    for group in range(group_sizes.shape[0]):
        start, stop, num_ranks = offsets[group], offsets[group + 1], group_sizes[group]
        num_samples = stop - start
        mine, weights = costs[start:stop], sizes[start:stop]
        bounds = phase_bounds(mine, num_ranks, pinned)
        good = bounds.sum() + bounds.sum() // good_part
        budget = np.int64(min(pairs * (num_samples * num_samples // num_ranks), 1e18))
        first, inside = given[start:stop].copy(), within[start:stop].copy()
        above = np.int64(0)
        if num_samples <= FEW * num_ranks:
            # By how much longest first, which ignores the caps, exceeds them.
            phase = dominant_phases(mine, primary)
            order = order_by_phase(mine, phase, primary)
            free = longest_first_by_phase(mine, order, phase, num_ranks, max(1, num_samples), 0, pinned)
            above = np.int64(above_caps(weights, caps, free, num_ranks))
        rank, kept = inside, True
        if above <= BINDING * num_ranks:
            trial = solve_barrier(
                mine, first, num_ranks, primary, bounds, num_samples, 0, False, good, budget, pinned
            ).copy()
            kept = brought_within(mine, weights, caps, trial, num_ranks, budget // 2, pinned)
            if kept and sum_of_peaks(mine, trial, num_ranks) < sum_of_peaks(mine, rank, num_ranks):
                rank = trial
        if above > 0 or not kept:
            trial, is_within = start_within(mine, weights, caps, num_ranks, primary, budget // 4, pinned)
            trial = trial if is_within else inside.copy()
            for turn in range(2):
                if sum_of_peaks(mine, trial, num_ranks) < sum_of_peaks(mine, rank, num_ranks):
                    rank = trial.copy()
                if turn == 0:
                    refine_within(mine, weights, caps, trial, num_ranks, bounds, num_samples, budget // 2, pinned)
        ranks[start:stop] = rank
    return ranks


@kernel
def looked_peaks(
    costs: Ints,
    counted: Ints,
    sizes: Ints,
    caps: Ints,
    bins: Ints32,
    rank: Ints32,
    num_bins: int,
    num_ranks: int,
    pairs: float,
) -> int:
    """Return what ranks wait for in all bins, each balanced with little effort; `counted`, (num_items, num_counted),
    are the costs of the phases that count. The last balanced phase is the one that all items take part in.
    """
    total = np.int64(0)
    offsets, items = items_of_bins(bins, num_bins)
    for b in range(num_bins):
        members = items[offsets[b] : offsets[b + 1]]
        mine, weights, at = costs[members], sizes[members], rank[members]
        alone = fits_alone(weights, caps)
        # Ranks that one item fills are left out, and the others numbered from 0.
        number = np.zeros(num_ranks, np.int32)
        for index in range(members.shape[0]):
            if alone[index]:
                number[at[index]] = -1
        free = 0
        for r in range(num_ranks):
            if number[r] >= 0:
                number[r] = free
                free += 1
        others, peaks = np.flatnonzero(~alone), np.zeros(counted.shape[1], np.int64)
        if others.shape[0] > 0:
            inside = number[at[others]]
            span, ranks = np.array([0, others.shape[0]]), np.array([free])
            last, pins = costs.shape[1] - 1, np.empty(0, np.int32)
            assigned = solve_within(
                mine[others], weights[others], caps, inside, inside, span, ranks, last, 1000, pairs, pins
            )
            peaks = phase_peaks(counted[members[others]], assigned, free)
        total += sum_with_alone(peaks, counted[members], alone)
    return total


@kernel
def fits_alone(sizes: Ints, caps: Ints) -> NDArray[np.bool_]:
    """Return the items next to which no other fits: bool (num_items,); sizes int64 (num_items, num_caps)."""
    alone = np.zeros(sizes.shape[0], np.bool_)
    for k in range(caps.shape[0] if sizes.shape[0] > 1 else 0):
        first = np.argmin(sizes[:, k])
        smallest, second = sizes[first, k], np.int64((1 << 63) - 1)
        for item in range(sizes.shape[0]):
            if item != first:
                second = min(second, sizes[item, k])
        for item in range(sizes.shape[0]):
            alone[item] |= sizes[item, k] > caps[k] - (second if item == first else smallest)
    return alone


@kernel
def sum_with_alone(peaks: Ints, costs: Ints, alone: NDArray[np.bool_]) -> int:
    """Return the sum over phases of the largest of `peaks`, int64 (num_phases,), and of the costs of items `alone`."""
    total = np.int64(0)
    for p in range(costs.shape[1]):
        peak = peaks[p]
        for item in range(costs.shape[0]):
            if alone[item]:
                peak = max(peak, costs[item, p])
        total += peak
    return total


@kernel
def bin_bound(costs: Ints, alone: NDArray[np.bool_], num_ranks: int) -> int:
    """Return a lower bound of what ranks wait for, over all phases, if some items fill a rank alone."""
    others = costs[~alone]
    free = num_ranks - (costs.shape[0] - others.shape[0])
    return np.int64(sum_with_alone(phase_bounds(others, max(np.int64(1), free), np.empty(0, np.int32)), costs, alone))


@kernel
def items_of_bins(bins: Ints32, num_bins: int) -> tuple[Ints, Ints32]:
    """Group items by bin, in their order: (offsets int64 (num_bins + 1,), items int32 (num_items,))."""
    offsets = np.zeros(num_bins + 1, np.int64)
    for chosen in bins:
        offsets[chosen + 1] += 1
    for b in range(num_bins):
        offsets[b + 1] += offsets[b]
    cursor = offsets[:num_bins].copy()
    items = np.empty(bins.shape[0], np.int32)
    for item in range(bins.shape[0]):
        items[cursor[bins[item]]] = item
        cursor[bins[item]] += 1
    return offsets, items


@kernel
def rough_peaks(
    costs: Ints, sizes: Ints, caps: Ints, bins: Ints32, num_bins: int, num_ranks: int, primary: int
) -> tuple[int, int]:
    """Return what ranks wait for in all bins: a lower bound, and the result of longest first by phase. Caps count only
    for items that fill a rank.
    """
    low, high = np.int64(0), np.int64(0)
    offsets, items = items_of_bins(bins, num_bins)
    for b in range(num_bins):
        members = items[offsets[b] : offsets[b + 1]]
        mine, alone = costs[members], np.zeros(members.shape[0], np.bool_)
        for index in range(members.shape[0]):
            for k in range(caps.shape[0]):
                alone[index] |= sizes[members[index], k] >= caps[k]
        low += bin_bound(mine, alone, num_ranks)
        others = mine[~alone]
        free = max(np.int64(1), num_ranks - (mine.shape[0] - others.shape[0]))
        phase = dominant_phases(others, primary)
        order = order_by_phase(others, phase, primary)
        owner = longest_first_by_phase(others, order, phase, free, max(1, others.shape[0]), 0, np.empty(0, np.int32))
        high += sum_with_alone(phase_peaks(others, owner, free), mine, alone)
    return low, high

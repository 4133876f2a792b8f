"""Joint balancing kernels: costs of several phases (num_samples, num_phases) -> one owner of each sample.

If ranks wait for each other after every phase, a step takes the sum over phases of the largest load.

The whole joint balancing kernel: costs of several phases and caps -> rank of each sample, in each group of ranks.
"""

from __future__ import annotations

import numpy as np

from orchdata.native.assign.bounds import phase_bounds
from orchdata.native.assign.packed import NEVER, replay, tournament
from orchdata.native.assign.phase_refine import FIRST_PARTNERS, phase_loads, phase_peaks, refine_phases
from orchdata.native.assign.refine import bit_length
from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import descending_order

QUICK_WINDOW = 16
MOST_ABOVE = float(1 << 20)  # In shares of a cap: more would overflow the sum.


@kernel
def longest_first_by_phase(
    costs: Ints, order: Ints32, phase: Ints32, num_ranks: int, limit: int, extras: int, pinned: Ints32
) -> Ints32:
    """Give each sample, in `order`, to the rank with the least load in the sample's own `phase`, int32 (num_samples,),
    and with room.
    """
    num_samples, num_phases = costs.shape
    rank_bits = bit_length(num_ranks - 1)
    rank_mask = np.int64((1 << rank_bits) - 1)
    leaves = 1 << rank_bits
    shift = np.empty(num_phases, np.int64)
    for p in range(num_phases):
        shift[p] = max(0, bit_length(costs[:, p].sum()) + rank_bits - 62)
    trees = np.empty((num_phases, 2 * leaves), np.int64)
    for p in range(num_phases):
        tournament(np.arange(num_ranks), trees[p])
    owner = np.empty(num_samples, np.int32)
    loads = np.zeros((num_ranks, num_phases), np.int64)
    counts = np.zeros(num_ranks, np.int32)
    if len(pinned) > 0:
        owner[:] = pinned
        loads = phase_loads(costs, pinned, num_ranks)
        for rank in pinned[pinned >= 0]:
            counts[rank] += 1
        for rank in range(num_ranks):
            extras -= counts[rank] > limit
            for p in range(num_phases):
                key = ((loads[rank, p] >> shift[p]) << rank_bits) | rank
                replay(trees[p], leaves + rank, key if counts[rank] <= limit else NEVER)
        order = order[pinned[order] < 0]
    for sample in order:
        rank = trees[phase[sample], 1] & rank_mask
        while counts[rank] == limit and extras == 0:
            for p in range(num_phases):
                replay(trees[p], leaves + rank, NEVER)
            rank = trees[phase[sample], 1] & rank_mask
        if counts[rank] == limit:
            extras -= 1
        owner[sample] = rank
        counts[rank] += 1
        full = counts[rank] > limit
        for p in range(num_phases):
            if full:
                replay(trees[p], leaves + rank, NEVER)
            elif costs[sample, p] > 0:
                loads[rank, p] += costs[sample, p]
                replay(trees[p], leaves + rank, ((loads[rank, p] >> shift[p]) << rank_bits) | rank)
    return owner


@kernel
def dominant_phases(costs: Ints, primary: int) -> Ints32:
    """Return the phase in which each sample has the largest share of the whole batch's cost; `primary` on a tie."""
    num_samples, num_phases = costs.shape
    totals = np.empty(num_phases, np.float64)
    for p in range(num_phases):
        totals[p] = max(1.0, np.float64(costs[:, p].sum()))
    phase = np.empty(num_samples, np.int32)
    for sample in range(num_samples):
        phase[sample] = primary
        share = costs[sample, primary] / totals[primary]
        for p in range(num_phases):
            if costs[sample, p] / totals[p] > share:
                share = costs[sample, p] / totals[p]
                phase[sample] = p
    return phase


@kernel
def order_by_phase(costs: Ints, phase: Ints32, primary: int) -> Ints32:
    """Return samples from the largest in their own phase, phase after phase, `primary` last: its samples fill gaps."""
    num_samples, num_phases = costs.shape
    order = np.empty(num_samples, np.int32)
    size = 0
    for turn in range(num_phases + 1):
        if turn == primary:
            continue
        p = primary if turn == num_phases else turn
        chosen = np.flatnonzero(phase == p)
        own = np.empty(chosen.shape[0], np.int64)
        for index in range(chosen.shape[0]):
            own[index] = costs[chosen[index], p]
        for index in descending_order(own):
            order[size] = chosen[index]
            size += 1
    return order


@kernel
def sum_of_peaks(costs: Ints, owner: Ints32, num_ranks: int) -> int:
    """Return what a step takes if ranks wait after each phase: the sum over phases of the largest load."""
    return np.int64(phase_peaks(costs, owner, num_ranks).sum())


@kernel
def above_caps(sizes: Ints, caps: Ints, owner: Ints32, num_ranks: int) -> np.int64:
    """Return the sum of loads above the caps, in 1 / 2**20 of each cap, plus 1 for each; at most 2**40 for one."""
    total = np.int64(0)
    for k in range(caps.shape[0]):
        loads = np.zeros(num_ranks, np.int64)
        for sample in range(owner.shape[0]):
            loads[owner[sample]] += sizes[sample, k]
        for load in loads:
            if load > caps[k]:
                share = min((load - caps[k]) / caps[k], MOST_ABOVE)
                total += np.int64(1) + np.int64(share * (1 << 20))
    return total


@kernel
def solve_barrier(
    costs: Ints,
    given: Ints32,
    num_ranks: int,
    primary: int,
    bounds: Ints,
    limit: int,
    extras: int,
    swaps_only: bool,
    good: int,
    budget: int,
    pinned: Ints32,
) -> Ints32:
    """Minimise the sum of peaks over several starts, one of them `given`, which balances the primary phase alone; never
    worse. It ends at the sum `good`; `swaps_only`: counts stay; `bounds` are of the phases; the budget is of each
    start.
    """
    num_samples, num_phases = costs.shape
    targets = bounds + bounds // 1000
    phase = dominant_phases(costs, primary)
    order = order_by_phase(costs, phase, primary)
    owner = longest_first_by_phase(costs, order, phase, num_ranks, limit, extras, pinned)
    best = given
    least = sum_of_peaks(costs, best, num_ranks)
    for start in range(2 if num_samples <= 2048 else 1):
        trial = owner if start == 0 else given.copy()
        left = np.int64(budget)
        # First a fast pass that skips ranks it cannot improve; then a full search for the worst ranks.
        for window, raising in ((QUICK_WINDOW, True), (FIRST_PARTNERS, False), (0, False)):
            peaks = sum_of_peaks(costs, trial, num_ranks)
            if peaks < least:
                best, least = trial.copy(), peaks
            if window == 0 or peaks <= good:
                break
            may_hold = -1 if swaps_only else limit
            goals = targets.copy()
            left = refine_phases(costs, num_phases, trial, num_ranks, goals, may_hold, window, raising, left, pinned)
    return best


@kernel
def capped_columns(costs: Ints, sizes: Ints, caps: Ints, targets: Ints) -> tuple[Ints, Ints]:
    """Return the sizes as columns after the costs, in a unit in which a column sums to about as much as all costs, and
    the targets, then the caps: int64 (num_samples, num_phases + num_caps), (num_phases + num_caps,).
    """
    num_samples, num_phases = costs.shape
    columns = np.empty((num_samples, num_phases + caps.shape[0]), np.int64)
    columns[:, :num_phases] = costs
    goals = np.empty(columns.shape[1], np.int64)
    goals[:num_phases] = targets
    total = min(max(np.int64(1), costs.sum()), np.int64(1) << 60)
    for k in range(caps.shape[0]):
        cap = min(caps[k], sizes[:, k].sum())
        unit = max(np.int64(1), total // max(np.int64(1), sizes[:, k].sum() + cap))
        columns[:, num_phases + k] = sizes[:, k] * unit
        goals[num_phases + k] = cap * unit
    return columns, goals


@kernel
def refine_within(
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    owner: Ints32,
    num_ranks: int,
    targets: Ints,
    limit: int,
    budget: int,
    pinned: Ints32,
) -> None:
    """Move samples of ranks above caps, then of ranks above the targets of phases; in place."""
    num_phases = costs.shape[1]
    columns, goals = capped_columns(costs, sizes, caps, targets)
    refine_phases(columns, num_phases, owner, num_ranks, goals, limit, FIRST_PARTNERS, False, budget, pinned)


@kernel
def solve_joint(
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    given: Ints32,
    within: Ints32,
    offsets: Ints,
    group_sizes: Ints,
    primary: int,
    max_samples: int,
    equal_count: bool,
    good_part: int,
    pairs: float,
    pinned: Ints32,
) -> Ints32:
    """Lower the sum over phases of the largest load in each group of ranks, from `given`: the result is not worse,
    unless that breaks a cap. It keeps the caps if `within` does, which may be empty, or if the search finds a way. Ends
    where peaks are at most `good_part` above their bounds. `pairs`: to look at, for each pair of samples that share a
    rank.
    """
    ranks = np.empty(costs.shape[0], np.int32)
    for group in range(group_sizes.shape[0]):
        start, stop, num_ranks = offsets[group], offsets[group + 1], group_sizes[group]
        num_samples = stop - start
        mine, weights = costs[start:stop], sizes[start:stop]
        bounds = phase_bounds(mine, num_ranks, pinned)
        limit, extras, may_hold = np.int64(max_samples), np.int64(0), np.int64(max_samples)
        if equal_count:
            limit, extras, may_hold = num_samples // num_ranks, num_samples % num_ranks, np.int64(-1)
        good = bounds.sum() + bounds.sum() // good_part
        budget = np.int64(min(pairs * (num_samples * num_samples // num_ranks), 1e18))
        first = given[start:stop].copy()
        rank = solve_barrier(
            mine, first, num_ranks, primary, bounds, limit, extras, equal_count, good, budget, pinned
        ).copy()
        # First move within the caps with the peaks of this rank, then start from the assignment that keeps them.
        for start_again in range(2):
            above = above_caps(weights, caps, rank, num_ranks)
            if above == 0 or (start_again == 1 and within.shape[0] == 0):
                break
            trial = rank.copy()
            targets = bounds.copy()
            if start_again == 0:
                targets = phase_peaks(mine, rank, num_ranks)
            else:
                trial = within[start:stop].copy()
            refine_within(mine, weights, caps, trial, num_ranks, targets, may_hold, budget, pinned)
            if above_caps(weights, caps, trial, num_ranks) < above:
                rank = trial
        ranks[start:stop] = rank
    return ranks

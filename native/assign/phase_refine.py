"""Refinement kernels of several phases: an assignment -> one with less excess, by moves and swaps of samples.

The excess of a rank is its load above the targets of the phases, summed over phases. Capped sizes are further columns
after the costs; their targets, the caps, never rise.
"""

from __future__ import annotations

import numpy as np

from orchdata.native.assign.refine import SLACK, list_members, ranks_by_load
from orchdata.native.jit import Ints, Ints32, kernel

MAX_ROUNDS = 64
MAX_ATTEMPTS = 16  # Exchanges of a rank in a round.
FIRST_PARTNERS = 4
MAX_WINDOW = 64
PROBE = 32  # Looking up a partner, or ranking a rank, takes as long as this number of pairs.
PROGRESS = 1024  # A round that lowers the peaks by less than this part of them counts as no progress.


@kernel
def phase_loads(costs: Ints, owner: Ints32, num_ranks: int) -> Ints:
    """Return the loads int64 (num_ranks, num_phases) of an assignment; samples with owner -1 are left out."""
    num_samples, num_phases = costs.shape
    loads = np.zeros((num_ranks, num_phases), np.int64)
    for sample in range(num_samples):
        if owner[sample] >= 0:
            for p in range(num_phases):
                loads[owner[sample], p] += costs[sample, p]
    return loads


@kernel
def phase_peaks(costs: Ints, owner: Ints32, num_ranks: int) -> Ints:
    """Return the largest load of each phase, int64 (num_phases,), as in `phase_loads`."""
    loads = phase_loads(costs, owner, num_ranks)
    peaks = np.empty(costs.shape[1], np.int64)
    for p in range(costs.shape[1]):
        peaks[p] = loads[:, p].max()
    return peaks


@kernel
def excess(above: Ints, rank: int) -> int:
    """Return the load of one rank above the targets, over all columns."""
    total = np.int64(0)
    for p in range(above.shape[1]):
        total += max(np.int64(0), above[rank, p])
    return total


@kernel
def best_joint_exchange(
    costs: Ints,
    num_phases: int,
    above: Ints,
    heavy: int,
    samples: Ints32,
    light: int,
    offered: Ints32,
    column: int,
    may_move: bool,
    ceiling: int,
    enough: int,
    offers: Ints,
) -> tuple[int, int, int, int]:
    """Return a move or swap that lowers the larger excess of two ranks, and the heavy rank's load in `column`: the
    best, or the first that reaches `enough`. It breaks no cap. Return (excess reached, index in samples, index in
    offered or -1 for a move, pairs looked at); `ceiling` if nothing is below it. `above`: loads less targets; `offers`:
    scratch.
    """
    best = np.int64(ceiling)
    best_index = -1
    best_other = -1
    pairs = 0
    num_offered = offered.shape[0]
    for other in range(num_offered):
        offers[other] = costs[offered[other], column]
    heavy_above, light_above = above[heavy, column], above[light, column]
    # The excess of both ranks in this column alone rules out most pairs.
    least, most = max(np.int64(1), heavy_above - best + 1), best - 1 - light_above
    for index in range(samples.shape[0]):
        given = samples[index]
        relief = costs[given, column]
        if relief < least:
            continue
        pairs += 1 + num_offered
        for other in range(-1 if may_move else 0, num_offered):
            difference = relief - offers[other] if other >= 0 else relief
            if not least <= difference <= most:
                continue
            left = np.int64(0)
            added = np.int64(0)
            kept = True
            for p in range(costs.shape[1]):
                change = costs[given, p] - (costs[offered[other], p] if other >= 0 else 0)
                left += max(np.int64(0), above[heavy, p] - change)
                added += max(np.int64(0), above[light, p] + change)
                if p >= num_phases:
                    kept &= above[heavy, p] - change <= max(np.int64(0), above[heavy, p])
                    kept &= above[light, p] + change <= max(np.int64(0), above[light, p])
            if kept and max(left, added) < best:
                best, best_index, best_other = max(left, added), index, other
                least, most = max(np.int64(1), heavy_above - best + 1), best - 1 - light_above
                if best <= enough:
                    return best, best_index, best_other, pairs
    return best, best_index, best_other, pairs


@kernel
def best_joint_partner(
    costs: Ints,
    num_phases: int,
    above: Ints,
    counts: Ints32,
    offsets: Ints,
    members: Ints32,
    heavy: int,
    partners: Ints,
    column: int,
    limits: Ints,
    offers: Ints,
) -> tuple[int, int, int, int]:
    """Return the best exchange of a heavy rank with any of `partners`, or the first that removes 1/8 of its excess:
    (partner or -1, index in the samples of heavy, index in those of the partner or -1, pairs looked at).
    """
    best = excess(above, heavy)
    enough = best // 8 * 7
    partner = np.int64(-1)
    index = -1
    other = -1
    work = 0
    samples = members[offsets[heavy] : offsets[heavy] + counts[heavy]]
    for light in partners:
        if light == heavy or above[light, column] >= above[heavy, column]:
            continue
        start = offsets[light]
        may_move = start + counts[light] < offsets[light + 1] and counts[light] < limits[light]
        offered = members[start : start + counts[light]]
        reached, index_found, other_found, pairs = best_joint_exchange(
            costs, num_phases, above, heavy, samples, light, offered, column, may_move, best, enough, offers
        )
        work += pairs + PROBE
        if index_found >= 0:
            best, partner, index, other = reached, light, index_found, other_found
            if best <= enough:
                break
    return partner, index, other, work


@kernel
def find_partner(
    costs: Ints,
    num_phases: int,
    above: Ints,
    counts: Ints32,
    offsets: Ints,
    members: Ints32,
    heavy: int,
    lightest: Ints,
    column: int,
    limits: Ints,
    offers: Ints,
    window: int,
    budget: int,
) -> tuple[int, int, int, int]:
    """Call `best_joint_partner` for a few of the lightest ranks, then for more, up to `window` of them."""
    partner, index, other = np.int64(-1), -1, -1
    used = np.int64(0)
    tried, more = np.int64(0), np.int64(FIRST_PARTNERS)
    while partner < 0 and tried < min(window, lightest.shape[0]) and used < budget:
        partner, index, other, work = best_joint_partner(
            costs, num_phases, above, counts, offsets, members, heavy, lightest[tried:more], column, limits, offers
        )
        used += work
        tried, more = more, min(2 * more, window)
    return partner, index, other, used


@kernel
def joint_exchange(
    costs: Ints,
    owner: Ints32,
    above: Ints,
    counts: Ints32,
    offsets: Ints,
    members: Ints32,
    heavy: int,
    index: int,
    light: int,
    other: int,
) -> None:
    """Carry out a swap, or a move where `other` is -1, and update all arrays."""
    samples = members[offsets[heavy] : offsets[heavy] + counts[heavy]]
    given = samples[index]
    if other >= 0:
        taken = members[offsets[light] + other]
        members[offsets[light] + other] = given
        samples[index] = taken
        owner[taken] = heavy
        above[heavy] += costs[taken]
        above[light] -= costs[taken]
    else:
        members[offsets[light] + counts[light]] = given
        counts[light] += 1
        samples[index] = samples[counts[heavy] - 1]
        counts[heavy] -= 1
    owner[given] = light
    above[heavy] -= costs[given]
    above[light] += costs[given]


@kernel
def peaks_above(above: Ints, num_phases: int) -> int:
    """Return the sum of the largest loads less the targets; of capped columns, which come last, only what is above."""
    total = np.int64(0)
    for p in range(above.shape[1]):
        peak = above[:, p].max()
        total += peak if p < num_phases else max(np.int64(0), peak)
    return total


@kernel
def raise_targets(above: Ints, num_phases: int, rank: int) -> int:
    """Raise the targets of phases to the loads of `rank`; caps stay. Return the sum of the rises."""
    total = np.int64(0)
    for p in range(num_phases):
        more = max(np.int64(0), above[rank, p])
        above[:, p] -= more
        total += more
    return total


@kernel
def rank_lightest(above: Ints, column: int, lightest: Ints, first: Ints) -> Ints:
    """Return the ranks from the lightest in a column, without those already filled; rank them at the first call."""
    if first[column] < 0:
        own = above[:, column] - above[:, column].min()
        lightest[column] = ranks_by_load(own, own.max(), False)
        first[column] = 0
    return lightest[column, first[column] :]


@kernel
def without_pinned(owner: Ints32, pinned: Ints32, counts: Ints32, limits: Ints) -> Ints32:
    """Return the owners with -1 for pinned samples, and take these off the counts and limits of their ranks."""
    if len(pinned) == 0:
        return owner
    movable = owner.copy()
    for sample in np.flatnonzero(pinned >= 0):
        movable[sample] = -1
        counts[pinned[sample]] -= 1
        limits[pinned[sample]] -= 1
    return movable


@kernel
def refine_phases(
    costs: Ints,
    num_phases: int,
    owner: Ints32,
    num_ranks: int,
    targets: Ints,
    limit: int,
    window: int,
    raising: bool,
    budget: int,
    pinned: Ints32,
) -> int:
    """Lower the largest excess by moves and swaps, in place. Return the rest of the budget. Each rank above the
    targets, from the one furthest above, tries exchanges with the lightest ranks in its worst column, at most `window`
    of them, and more the longer there is no progress. A rank without a useful exchange raises the targets to its loads,
    so that others can use that room (`raising`; a cap never rises), or waits for the next round. Costs have the phases,
    then capped sizes.
    """
    above = phase_loads(costs, owner, num_ranks)
    counts, limits = np.zeros(num_ranks, np.int32), np.full(num_ranks, np.int64(limit))
    for rank in owner:
        counts[rank] += 1
    movable = without_pinned(owner, pinned, counts, limits)
    above -= targets
    offsets, members = list_members(movable, counts, SLACK)
    offers = np.empty(max(1, np.diff(offsets).max()), np.int64)
    scores = np.empty(num_ranks, np.int64)
    lightest = np.empty((costs.shape[1], num_ranks), np.int64)
    base = targets.sum()
    least = peaks_above(above, num_phases) + base
    raised = np.int64(0)
    for _round in range(MAX_ROUNDS):
        budget -= num_ranks * PROBE
        for rank in range(num_ranks):
            scores[rank] = excess(above, rank)
        if scores.max() == 0:
            return budget
        first = np.full(costs.shape[1], np.int64(-1))  # First rank not yet tried; -1: not ranked in this round.
        for heavy in ranks_by_load(scores, 0, True):
            for _attempt in range(MAX_ATTEMPTS):
                if budget <= 0 or excess(above, heavy) == 0:
                    break
                column = np.argmax(above[heavy])
                partner, index, other, work = find_partner(
                    costs,
                    num_phases,
                    above,
                    counts,
                    offsets,
                    members,
                    heavy,
                    rank_lightest(above, column, lightest, first),
                    column,
                    limits,
                    offers,
                    window,
                    budget,
                )
                budget -= work
                if partner < 0:
                    if raising:
                        raised += raise_targets(above, num_phases, heavy)
                    break
                joint_exchange(costs, owner, above, counts, offsets, members, heavy, index, partner, other)
                # The lightest rank is full: move the window.
                if partner == lightest[column, first[column]] and first[column] + FIRST_PARTNERS < num_ranks:
                    first[column] += 1
        if budget <= 0:
            return budget
        peaks = peaks_above(above, num_phases) + base + raised
        if peaks >= least - least // PROGRESS:
            if raising or window >= min(MAX_WINDOW, num_ranks):
                return budget
            window *= 2
        least = min(least, peaks)
    return budget

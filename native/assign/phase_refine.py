"""Refinement kernels of several phases: an assignment -> one with less excess, by moves and swaps of samples.

What a rank has above the targets of the phases, summed over phases, is its excess. Sizes that are capped are further
columns beside the costs, whose targets, the caps, never rise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.ranking import SLACK, list_members, ranks_by_load
from orchdata.native.jit import kernel

MAX_ROUNDS = 64
MAX_ATTEMPTS = 16  # Exchanges of a rank in a round.
FIRST_PARTNERS = 4
MAX_WINDOW = 64
PROBE = 32  # Pairs in the time of which a partner is looked up, and a rank ranked.
PROGRESS = 1024  # A round that lowers the peaks by less than this part of them has won nothing.


@kernel
def phase_loads(costs: NDArray[np.int64], owner: NDArray[np.int32], num_ranks: int) -> NDArray[np.int64]:
    """Loads int64 (num_ranks, num_phases) of an assignment; samples with owner -1 are left out."""
    num_samples, num_phases = costs.shape
    loads = np.zeros((num_ranks, num_phases), np.int64)
    for sample in range(num_samples):
        if owner[sample] >= 0:
            for p in range(num_phases):
                loads[owner[sample], p] += costs[sample, p]
    return loads


@kernel
def phase_peaks(costs: NDArray[np.int64], owner: NDArray[np.int32], num_ranks: int) -> NDArray[np.int64]:
    """The largest load of each phase, int64 (num_phases,), as of `phase_loads`."""
    loads = phase_loads(costs, owner, num_ranks)
    peaks = np.empty(costs.shape[1], np.int64)
    for p in range(costs.shape[1]):
        peaks[p] = loads[:, p].max()
    return peaks


@kernel
def excess(above: NDArray[np.int64], rank: int) -> int:
    """What one rank has above the targets, over all columns."""
    total = np.int64(0)
    for p in range(above.shape[1]):
        total += max(np.int64(0), above[rank, p])
    return total


@kernel
def best_joint_exchange(
    costs: NDArray[np.int64],
    num_phases: int,
    above: NDArray[np.int64],
    heavy: int,
    held: NDArray[np.int32],
    light: int,
    offered: NDArray[np.int32],
    column: int,
    may_move: bool,
    ceiling: int,
    enough: int,
    offers: NDArray[np.int64],
) -> tuple[int, int, int, int]:
    """A move or swap that lowers the larger excess of two ranks; it must lower the heavy rank's load in `column`.

    The best there is, or the first that reaches `enough`. None breaks a cap, or goes further above one.

    Args:
        costs: int64 (num_samples, num_columns), and
        num_phases: as of `refine_phases`.
        above: int64 (num_ranks, num_columns), loads less targets.
        ceiling: only what stays below it is of use.
        offers: int64, scratch, at least as long as `offered`.

    Returns:
        (excess reached, index in held, index in offered or -1 for a move, pairs looked at); `ceiling` where nothing is
        below it.
    """
    best = np.int64(ceiling)
    best_index = -1
    best_other = -1
    pairs = 0
    num_offered = offered.shape[0]
    for other in range(num_offered):
        offers[other] = costs[offered[other], column]
    heavy_above, light_above = above[heavy, column], above[light, column]
    # What both ranks then have above this column's target alone says no to most pairs.
    least, most = max(np.int64(1), heavy_above - best + 1), best - 1 - light_above
    for index in range(held.shape[0]):
        given = held[index]
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
    costs: NDArray[np.int64],
    num_phases: int,
    above: NDArray[np.int64],
    counts: NDArray[np.int32],
    offsets: NDArray[np.int64],
    places: NDArray[np.int32],
    heavy: int,
    partners: NDArray[np.int64],
    column: int,
    limit: int,
    offers: NDArray[np.int64],
) -> tuple[int, int, int, int]:
    """The best exchange of a heavy rank with any of `partners`, or the first that takes an eighth of its excess away.

    Returns:
        (partner or -1, index into what heavy holds, index into what the partner holds or -1, pairs looked at).
    """
    best = excess(above, heavy)
    enough = best // 8 * 7
    partner = np.int64(-1)
    index = -1
    other = -1
    work = 0
    held = places[offsets[heavy] : offsets[heavy] + counts[heavy]]
    for light in partners:
        if light == heavy or above[light, column] >= above[heavy, column]:
            continue
        start = offsets[light]
        may_move = start + counts[light] < offsets[light + 1] and counts[light] < limit
        offered = places[start : start + counts[light]]
        reached, index_found, other_found, pairs = best_joint_exchange(
            costs, num_phases, above, heavy, held, light, offered, column, may_move, best, enough, offers
        )
        work += pairs + PROBE
        if index_found >= 0:
            best, partner, index, other = reached, light, index_found, other_found
            if best <= enough:
                break
    return partner, index, other, work


@kernel
def find_partner(
    costs: NDArray[np.int64],
    num_phases: int,
    above: NDArray[np.int64],
    counts: NDArray[np.int32],
    offsets: NDArray[np.int64],
    places: NDArray[np.int32],
    heavy: int,
    lightest: NDArray[np.int64],
    column: int,
    limit: int,
    offers: NDArray[np.int64],
    window: int,
    budget: int,
) -> tuple[int, int, int, int]:
    """`best_joint_partner` among a few of the lightest ranks, then among more, up to `window` of them."""
    partner, index, other = np.int64(-1), -1, -1
    used = np.int64(0)
    tried, more = np.int64(0), np.int64(FIRST_PARTNERS)
    while partner < 0 and tried < min(window, lightest.shape[0]) and used < budget:
        partner, index, other, work = best_joint_partner(
            costs, num_phases, above, counts, offsets, places, heavy, lightest[tried:more], column, limit, offers
        )
        used += work
        tried, more = more, min(2 * more, window)
    return partner, index, other, used


@kernel
def joint_exchange(
    costs: NDArray[np.int64],
    owner: NDArray[np.int32],
    above: NDArray[np.int64],
    counts: NDArray[np.int32],
    offsets: NDArray[np.int64],
    places: NDArray[np.int32],
    heavy: int,
    index: int,
    light: int,
    other: int,
) -> None:
    """Carry out a swap, or a move where `other` is -1, in all the books."""
    held = places[offsets[heavy] : offsets[heavy] + counts[heavy]]
    given = held[index]
    if other >= 0:
        taken = places[offsets[light] + other]
        places[offsets[light] + other] = given
        held[index] = taken
        owner[taken] = heavy
        above[heavy] += costs[taken]
        above[light] -= costs[taken]
    else:
        places[offsets[light] + counts[light]] = given
        counts[light] += 1
        held[index] = held[counts[heavy] - 1]
        counts[heavy] -= 1
    owner[given] = light
    above[heavy] -= costs[given]
    above[light] += costs[given]


@kernel
def peaks_above(above: NDArray[np.int64], num_phases: int) -> int:
    """Sum of the largest loads, less the targets; of the capped columns, which come last, what is above the caps."""
    total = np.int64(0)
    for p in range(above.shape[1]):
        peak = above[:, p].max()
        total += peak if p < num_phases else max(np.int64(0), peak)
    return total


@kernel
def raise_targets(above: NDArray[np.int64], num_phases: int, rank: int) -> int:
    """Raise the targets of phases to what `rank` has, caps stay; returns by how much in all."""
    total = np.int64(0)
    for p in range(num_phases):
        more = max(np.int64(0), above[rank, p])
        above[:, p] -= more
        total += more
    return total


@kernel
def rank_lightest(
    above: NDArray[np.int64], column: int, lightest: NDArray[np.int64], first: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Ranks from the lightest in a column, those already filled left out; ranked where they are not yet."""
    if first[column] < 0:
        own = above[:, column] - above[:, column].min()
        lightest[column] = ranks_by_load(own, own.max(), False)
        first[column] = 0
    return lightest[column, first[column] :]


@kernel
def refine_phases(
    costs: NDArray[np.int64],
    num_phases: int,
    owner: NDArray[np.int32],
    num_ranks: int,
    targets: NDArray[np.int64],
    limit: int,
    window: int,
    raising: bool,
    budget: int,
) -> int:
    """Lower the largest excess by moves and swaps, in place.

    Each rank above the targets, from the one furthest above, is tried against the ranks lightest in its worst column,
    `window` of them at most, and more the longer nothing is won. A rank that cannot be helped raises the targets to
    what it has, so that the others use that room for free (`raising`), or is set aside until the next round, as what
    others do may help it.

    Args:
        costs: int64 (num_samples, num_columns): phases, then sizes that are capped.
        num_phases: how many of the columns are phases.
        owner: int32 (num_samples,), changed in place.
        num_ranks: at least 1.
        targets: int64 (num_columns,), load at which a rank needs no more help; a cap is one that never rises.
        limit: samples a rank may hold after a move; -1: swaps only.
        window: partners tried before a rank is given up.
        raising: a rank given up raises the targets.
        budget: pairs of samples to look at, and what else takes as long: a bound on the work that is the same on every
            machine.

    Returns:
        What is left of the budget.
    """
    above = phase_loads(costs, owner, num_ranks)
    counts = np.zeros(num_ranks, np.int32)
    for rank in owner:
        counts[rank] += 1
    above -= targets
    offsets, places = list_members(owner, counts, SLACK)
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
        first = np.full(costs.shape[1], np.int64(-1))  # Of those not yet tried; -1: not ranked in this round.
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
                    places,
                    heavy,
                    rank_lightest(above, column, lightest, first),
                    column,
                    limit,
                    offers,
                    window,
                    budget,
                )
                budget -= work
                if partner < 0:
                    if raising:
                        raised += raise_targets(above, num_phases, heavy)
                    break
                joint_exchange(costs, owner, above, counts, offsets, places, heavy, index, partner, other)
                # The lightest rank has been filled: the window moves on.
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

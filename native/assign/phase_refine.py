"""Refinement kernels of several phases: an assignment -> one with less excess, by moves and swaps of samples.

What a rank has above the targets of the phases, summed over phases, is its excess.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.ranking import SLACK, list_members, ranks_by_load
from orchdata.native.jit import kernel

MAX_ROUNDS = 16
MAX_ATTEMPTS = 8


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
def excess(loads: NDArray[np.int64], targets: NDArray[np.int64], rank: int) -> int:
    """What one rank has above the targets."""
    total = np.int64(0)
    for p in range(targets.shape[0]):
        total += max(np.int64(0), loads[rank, p] - targets[p])
    return total


@kernel
def excess_after(
    costs: NDArray[np.int64],
    loads: NDArray[np.int64],
    targets: NDArray[np.int64],
    rank: int,
    removed: int,
    added: int,
) -> int:
    """Excess of a rank once sample `removed` has gone and `added` has come; -1 for none."""
    total = np.int64(0)
    for p in range(targets.shape[0]):
        load = loads[rank, p] - targets[p]
        if removed >= 0:
            load -= costs[removed, p]
        if added >= 0:
            load += costs[added, p]
        total += max(np.int64(0), load)
    return total


@kernel
def best_joint_exchange(
    costs: NDArray[np.int64],
    loads: NDArray[np.int64],
    targets: NDArray[np.int64],
    heavy: int,
    held: NDArray[np.int32],
    light: int,
    offered: NDArray[np.int32],
    phase: int,
    may_move: bool,
    ceiling: int,
) -> tuple[int, int, int]:
    """The move or swap that lowers the larger excess of two ranks most; it must lower the heavy rank's `phase`.

    Returns:
        (excess reached, index in held, index in offered or -1 for a move); `ceiling` where nothing is below it.
    """
    best = np.int64(ceiling)
    best_index = -1
    best_other = -1
    for index in range(held.shape[0]):
        given = held[index]
        relief = costs[given, phase]
        if relief == 0:
            continue
        for other in range(-1 if may_move else 0, offered.shape[0]):
            taken = -1 if other < 0 else offered[other]
            if other >= 0 and costs[taken, phase] >= relief:
                continue
            reached = excess_after(costs, loads, targets, heavy, given, taken)
            if reached < best:
                reached = max(reached, excess_after(costs, loads, targets, light, taken, given))
                if reached < best:
                    best, best_index, best_other = reached, index, other
                    if best == 0:
                        return best, best_index, best_other
    return best, best_index, best_other


@kernel
def best_joint_partner(
    costs: NDArray[np.int64],
    loads: NDArray[np.int64],
    targets: NDArray[np.int64],
    counts: NDArray[np.int32],
    offsets: NDArray[np.int64],
    places: NDArray[np.int32],
    heavy: int,
    partners: NDArray[np.int64],
    phase: int,
    limit: int,
) -> tuple[int, int, int, int]:
    """The best exchange of a heavy rank with any of `partners`.

    Returns:
        (partner or -1, index into what heavy holds, index into what the partner holds or -1, pairs looked at).
    """
    best = excess(loads, targets, heavy)
    partner = np.int64(-1)
    index = -1
    other = -1
    work = 0
    held = places[offsets[heavy] : offsets[heavy] + counts[heavy]]
    for light in partners:
        if light == heavy or loads[light, phase] >= loads[heavy, phase]:
            continue
        start = offsets[light]
        may_move = start + counts[light] < offsets[light + 1] and counts[light] < limit
        offered = places[start : start + counts[light]]
        work += held.shape[0] * offered.shape[0]
        reached, index_found, other_found = best_joint_exchange(
            costs, loads, targets, heavy, held, light, offered, phase, may_move, best
        )
        if index_found >= 0:
            best, partner, index, other = reached, light, index_found, other_found
            if best == 0:
                break
    return partner, index, other, work


@kernel
def joint_exchange(
    costs: NDArray[np.int64],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
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
        loads[heavy] += costs[taken]
        loads[light] -= costs[taken]
    else:
        places[offsets[light] + counts[light]] = given
        counts[light] += 1
        held[index] = held[counts[heavy] - 1]
        counts[heavy] -= 1
    owner[given] = light
    loads[heavy] -= costs[given]
    loads[light] += costs[given]


@kernel
def worst_phase(loads: NDArray[np.int64], targets: NDArray[np.int64], rank: int) -> int:
    """The phase in which a rank is furthest above the target."""
    worst = 0
    for p in range(1, targets.shape[0]):
        if loads[rank, p] - targets[p] > loads[rank, worst] - targets[worst]:
            worst = p
    return worst


@kernel
def refine_phases(
    costs: NDArray[np.int64],
    owner: NDArray[np.int32],
    num_ranks: int,
    targets: NDArray[np.int64],
    limit: int,
    window: int,
    budget: int,
) -> None:
    """Lower the largest excess by moves and swaps, in place.

    A rank that cannot be helped raises the targets to what it has: the others may then use that room for free.

    Args:
        costs: int64 (num_samples, num_phases).
        owner: int32 (num_samples,), changed in place.
        num_ranks: at least 1.
        targets: int64 (num_phases,), load of each phase at which a rank needs no more help; changed in place.
        limit: samples a rank may hold after a move; -1: swaps only.
        window: how many of the ranks lightest in the worst phase each heavy rank is tried against.
        budget: pairs of samples to look at, about: a bound on the work that is the same on every machine.
    """
    num_phases = costs.shape[1]
    loads = phase_loads(costs, owner, num_ranks)
    counts = np.zeros(num_ranks, np.int32)
    for rank in owner:
        counts[rank] += 1
    offsets, places = list_members(owner, counts, SLACK)
    scores = np.empty(num_ranks, np.int64)
    lightest = np.empty((num_phases, num_ranks), np.int64)
    for _round in range(MAX_ROUNDS):
        for rank in range(num_ranks):
            scores[rank] = excess(loads, targets, rank)
        if scores.max() == 0:
            return
        for p in range(num_phases):
            own = loads[:, p].copy()
            lightest[p] = ranks_by_load(own, own.max(), False)
        first = np.zeros(num_phases, np.int64)
        progress = False
        for heavy in ranks_by_load(scores, 0, True):
            for _attempt in range(MAX_ATTEMPTS):
                if excess(loads, targets, heavy) == 0 or budget <= 0:
                    break
                phase = worst_phase(loads, targets, heavy)
                partners = lightest[phase, first[phase] : first[phase] + window]
                partner, index, other, work = best_joint_partner(
                    costs, loads, targets, counts, offsets, places, heavy, partners, phase, limit
                )
                budget -= work
                if partner < 0:
                    for p in range(num_phases):
                        targets[p] = max(targets[p], loads[heavy, p])
                    break
                progress = True
                joint_exchange(costs, owner, loads, counts, offsets, places, heavy, index, partner, other)
                # The lightest rank has been filled: the window moves on.
                if partner == partners[0] and first[phase] + window < num_ranks:
                    first[phase] += 1
        if not progress or budget <= 0:
            return

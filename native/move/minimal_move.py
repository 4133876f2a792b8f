"""Minimal-move kernels: costs and who holds each sample -> a balanced assignment that moves little.

Ranks above the target give up their excess, which fills the ranks below it, those of the same node first; exchanges
do the rest. Where that stalls, more is released, and at last everything is dealt anew under the labels that keep most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.bounds import common_divisor, strong_lower_bound
from orchdata.native.assign.packed import longest_first, recount
from orchdata.native.assign.ranking import list_members
from orchdata.native.assign.refine import lower_makespan, search_budget
from orchdata.native.jit import kernel
from orchdata.native.move.refine_moves import refine_thriftily
from orchdata.native.move.release import place_released, release
from orchdata.native.sorting import descending_order, present_descending

RELEASE_BELOW = (0, 2, 8)  # Per cent of the target that ranks above it do without, in turn.


@kernel
def relabel(descending: NDArray[np.int64], held: NDArray[np.int32], owner: NDArray[np.int32], num_ranks: int) -> None:
    """Rename the ranks of an assignment so that much of what each holds stays where it is, greedily. In place."""
    counts = np.zeros(num_ranks, np.int32)
    for rank in owner:
        counts[rank] += 1
    offsets, places = list_members(owner, counts, 0)
    num_samples = descending.shape[0]
    kept = np.zeros(num_samples, np.int64)
    part = np.zeros(num_samples, np.int32)
    kept_of_holder = np.zeros(num_ranks, np.int64)
    size = 0
    for rank in range(num_ranks):
        mine = places[offsets[rank] : offsets[rank + 1]]
        for place in mine:
            kept_of_holder[held[place]] += descending[place]
        for place in mine:
            if kept_of_holder[held[place]] > 0:
                kept[size] = kept_of_holder[held[place]]
                part[size] = place
                kept_of_holder[held[place]] = 0
                size += 1
    name = np.full(num_ranks, -1, np.int32)
    taken = np.zeros(num_ranks, np.bool_)
    for index in descending_order(kept[:size]):
        rank, holder = owner[part[index]], held[part[index]]
        if name[rank] < 0 and not taken[holder]:
            name[rank] = holder
            taken[holder] = True
    free = 0
    for rank in range(num_ranks):
        if name[rank] < 0:
            while taken[free]:
                free += 1
            name[rank] = free
            taken[free] = True
    for place in range(num_samples):
        owner[place] = name[owner[place]]


@kernel
def move_excess(
    descending: NDArray[np.int64],
    held: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    counts: NDArray[np.int32],
    ranks_per_node: int,
    keep: int,
    target: int,
) -> None:
    """Let ranks above the target give up what they have above `keep`, place it, and exchange until balanced.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        held: int32 (num_samples,), the rank that holds each.
        owner, loads, counts: the assignment found, written.
        ranks_per_node: consecutive ranks of a node; 1 where nodes do not matter.
        keep: load a rank keeps, at most the target.
        target: makespan that is good enough.
    """
    num_samples, num_ranks = descending.shape[0], loads.shape[0]
    owner[:] = held
    recount(descending, owner, loads, counts)
    release(descending, owner, loads, keep)
    place_released(descending, held, owner, loads, ranks_per_node, target)
    recount(descending, owner, loads, counts)
    if loads.max() > target:
        refine_thriftily(descending, held, owner, loads, counts, target, search_budget(num_samples, num_ranks))
    if loads.max() > target:
        lower_makespan(descending, owner, loads, counts, target, num_samples, search_budget(num_samples, num_ranks))


@kernel
def deal_anew(
    descending: NDArray[np.int64],
    held: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    counts: NDArray[np.int32],
    target: int,
) -> None:
    """Assign everything longest first, under the labels that keep much where it is; arguments as of `move_excess`."""
    num_samples, num_ranks = descending.shape[0], loads.shape[0]
    owner[:] = longest_first(descending, num_samples, 0, loads, counts)
    if loads.max() > target:
        lower_makespan(descending, owner, loads, counts, target, num_samples, search_budget(num_samples, num_ranks))
    relabel(descending, held, owner, num_ranks)
    recount(descending, owner, loads, counts)


@kernel
def solve_from(
    costs: NDArray[np.int64], held: NDArray[np.int32], num_ranks: int, ranks_per_node: int, tolerance: float
) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    """Balance samples over ranks, starting from who holds them.

    Args:
        costs: int64 (num_samples,), at least 0, with a sum of at most 2**62.
        held: int32 (num_samples,), the rank that holds each.
        num_ranks: at least 1.
        ranks_per_node: consecutive ranks of a node, moves inside which are preferred; 1 where nodes do not matter.
        tolerance: relative distance to the lower bound that is good enough.

    Returns:
        (rank int32 (num_samples,), -1 for a cost of 0; loads int64 (num_ranks,); lower bound).
    """
    order, descending = present_descending(costs)
    num_samples = order.shape[0]
    start = held[order]
    bound = np.int64(strong_lower_bound(descending, num_ranks))
    slack = np.int64(bound * tolerance)
    target = bound + slack
    best, trial = start.copy(), np.empty(num_samples, np.int32)
    loads, trial_loads = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    counts = np.empty(num_ranks, np.int32)
    recount(descending, best, loads, counts)
    if loads.max() > target:
        divisor = common_divisor(descending)
        target = max(target, (bound + divisor - 1) // divisor * divisor)
    for rung in range(len(RELEASE_BELOW) + 1):
        if loads.max() <= target:
            break
        moves_excess = rung < len(RELEASE_BELOW)
        if moves_excess:
            keep = target - target // 100 * RELEASE_BELOW[rung]
            move_excess(descending, start, trial, trial_loads, counts, ranks_per_node, keep, target)
        else:
            deal_anew(descending, start, trial, trial_loads, counts, target)
        # A later rung moves more, the last one nearly all: it has to be better by what counts.
        if trial_loads.max() + slack < loads.max() or (trial_loads.max() <= target and moves_excess):
            best[:] = trial
            loads[:] = trial_loads
    rank = np.full(costs.shape[0], np.int32(-1))
    rank[order] = best
    return rank, loads, bound


@kernel
def solve_groups(
    costs: NDArray[np.int64],
    held: NDArray[np.int32],
    offsets: NDArray[np.int64],
    num_members: NDArray[np.int64],
    tolerance: float,
) -> tuple[NDArray[np.int32], int]:
    """`solve_from` in each group on its own.

    Args:
        costs: int64 (num_samples,), group after group.
        held: int32 (num_samples,), the member of its group that holds each.
        offsets: int64 (num_groups + 1,): the samples of group g are offsets[g] to offsets[g + 1].
        num_members: int64 (num_groups,), ranks in each group.
        tolerance: as in `solve_from`.

    Returns:
        (member int32 (num_samples,), the largest of the groups' lower bounds).
    """
    member = np.empty(costs.shape[0], np.int32)
    bound = np.int64(0)
    for group in range(num_members.shape[0]):
        start, stop = offsets[group], offsets[group + 1]
        found, _, least = solve_from(costs[start:stop], held[start:stop], num_members[group], 1, tolerance)
        member[start:stop] = found
        bound = max(bound, least)
    return member, bound

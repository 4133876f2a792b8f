"""Minimal-move kernels: costs and the home rank of each sample -> a balanced assignment that moves little.

Ranks above the target give up their excess, which fills the ranks below it, those of the same node first; exchanges do
the rest. Where that stalls, more is released and wider targets are tried. Finally everything is dealt again, with the
rank names that keep most samples home, if that pays.

For a tolerance, the candidate within it that moves the least is chosen, or else the one with the least makespan. The
candidates do not depend on the tolerance: a wider tolerance never moves more, and never has a lower makespan. Most need
not be computed: once the narrowest is within its own tolerance, the others count only if they exceed the next narrower.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.bounds import common_divisor, strong_lower_bound
from orchdata.native.assign.packed import longest_first, recount
from orchdata.native.assign.ranking import list_members
from orchdata.native.assign.refine import lower_makespan, search_budget
from orchdata.native.jit import kernel
from orchdata.native.move.nodes import stay_on_nodes
from orchdata.native.move.refine_moves import refine_with_few_moves
from orchdata.native.move.release import place_released, release
from orchdata.native.sorting import descending_order, present_descending

RELEASE_BELOW = (0, 2, 8)  # Per cent below the target that ranks above it go down to, in turn.
TOLERANCES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)  # Tolerances of the candidates.
NARROWER = (1e-4, 0.0)  # Tried in turn if a tolerance below the first is requested and reached; they may not move less.


@kernel
def pays(reached: int, again: int, gain: int) -> bool:
    """Return whether dealing again takes 1 / `gain` off the makespan that moving little reached."""
    return reached > 0 and reached - again >= (reached + gain - 1) // gain


@kernel
def relabel(sizes: NDArray[np.int64], home: NDArray[np.int32], owner: NDArray[np.int32], num_ranks: int) -> None:
    """Rename the ranks of an assignment greedily, so that many samples stay on their rank. In place."""
    counts = np.zeros(num_ranks, np.int32)
    for rank in owner:
        counts[rank] += 1
    offsets, members = list_members(owner, counts, 0)
    num_samples = sizes.shape[0]
    kept = np.zeros(num_samples, np.int64)
    part = np.zeros(num_samples, np.int32)
    kept_of_holder = np.zeros(num_ranks, np.int64)
    size = 0
    for rank in range(num_ranks):
        mine = members[offsets[rank] : offsets[rank + 1]]
        for position in mine:
            kept_of_holder[home[position]] += sizes[position]
        for position in mine:
            if kept_of_holder[home[position]] > 0:
                kept[size] = kept_of_holder[home[position]]
                part[size] = position
                kept_of_holder[home[position]] = 0
                size += 1
    name = np.full(num_ranks, -1, np.int32)
    taken = np.zeros(num_ranks, np.bool_)
    for index in descending_order(kept[:size]):
        rank, holder = owner[part[index]], home[part[index]]
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
    for position in range(num_samples):
        owner[position] = name[owner[position]]


@kernel
def move_excess(
    descending: NDArray[np.int64],
    sizes: NDArray[np.int64],
    home: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    counts: NDArray[np.int32],
    ranks_per_node: int,
    keep: int,
    target: int,
) -> None:
    """Let ranks above the target give up their load above `keep`, assign it, and exchange until balanced.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        sizes: int64 (num_samples,), price of moving each.
        home: int32 (num_samples,), the rank that has each.
        owner, loads, counts: the new assignment, written.
        ranks_per_node: consecutive ranks of a node; 1 if nodes do not matter.
        keep: load that a rank keeps, at most the target.
        target: makespan that is good enough.
    """
    num_samples, num_ranks = descending.shape[0], loads.shape[0]
    owner[:] = home
    recount(descending, owner, loads, counts)
    release(descending, owner, loads, keep)
    place_released(descending, home, owner, loads, ranks_per_node, target)
    recount(descending, owner, loads, counts)
    if loads.max() > target:
        refine_with_few_moves(
            descending, sizes, home, owner, loads, counts, target, search_budget(num_samples, num_ranks)
        )
    if loads.max() > target:
        limits = np.full(num_ranks, num_samples)
        lower_makespan(descending, owner, loads, counts, target, limits, search_budget(num_samples, num_ranks))


@kernel
def move_within(
    descending: NDArray[np.int64],
    sizes: NDArray[np.int64],
    home: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    counts: NDArray[np.int32],
    ranks_per_node: int,
    target: int,
    slack: int,
) -> None:
    """Compute the candidate of one tolerance: `move_excess`, releasing more where it stalls; arguments as there.

    Args:
        slack: what a later try, which moves more, must take off the makespan if the target is out of reach.
    """
    trial, trial_loads = np.empty_like(owner), np.empty_like(loads)
    owner[:] = home
    recount(descending, owner, loads, counts)
    for below in RELEASE_BELOW:
        if loads.max() <= target:
            break
        keep = target - target // 100 * below
        move_excess(descending, sizes, home, trial, trial_loads, counts, ranks_per_node, keep, target)
        if trial_loads.max() + slack < loads.max() or trial_loads.max() <= target:
            owner[:] = trial
            loads[:] = trial_loads
    if ranks_per_node > 1:
        stay_on_nodes(descending, sizes, home, owner, loads, ranks_per_node, max(target, loads.max()))


@kernel
def deal_again(
    descending: NDArray[np.int64],
    sizes: NDArray[np.int64],
    home: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    counts: NDArray[np.int32],
    target: int,
) -> None:
    """Assign everything longest first, with rank names that keep much home; arguments as in `move_excess`."""
    num_samples, num_ranks = descending.shape[0], loads.shape[0]
    loads[:], counts[:] = 0, 0
    owner[:] = longest_first(descending, num_samples, 0, loads, counts)
    if loads.max() > target:
        limits = np.full(num_ranks, num_samples)
        lower_makespan(descending, owner, loads, counts, target, limits, search_budget(num_samples, num_ranks))
    relabel(sizes, home, owner, num_ranks)
    recount(descending, owner, loads, counts)


@kernel
def moved_size(sizes: NDArray[np.int64], home: NDArray[np.int32], owner: NDArray[np.int32]) -> int:
    """Return the size that an assignment moves."""
    total = np.int64(0)
    for position in range(sizes.shape[0]):
        if owner[position] != home[position]:
            total += sizes[position]
    return total


@kernel
def take_if_better(
    sizes: NDArray[np.int64],
    home: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    best: NDArray[np.int32],
    best_loads: NDArray[np.int64],
    target: int,
) -> None:
    """Take an assignment as the best if it is: within the target the one that moves least, else the lowest makespan.

    Args:
        owner, loads: the assignment.
        best, best_loads: the best so far, changed in place; the others as in `move_excess`.
    """
    makespan, lowest = loads.max(), best_loads.max()
    moved, least = moved_size(sizes, home, owner), moved_size(sizes, home, best)
    if makespan <= target and lowest <= target:
        takes = moved < least or (moved == least and makespan < lowest)
    else:
        takes = makespan < lowest or (makespan == lowest and moved < least)
    if takes:
        best[:] = owner
        best_loads[:] = loads


@kernel
def solve_from(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    home: NDArray[np.int32],
    num_ranks: int,
    ranks_per_node: int,
    tolerance: float,
    redeal_gain: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    """Balance samples over ranks, starting from their home ranks.

    Args:
        costs: int64 (num_samples,), at least 0, with a sum of at most 2**62.
        sizes: int64 (num_samples,), price of moving each, at least 0, with a sum of at most 2**62.
        home: int32 (num_samples,), the rank that has each.
        num_ranks: at least 1.
        ranks_per_node: consecutive ranks of a node, inside which moves are preferred; 1 if nodes do not matter.
        tolerance: relative distance to the lower bound that is good enough.
        redeal_gain: everything is dealt again if that takes 1 / redeal_gain off the result of moving little.

    Returns:
        (rank int32 (num_samples,), -1 for a cost of 0; loads int64 (num_ranks,); lower bound).
    """
    order, descending = present_descending(costs)
    start, weights = home[order], sizes[order]
    bound = np.int64(strong_lower_bound(descending, num_ranks))
    best, loads = start.copy(), np.empty(num_ranks, np.int64)
    recount(descending, best, loads, np.empty(num_ranks, np.int32))
    if loads.max() > bound + np.int64(bound * tolerance):
        improve(descending, weights, start, best, loads, ranks_per_node, bound, tolerance, redeal_gain)
    rank = np.full(costs.shape[0], np.int32(-1))
    rank[order] = best
    return rank, loads, bound


@kernel
def improve(
    descending: NDArray[np.int64],
    sizes: NDArray[np.int64],
    home: NDArray[np.int32],
    best: NDArray[np.int32],
    loads: NDArray[np.int64],
    ranks_per_node: int,
    bound: int,
    tolerance: float,
    redeal_gain: int,
) -> None:
    """Choose among the candidates of the module, one of which is to move nothing.

    Args:
        best, loads: the home rank of each sample, and the loads; replaced by the chosen candidate.
        bound: lower bound of the makespan.
        tolerance, redeal_gain: as in `solve_from`; the others as in `move_excess`.
    """
    divisor = common_divisor(descending)
    least = (bound + divisor - 1) // divisor * divisor  # No makespan is lower.
    first = max(bound + np.int64(bound * TOLERANCES[0]), least)
    target = max(bound + np.int64(bound * tolerance), least)
    owner, trial = best.copy(), loads.copy()
    counts = np.empty(loads.shape[0], np.int32)
    staying = loads.max()
    move_within(descending, sizes, home, owner, trial, counts, ranks_per_node, first, first - bound)
    take_if_better(sizes, home, owner, trial, best, loads, max(first, target))
    reached, below = trial.max(), first
    lowest = min(staying, reached)
    stalled = reached > first
    for tried in TOLERANCES[1:]:
        own = max(bound + np.int64(bound * tried), least)
        if own >= staying or (not stalled and below >= target):
            break
        if own == below or (stalled and own < reached):
            continue
        move_within(descending, sizes, home, owner, trial, counts, ranks_per_node, own, own - bound)
        lowest = min(lowest, trial.max())
        if stalled or trial.max() > below:
            take_if_better(sizes, home, owner, trial, best, loads, max(first, target))
        below = own
    if stalled and pays(lowest, least, redeal_gain):
        deal_again(descending, sizes, home, owner, trial, counts, first)
        if pays(lowest, trial.max(), redeal_gain):
            take_if_better(sizes, home, owner, trial, best, loads, max(first, target))
    for tried in NARROWER:
        if loads.max() <= target or stalled:
            break
        own = max(bound + np.int64(bound * tried), least)
        move_within(descending, sizes, home, owner, trial, counts, ranks_per_node, own, own - bound)
        if trial.max() < loads.max() and moved_size(sizes, home, owner) >= moved_size(sizes, home, best):
            best[:] = owner
            loads[:] = trial


@kernel
def solve_groups(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    home: NDArray[np.int32],
    offsets: NDArray[np.int64],
    num_members: NDArray[np.int64],
    tolerance: float,
    redeal_gain: int,
) -> tuple[NDArray[np.int32], int]:
    """Run `solve_from` in each group separately.

    Args:
        costs: int64 (num_samples,), group after group.
        sizes: int64 (num_samples,), price of moving each.
        home: int32 (num_samples,), the member of its group that has each.
        offsets: int64 (num_groups + 1,): the samples of group g are offsets[g] to offsets[g + 1].
        num_members: int64 (num_groups,), ranks in each group.
        tolerance, redeal_gain: as in `solve_from`.

    Returns:
        (member int32 (num_samples,), the largest of the groups' lower bounds).
    """
    member = np.empty(costs.shape[0], np.int32)
    bound = np.int64(0)
    for group in range(num_members.shape[0]):
        mine = slice(offsets[group], offsets[group + 1])
        assigned, _, least = solve_from(
            costs[mine], sizes[mine], home[mine], num_members[group], 1, tolerance, redeal_gain
        )
        member[mine] = assigned
        bound = max(bound, least)
    return member, bound

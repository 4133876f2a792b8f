"""Minimal-move kernels: costs and who holds each sample -> a balanced assignment that moves little.

Ranks above the target give up their excess, which fills the ranks below it, those of the same node first; exchanges
do the rest. Where that stalls, more is released, wider targets are tried too, and at last everything is dealt anew
under the labels that keep most, if that pays.

What is chosen for a tolerance is the candidate within it that moves the least, or else the one with the least makespan.
The candidates do not depend on the tolerance: so a wider one never moves more, nor has a lower makespan. Most need not
be made: once the narrowest is within its own tolerance, the others count only where they are beyond the next narrower.
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
from orchdata.native.move.refine_moves import refine_thriftily
from orchdata.native.move.release import place_released, release
from orchdata.native.sorting import descending_order, present_descending

RELEASE_BELOW = (0, 2, 8)  # Per cent of the target that ranks above it do without, in turn.
TOLERANCES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)  # Of the candidates.
NARROWER = (1e-4, 0.0)  # Tried in turn where less than the first is asked for and reached; they may not move less.


@kernel
def pays(reached: int, anew: int, gain: int) -> bool:
    """Whether dealing anew takes one part in `gain` off the makespan that moving little reached."""
    return reached > 0 and reached - anew >= (reached + gain - 1) // gain


@kernel
def relabel(sizes: NDArray[np.int64], held: NDArray[np.int32], owner: NDArray[np.int32], num_ranks: int) -> None:
    """Rename the ranks of an assignment so that much of what each holds stays where it is, greedily. In place."""
    counts = np.zeros(num_ranks, np.int32)
    for rank in owner:
        counts[rank] += 1
    offsets, places = list_members(owner, counts, 0)
    num_samples = sizes.shape[0]
    kept = np.zeros(num_samples, np.int64)
    part = np.zeros(num_samples, np.int32)
    kept_of_holder = np.zeros(num_ranks, np.int64)
    size = 0
    for rank in range(num_ranks):
        mine = places[offsets[rank] : offsets[rank + 1]]
        for place in mine:
            kept_of_holder[held[place]] += sizes[place]
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
    sizes: NDArray[np.int64],
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
        sizes: int64 (num_samples,), what moving each takes.
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
        refine_thriftily(descending, sizes, held, owner, loads, counts, target, search_budget(num_samples, num_ranks))
    if loads.max() > target:
        lower_makespan(descending, owner, loads, counts, target, num_samples, search_budget(num_samples, num_ranks))


@kernel
def move_within(
    descending: NDArray[np.int64],
    sizes: NDArray[np.int64],
    held: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    counts: NDArray[np.int32],
    ranks_per_node: int,
    target: int,
    slack: int,
) -> None:
    """The candidate of one tolerance: `move_excess`, releasing more where it stalls; arguments as there.

    Args:
        slack: what a later try must take off the makespan, as it moves more, where the target is out of reach.
    """
    trial, trial_loads = np.empty_like(owner), np.empty_like(loads)
    owner[:] = held
    recount(descending, owner, loads, counts)
    for below in RELEASE_BELOW:
        if loads.max() <= target:
            break
        keep = target - target // 100 * below
        move_excess(descending, sizes, held, trial, trial_loads, counts, ranks_per_node, keep, target)
        if trial_loads.max() + slack < loads.max() or trial_loads.max() <= target:
            owner[:] = trial
            loads[:] = trial_loads
    if ranks_per_node > 1:
        stay_on_nodes(descending, sizes, held, owner, loads, ranks_per_node, max(target, loads.max()))


@kernel
def deal_anew(
    descending: NDArray[np.int64],
    sizes: NDArray[np.int64],
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
    relabel(sizes, held, owner, num_ranks)
    recount(descending, owner, loads, counts)


@kernel
def moved_size(sizes: NDArray[np.int64], held: NDArray[np.int32], owner: NDArray[np.int32]) -> int:
    """What an assignment moves."""
    total = np.int64(0)
    for place in range(sizes.shape[0]):
        if owner[place] != held[place]:
            total += sizes[place]
    return total


@kernel
def take_if_better(
    sizes: NDArray[np.int64],
    held: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    best: NDArray[np.int32],
    best_loads: NDArray[np.int64],
    target: int,
) -> None:
    """Make an assignment the best where it is: of those within the target the one that moves least, else the lowest.

    Args:
        owner, loads: the assignment.
        best, best_loads: the best so far, changed in place; the others as of `move_excess`.
    """
    makespan, lowest = loads.max(), best_loads.max()
    moved, least = moved_size(sizes, held, owner), moved_size(sizes, held, best)
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
    held: NDArray[np.int32],
    num_ranks: int,
    ranks_per_node: int,
    tolerance: float,
    redeal_gain: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    """Balance samples over ranks, starting from who holds them.

    Args:
        costs: int64 (num_samples,), at least 0, with a sum of at most 2**62.
        sizes: int64 (num_samples,), what moving each takes, at least 0, with a sum of at most 2**62.
        held: int32 (num_samples,), the rank that holds each.
        num_ranks: at least 1.
        ranks_per_node: consecutive ranks of a node, moves inside which are preferred; 1 where nodes do not matter.
        tolerance: relative distance to the lower bound that is good enough.
        redeal_gain: everything is dealt anew where that takes one part in so many off what moving little reaches.

    Returns:
        (rank int32 (num_samples,), -1 for a cost of 0; loads int64 (num_ranks,); lower bound).
    """
    order, descending = present_descending(costs)
    start, weights = held[order], sizes[order]
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
    held: NDArray[np.int32],
    best: NDArray[np.int32],
    loads: NDArray[np.int64],
    ranks_per_node: int,
    bound: int,
    tolerance: float,
    redeal_gain: int,
) -> None:
    """Choose among the candidates of the module, staying among them.

    Args:
        best, loads: who holds each sample, and what that gives; the candidate chosen is written.
        bound: lower bound of the makespan.
        tolerance, redeal_gain: as of `solve_from`; the others as of `move_excess`.
    """
    divisor = common_divisor(descending)
    least = (bound + divisor - 1) // divisor * divisor  # No makespan is lower.
    first = max(bound + np.int64(bound * TOLERANCES[0]), least)
    target = max(bound + np.int64(bound * tolerance), least)
    owner, trial = best.copy(), loads.copy()
    counts = np.empty(loads.shape[0], np.int32)
    staying = loads.max()
    move_within(descending, sizes, held, owner, trial, counts, ranks_per_node, first, first - bound)
    take_if_better(sizes, held, owner, trial, best, loads, max(first, target))
    reached, below = trial.max(), first
    lowest = min(staying, reached)
    stalled = reached > first
    for tried in TOLERANCES[1:]:
        own = max(bound + np.int64(bound * tried), least)
        if own >= staying or (not stalled and below >= target):
            break
        if own == below or (stalled and own < reached):
            continue
        move_within(descending, sizes, held, owner, trial, counts, ranks_per_node, own, own - bound)
        lowest = min(lowest, trial.max())
        if stalled or trial.max() > below:
            take_if_better(sizes, held, owner, trial, best, loads, max(first, target))
        below = own
    if stalled and pays(lowest, least, redeal_gain):
        deal_anew(descending, sizes, held, owner, trial, counts, first)
        if pays(lowest, trial.max(), redeal_gain):
            take_if_better(sizes, held, owner, trial, best, loads, max(first, target))
    for tried in NARROWER:
        if loads.max() <= target or stalled:
            break
        own = max(bound + np.int64(bound * tried), least)
        move_within(descending, sizes, held, owner, trial, counts, ranks_per_node, own, own - bound)
        if trial.max() < loads.max() and moved_size(sizes, held, owner) >= moved_size(sizes, held, best):
            best[:] = owner
            loads[:] = trial


@kernel
def solve_groups(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    held: NDArray[np.int32],
    offsets: NDArray[np.int64],
    num_members: NDArray[np.int64],
    tolerance: float,
    redeal_gain: int,
) -> tuple[NDArray[np.int32], int]:
    """`solve_from` in each group on its own.

    Args:
        costs: int64 (num_samples,), group after group.
        sizes: int64 (num_samples,), what moving each takes.
        held: int32 (num_samples,), the member of its group that holds each.
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
        found, _, least = solve_from(
            costs[mine], sizes[mine], held[mine], num_members[group], 1, tolerance, redeal_gain
        )
        member[mine] = found
        bound = max(bound, least)
    return member, bound

"""Minimal-move kernels: costs and the home rank of each sample -> a balanced assignment that moves little.

Ranks above the target give up their excess, which fills the ranks below it, those of the same node first; exchanges do
the rest. Where that stalls, more is released and wider targets are tried. Finally everything is dealt again, with the
rank names that keep most samples home, if that pays. In an assignment, samples that move anyway are exchanged so that
fewer leave their node.

For a tolerance, the candidate within it that moves the least is chosen, or else the one with the least makespan. The
candidates do not depend on the tolerance: a wider tolerance never moves more, and never has a lower makespan. Most need
not be computed: once the narrowest is within its own tolerance, the others count only if they exceed the next narrower.
"""

from __future__ import annotations

import numpy as np

from orchdata.native.assign.bounds import common_divisor, strong_lower_bound
from orchdata.native.assign.packed import longest_first, recount, replay, tournament, winner
from orchdata.native.assign.refine import bit_length, list_members, lower_makespan, search_budget
from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.move_phases import refine_with_few_moves
from orchdata.native.sorting import descending_order, present_descending

RELEASE_BELOW = (0, 2, 8)  # Per cent below the target that ranks above it go down to, in turn.
TOLERANCES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)  # Tolerances of the candidates.
NARROWER = (1e-4, 0.0)  # Tried in turn if a tolerance below the first is requested and reached; they may not move less.


@kernel
def pays(reached: int, again: int, gain: int) -> bool:
    """Return whether dealing again takes 1 / `gain` off the makespan that moving little reached."""
    return reached > 0 and reached - again >= (reached + gain - 1) // gain


@kernel
def relabel(sizes: Ints, home: Ints32, owner: Ints32, num_ranks: int) -> None:
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
    descending: Ints,
    sizes: Ints,
    home: Ints32,
    owner: Ints32,
    loads: Ints,
    counts: Ints32,
    ranks_per_node: int,
    keep: int,
    target: int,
) -> None:
    """Let ranks above the target give up their load above `keep`, assign it, and exchange until balanced. `owner`,
    `loads` and `counts` are written.
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
    descending: Ints,
    sizes: Ints,
    home: Ints32,
    owner: Ints32,
    loads: Ints,
    counts: Ints32,
    ranks_per_node: int,
    target: int,
    slack: int,
) -> None:
    """Compute the candidate of one tolerance: `move_excess`, releasing more where it stalls. A later try, which moves
    more, must take `slack` off the makespan if the target is out of reach.
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
    descending: Ints, sizes: Ints, home: Ints32, owner: Ints32, loads: Ints, counts: Ints32, target: int
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
def moved_size(sizes: Ints, home: Ints32, owner: Ints32) -> int:
    """Return the size that an assignment moves."""
    total = np.int64(0)
    for position in range(sizes.shape[0]):
        if owner[position] != home[position]:
            total += sizes[position]
    return total


@kernel
def take_if_better(
    sizes: Ints, home: Ints32, owner: Ints32, loads: Ints, best: Ints32, best_loads: Ints, target: int
) -> None:
    """Take an assignment as the best if it is: within the target the one that moves least, else the lowest makespan."""
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
    costs: Ints, sizes: Ints, home: Ints32, num_ranks: int, ranks_per_node: int, tolerance: float, redeal_gain: int
) -> tuple[Ints32, Ints, int]:
    """Balance samples over ranks, starting from their home ranks. Everything is dealt again if that takes 1 /
    redeal_gain off the result of moving little. Return (rank, -1 for a cost of 0; loads; lower bound).
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
    descending: Ints,
    sizes: Ints,
    home: Ints32,
    best: Ints32,
    loads: Ints,
    ranks_per_node: int,
    bound: int,
    tolerance: float,
    redeal_gain: int,
) -> None:
    """Choose among the candidates of the module, one of which is to move nothing: `best` and `loads` are replaced by
    it.
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
    costs: Ints, sizes: Ints, home: Ints32, offsets: Ints, num_members: Ints, tolerance: float, redeal_gain: int
) -> tuple[Ints32, int]:
    """Run `solve_from` in each group separately. Return (member of its group, int32 (num_samples,); largest lower
    bound).
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


FAR_ABOVE = 9  # Binary digits: a load is far above the target from 1/512 of it.
MAX_SEARCHES = 128  # Searches for a rank that can make room, in one pass.


@kernel
def release(descending: Ints, owner: Ints32, loads: Ints, keep: int) -> None:
    """Take from each rank above `keep` the samples that bring it there: owner -1 for those. In place. First the largest
    that fit into the rank's excess and into the mean room of the ranks below: larger ones would bring those above the
    target. Then the smallest, until the excess is gone.
    """
    room = np.int64(0)
    lighter = 0
    for load in loads:
        if load < keep:
            room += keep - load
            lighter += 1
    largest = room // max(1, lighter)
    for position in range(descending.shape[0]):
        rank = owner[position]
        if loads[rank] > keep and descending[position] <= min(largest, loads[rank] - keep):
            owner[position] = -1
            loads[rank] -= descending[position]
    for position in range(descending.shape[0] - 1, -1, -1):
        rank = owner[position]
        if rank >= 0 and loads[rank] > keep:
            owner[position] = -1
            loads[rank] -= descending[position]


@kernel
def can_make_room(
    descending: Ints,
    owner: Ints32,
    loads: Ints,
    offsets: Ints,
    members: Ints32,
    position: int,
    target: int,
    otherwise: int,
) -> int:
    """Return the least loaded rank that is within the target with this sample after releasing all smaller ones."""
    best = np.int64(-1)
    for rank in range(loads.shape[0]):
        if best >= 0 and loads[rank] >= loads[best]:
            continue
        stays = loads[rank] + descending[position]
        for other in members[offsets[rank] : offsets[rank + 1]][::-1]:
            if other < position or stays <= target:
                break
            if owner[other] == rank:
                stays -= descending[other]
        if stays <= target:
            best = np.int64(rank)
    return best if best >= 0 else otherwise


@kernel
def make_room(descending: Ints, owner: Ints32, loads: Ints, samples: Ints32, position: int, target: int) -> None:
    """Release the smallest of `samples` of the new rank of `position`, down to the target; none larger than that
    sample.
    """
    rank = owner[position]
    for other in samples[::-1]:
        if loads[rank] > target and other > position and owner[other] == rank:
            owner[other] = -1
            loads[rank] -= descending[other]


@kernel
def place_released(
    descending: Ints, home: Ints32, owner: Ints32, loads: Ints, ranks_per_node: int, target: int
) -> None:
    """Give each released sample, from the largest, to the least loaded rank of its node if it fits there, else of all.
    If it brings even that rank far above the target, the rank releases its smallest ones in return, early enough to
    assign them later in the same pass.
    """
    num_ranks = loads.shape[0]
    rank_bits = bit_length(num_ranks - 1)
    rank_mask = np.int64((1 << rank_bits) - 1)
    leaves = 1 << rank_bits
    shift = max(0, bit_length(descending.sum()) + rank_bits - 62)
    offsets, members = list_members(home, np.bincount(home, minlength=num_ranks).astype(np.int32), 0)
    tree = np.empty(2 * leaves, np.int64)
    tournament(((loads >> shift) << rank_bits) | np.arange(num_ranks), tree)
    searches = MAX_SEARCHES
    for position in range(descending.shape[0]):
        if owner[position] >= 0:
            continue
        first = home[position] // ranks_per_node * ranks_per_node
        rank = winner(tree, first, min(first + ranks_per_node, num_ranks)) & rank_mask
        if loads[rank] + descending[position] > target:
            rank = tree[1] & rank_mask
        makes_room = loads[rank] + descending[position] - target > target >> FAR_ABOVE and searches > 0
        if makes_room:
            searches -= 1
            rank = can_make_room(descending, owner, loads, offsets, members, position, target, rank)
        owner[position] = rank
        loads[rank] += descending[position]
        if makes_room:
            make_room(descending, owner, loads, members[offsets[rank] : offsets[rank + 1]], position, target)
        replay(tree, leaves + rank, ((loads[rank] >> shift) << rank_bits) | rank)


PASSES = 2


@kernel
def roomiest(loads: Ints, cost: int, ceiling: int, holder: int, first: int, stop: int) -> int:
    """Return a rank with room for a sample: its holder, else the least loaded from `first` to `stop` - 1, else -1."""
    if loads[holder] + cost <= ceiling:
        return holder
    best = -1
    for rank in range(first, stop):
        if loads[rank] + cost <= ceiling and (best < 0 or loads[rank] < loads[best]):
            best = rank
    return best


@kernel
def stay_on_nodes(
    descending: Ints, sizes: Ints, home: Ints32, owner: Ints32, loads: Ints, ranks_per_node: int, ceiling: int
) -> None:
    """Bring samples that left their node back to it, if there is room below `ceiling` or in exchange for another moved
    one. In place. The total size that moves never grows.
    """
    num_ranks = loads.shape[0]
    moved = np.flatnonzero(owner != home)
    node = owner[moved] // ranks_per_node
    # Moved samples by their current node; one that is brought back leaves a stale entry.
    slots = moved[np.argsort(node, kind="mergesort")]
    offsets = np.zeros((num_ranks - 1) // ranks_per_node + 2, np.int64)
    offsets[1:] = np.cumsum(np.bincount(node, minlength=offsets.shape[0] - 1))
    for _turn in range(PASSES):
        for here in range(slots.shape[0]):
            sample = slots[here]
            rank, cost, home_node = owner[sample], descending[sample], home[sample] // ranks_per_node
            if rank // ranks_per_node == home_node:
                continue
            first = home_node * ranks_per_node
            to = roomiest(loads, cost, ceiling, home[sample], first, min(first + ranks_per_node, num_ranks))
            if to >= 0:
                owner[sample] = to
                loads[rank] -= cost
                loads[to] += cost
                continue
            most = np.int64(0)
            there = -1
            for slot in range(offsets[home_node], offsets[home_node + 1]):
                other = slots[slot]
                to, change = owner[other], cost - descending[other]
                if to // ranks_per_node != home_node or to == home[other]:
                    continue
                if loads[to] + change > ceiling or loads[rank] - change > ceiling:
                    continue
                gain = sizes[sample]
                if home[other] // ranks_per_node != home_node:
                    gain += sizes[other]
                if home[other] // ranks_per_node != rank // ranks_per_node:
                    gain -= sizes[other]
                if gain > most:
                    most, there = gain, slot
            if there >= 0:
                other = slots[there]
                to, change = owner[other], cost - descending[other]
                owner[sample], owner[other] = to, rank
                loads[to] += change
                loads[rank] -= change
                slots[here], slots[there] = other, sample

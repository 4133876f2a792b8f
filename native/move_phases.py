"""Minimal-move kernels of several phases: costs by phase and home ranks of samples -> little excess, few moves.

A rank above the target of a phase gives up samples until it is not; each goes to the rank where it causes the least
excess, and exchanges do the rest. The excess of a rank is its load above the targets, summed over phases. In a grid
samples go to ranks of their node, then to those of its column (the ranks with the same number in every node); capped
sizes are further columns after the costs.

Refinement is as in `orchdata.native.assign.refine`, but of the exchanges that bring both ranks to the target it takes
the one that moves the least in addition: exchanging samples that have left home already is free, and some return home.
"""

from __future__ import annotations

import numpy as np

from orchdata.native.assign.phase_refine import FIRST_PARTNERS, phase_loads, refine_phases
from orchdata.native.assign.phases import QUICK_WINDOW, capped_columns, dominant_phases, order_by_phase
from orchdata.native.assign.refine import SLACK, exchange, list_members, ranks_by_load
from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import descending_order


@kernel
def release_by_phase(costs: Ints, owner: Ints32, loads: Ints, targets: Ints, phase: int) -> None:
    """Take from each rank above the target of `phase` the samples that bring it there: owner -1 for those. In place.
    The largest that fit into the rank's excess go first, then the smallest, until the excess is gone.
    """
    order = descending_order(np.ascontiguousarray(costs[:, phase]))
    for sample in order:
        rank, cost = owner[sample], costs[sample, phase]
        if rank >= 0 and 0 < cost <= loads[rank, phase] - targets[phase]:
            owner[sample] = -1
            loads[rank] -= costs[sample]
    for sample in order[::-1]:
        rank = owner[sample]
        if rank >= 0 and costs[sample, phase] > 0 and loads[rank, phase] > targets[phase]:
            owner[sample] = -1
            loads[rank] -= costs[sample]


@kernel
def excess_with(costs: Ints, loads: Ints, targets: Ints, rank: int, sample: int) -> int:
    """Return the excess of a rank with the sample added."""
    total = np.int64(0)
    for p in range(targets.shape[0]):
        total += max(np.int64(0), loads[rank, p] + costs[sample, p] - targets[p])
    return total


@kernel
def least_excess(
    costs: Ints, loads: Ints, targets: Ints, sample: int, phase: int, first: int, stop: int, stride: int
) -> tuple[int, int]:
    """Return, of the ranks from `first` in strides, the one with the least excess with the sample, and that excess.
    Ties go to the least load in `phase`, then to the lower rank.
    """
    best, least = first, excess_with(costs, loads, targets, first, sample)
    for rank in range(first + stride, stop, stride):
        # One column is enough to rule out most ranks.
        over = loads[rank, phase] + costs[sample, phase] - targets[phase]
        if over > least or (least == 0 and loads[rank, phase] >= loads[best, phase]):
            continue
        reached = excess_with(costs, loads, targets, rank, sample)
        if reached < least or (reached == least and loads[rank, phase] < loads[best, phase]):
            best, least = rank, reached
    return best, least


@kernel
def place_by_phase(
    costs: Ints, home: Ints32, owner: Ints32, loads: Ints, targets: Ints, ranks_per_node: int, primary: int
) -> None:
    """Give each released sample to the rank where it causes the least excess: of its node if one has room, else any.
    Samples go by their dominant phase, `primary` last, from the largest. In place.
    """
    num_ranks = loads.shape[0]
    phase = dominant_phases(costs, primary)
    for sample in order_by_phase(costs, phase, primary):
        if owner[sample] >= 0:
            continue
        first = home[sample] // ranks_per_node * ranks_per_node
        stop = min(first + ranks_per_node, num_ranks)
        rank, excess = least_excess(costs, loads, targets, sample, phase[sample], first, stop, 1)
        if excess > 0:
            rank, _ = least_excess(costs, loads, targets, sample, phase[sample], 0, num_ranks, 1)
        owner[sample] = rank
        loads[rank] += costs[sample]


@kernel
def move_by_phase(
    costs: Ints, home: Ints32, num_ranks: int, ranks_per_node: int, primary: int, targets: Ints, budget: int
) -> Ints32:
    """Lower the sum over phases of the largest load, starting from the home ranks. Return the rank of each sample."""
    owner = home.copy()
    loads = phase_loads(costs, owner, num_ranks)
    for turn in range(targets.shape[0] + 1):
        if turn != primary:
            release_by_phase(costs, owner, loads, targets, primary if turn == targets.shape[0] else turn)
    place_by_phase(costs, home, owner, loads, targets, ranks_per_node, primary)
    num_samples, num_phases = costs.shape
    pins = np.empty(0, np.int32)
    for window, raising in ((QUICK_WINDOW, True), (FIRST_PARTNERS, False)):
        budget = refine_phases(
            costs, num_phases, owner, num_ranks, targets.copy(), num_samples, window, raising, budget, pins
        )
    return owner


COLUMN = 256  # Ranks of a column of a grid to look at for a sample.


@kernel
def place_in_grid(
    columns: Ints,
    order: Ints32,
    phase: Ints32,
    home: Ints32,
    owner: Ints32,
    loads: Ints,
    targets: Ints,
    ranks_per_node: int,
) -> None:
    """Give each released sample, in `order`, to a rank of its node where it causes no excess, else to the rank of its
    column or node where it causes the least. In place. Ties are broken by the column `phase` of each.
    """
    num_ranks = loads.shape[0]
    for sample in order:
        if owner[sample] >= 0:
            continue
        first_of_node = home[sample] // ranks_per_node * ranks_per_node
        stop = min(first_of_node + ranks_per_node, num_ranks)
        rank, excess = least_excess(columns, loads, targets, sample, phase[sample], first_of_node, stop, 1)
        if excess > 0:
            first = home[sample] - first_of_node
            # With very many nodes only those around its own: the same number for each rank of the grid.
            reach = COLUMN // 2 * ranks_per_node
            begin = first + max(
                0, min(first_of_node - reach, num_ranks - first - 2 * reach) // ranks_per_node * ranks_per_node
            )
            end = min(num_ranks, begin + 2 * reach)
            other, less = least_excess(columns, loads, targets, sample, phase[sample], begin, end, ranks_per_node)
            if less < excess:
                rank = other
        owner[sample] = rank
        loads[rank] += columns[sample]


@kernel
def move_in_grid(
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    home: Ints32,
    num_ranks: int,
    ranks_per_node: int,
    primary: int,
    targets: Ints,
    budget: int,
) -> Ints32:
    """Return ranks of samples that bring all ranks to the targets and within the caps, as far as possible, moving
    little. `sizes` are those that caps bound, (num_samples, num_caps).
    """
    num_samples, num_phases = costs.shape
    columns, goals = capped_columns(costs, sizes, caps, targets)
    owner = home.copy()
    loads = phase_loads(columns, owner, num_ranks)
    for turn in range(goals.shape[0] + 1):
        if turn != primary:
            release_by_phase(columns, owner, loads, goals, primary if turn == goals.shape[0] else turn)
    phase = dominant_phases(costs, primary)
    place_in_grid(columns, order_by_phase(costs, phase, primary), phase, home, owner, loads, goals, ranks_per_node)
    pins = np.empty(0, np.int32)
    for window, raising in ((QUICK_WINDOW, True), (FIRST_PARTNERS, False)):
        budget = refine_phases(
            columns, num_phases, owner, num_ranks, goals.copy(), num_samples, window, raising, budget, pins
        )
    return owner


WINDOW = 64  # Number of lightest ranks that each heavy rank tries,
SPREAD = 64  # and of all others, evenly spaced: twice as many in each round.
MAX_ROUNDS = 4
NOTHING = (1 << 63) - 1


@kernel
def extra_move(size: int, home: int, here: int, there: int) -> int:
    """Return what a move adds to the moved size: negative if the sample returns home."""
    if home == here:
        return size
    if home == there:
        return -size
    return np.int64(0)


@kernel
def cheapest_exchange(
    descending: Ints,
    sizes: Ints,
    home: Ints32,
    heavy: int,
    samples: Ints32,
    light: int,
    offered: Ints32,
    least: int,
    most: int,
    may_move: bool,
) -> tuple[int, int, int]:
    """Return the exchange that takes from `least` to `most` off the heavy rank and moves the least in addition: (size
    moved in addition, index in samples, index in offered or -1 for a move); NOTHING if no exchange fits.
    """
    best = np.int64(NOTHING)
    best_index = -1
    best_other = -1
    first = 0
    for index in range(samples.shape[0]):
        cost = descending[samples[index]]
        leaves = extra_move(sizes[samples[index]], home[samples[index]], heavy, light)
        if may_move and least <= cost <= most and leaves < best:
            best, best_index, best_other = leaves, index, -1
        # Both lists descend in cost: partners too large for this sample are too large for the next.
        while first < offered.shape[0] and descending[offered[first]] > cost - least:
            first += 1
        for other in range(first, offered.shape[0]):
            partner = descending[offered[other]]
            if partner < cost - most:
                break
            extra = leaves + extra_move(sizes[offered[other]], home[offered[other]], light, heavy)
            if extra < best:
                best, best_index, best_other = extra, index, other
    return best, best_index, best_other


@kernel
def cheapest_partner(
    descending: Ints,
    sizes: Ints,
    home: Ints32,
    loads: Ints,
    counts: Ints32,
    offsets: Ints,
    members: Ints32,
    heavy: int,
    partners: Ints,
    target: int,
) -> tuple[int, int, int, int]:
    """Return the cheapest exchange after which a heavy rank and one of `partners` are both at the target: (partner or
    -1, index in the samples of heavy, index in those of the partner or -1, samples looked at).
    """
    best = np.int64(NOTHING)
    chosen = np.int64(-1)
    index = -1
    other = -1
    work = 0
    samples = members[offsets[heavy] : offsets[heavy] + counts[heavy]]
    least = loads[heavy] - target
    for light in partners:
        most = target - loads[light]
        if most < least or light == heavy:
            continue
        start = offsets[light]
        may_move = start + counts[light] < offsets[light + 1]
        work += counts[heavy] + counts[light]
        offered = members[start : start + counts[light]]
        extra, index_found, other_found = cheapest_exchange(
            descending, sizes, home, heavy, samples, light, offered, least, most, may_move
        )
        if extra < best:
            best, chosen, index, other = extra, light, index_found, other_found
            if best <= 0:
                break
    return chosen, index, other, work


@kernel
def refine_with_few_moves(
    descending: Ints, sizes: Ints, home: Ints32, owner: Ints32, loads: Ints, counts: Ints32, target: int, budget: int
) -> int:
    """Bring ranks above the target to it, each by one exchange at a time, in place; some may stay above. Return the
    rest of the budget.
    """
    for turn in range(MAX_ROUNDS):
        offsets, members = list_members(owner, counts, SLACK)
        heavy_ranks = ranks_by_load(loads, target, True)
        if heavy_ranks.shape[0] == 0:
            break
        light_ranks = ranks_by_load(loads, target, False)
        stride = 1 + light_ranks.shape[0] // (SPREAD << turn)
        partners = np.concatenate((light_ranks[:WINDOW], light_ranks[WINDOW::stride]))
        for heavy in heavy_ranks:
            if budget <= 0:
                return budget
            light, index, other, work = cheapest_partner(
                descending, sizes, home, loads, counts, offsets, members, heavy, partners, target
            )
            budget -= work
            if light >= 0:
                exchange(descending, owner, loads, counts, offsets, members, heavy, index, light, other)
    return budget

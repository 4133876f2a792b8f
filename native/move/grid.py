"""Minimal-move kernels of a grid: reachable loads, and the home rank of each sample -> few samples leave home.

A rank above a target gives up its excess: to ranks of its node, then to those of its column (the ranks with the same
number in every node), then to any. Capped sizes are further columns after the costs.
"""

from __future__ import annotations

from orchdata.native.assign.phase_refine import FIRST_PARTNERS, phase_loads, refine_phases
from orchdata.native.assign.phases import QUICK_WINDOW, capped_columns, dominant_phases, order_by_phase
from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.move.phases import least_excess, release_by_phase

COLUMN = 256  # Ranks of a column to look at for a sample.


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
    little.
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
    for window, raising in ((QUICK_WINDOW, True), (FIRST_PARTNERS, False)):
        budget = refine_phases(
            columns, num_phases, owner, num_ranks, goals.copy(), num_samples, window, raising, budget, None
        )
    return owner

"""Minimal-move kernels of a grid: reachable loads, and the home rank of each sample -> few samples leave home.

A rank above a target gives up its excess: to ranks of its node, then to those of its column (the ranks with the same
number in every node), then to any. Capped sizes are further columns after the costs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.phase_refine import FIRST_PARTNERS, phase_loads, refine_phases
from orchdata.native.assign.phases import QUICK_WINDOW, capped_columns, dominant_phases, order_by_phase
from orchdata.native.jit import kernel
from orchdata.native.move.phases import excess_with, release_by_phase

COLUMN = 256  # Ranks of a column to look at for a sample.


@kernel
def least_excess_of(
    columns: NDArray[np.int64],
    loads: NDArray[np.int64],
    targets: NDArray[np.int64],
    sample: int,
    phase: int,
    first: int,
    stop: int,
    stride: int,
) -> tuple[int, int]:
    """Return, of the ranks from `first` in strides, the one with the least excess with the sample, and that excess.

    Ties go to the least load in `phase`, then to the lower rank.
    """
    best, least = first, excess_with(columns, loads, targets, first, sample)
    for rank in range(first + stride, stop, stride):
        # One column is enough to rule out most ranks.
        over = loads[rank, phase] + columns[sample, phase] - targets[phase]
        if over > least or (least == 0 and loads[rank, phase] >= loads[best, phase]):
            continue
        reached = excess_with(columns, loads, targets, rank, sample)
        if reached < least or (reached == least and loads[rank, phase] < loads[best, phase]):
            best, least = rank, reached
    return best, least


@kernel
def place_in_grid(
    columns: NDArray[np.int64],
    order: NDArray[np.int32],
    phase: NDArray[np.int32],
    home: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    targets: NDArray[np.int64],
    ranks_per_node: int,
) -> None:
    """Give each released sample, in `order`, to a rank of its node where it causes no excess, else to the rank of its
    column or node where it causes the least. In place.

    Args:
        columns: int64 (num_samples, num_columns), costs and sizes.
        phase: int32 (num_samples,), the column by which ties are broken.
        first_of_node: int32 (num_samples,), the rank that each is from.
        owner: int32 (num_samples,), -1 for a released sample.
        loads: int64 (num_ranks, num_columns), without the released samples.
        targets: int64 (num_columns,).
    """
    num_ranks = loads.shape[0]
    for sample in order:
        if owner[sample] >= 0:
            continue
        first_of_node = home[sample] // ranks_per_node * ranks_per_node
        stop = min(first_of_node + ranks_per_node, num_ranks)
        rank, excess = least_excess_of(columns, loads, targets, sample, phase[sample], first_of_node, stop, 1)
        if excess > 0:
            first = home[sample] - first_of_node
            # With very many nodes only those around its own: the same number for each rank of the grid.
            reach = COLUMN // 2 * ranks_per_node
            begin = first + max(
                0, min(first_of_node - reach, num_ranks - first - 2 * reach) // ranks_per_node * ranks_per_node
            )
            end = min(num_ranks, begin + 2 * reach)
            other, less = least_excess_of(columns, loads, targets, sample, phase[sample], begin, end, ranks_per_node)
            if less < excess:
                rank = other
        owner[sample] = rank
        loads[rank] += columns[sample]


@kernel
def move_in_grid(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    home: NDArray[np.int32],
    num_ranks: int,
    ranks_per_node: int,
    primary: int,
    targets: NDArray[np.int64],
    budget: int,
) -> NDArray[np.int32]:
    """Bring all ranks to the targets and within the caps, as far as possible, moving little. Return ranks of samples.

    Args:
        costs: int64 (num_samples, num_phases).
        sizes: int64 (num_samples, num_caps).
        caps: int64 (num_caps,), at least 1.
        first_of_node: int32 (num_samples,), the rank that each is from.
        num_ranks: at least 1.
        ranks_per_node: ranks of a row of the grid.
        primary: index of the phase that all samples take part in.
        targets: int64 (num_phases,), largest loads.
        budget: pairs of samples to look at.

    Returns:
        int32 (num_samples,).
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

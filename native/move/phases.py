"""Minimal-move kernels of several phases: costs by phase and home ranks of samples -> little excess, few moves.

A rank above the target of a phase gives up samples until it is not; each goes to the rank where it causes the least
excess, and exchanges do the rest. The excess of a rank is its load above the targets, summed over phases.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.phase_refine import FIRST_PARTNERS, phase_loads, refine_phases
from orchdata.native.assign.phases import QUICK_WINDOW, dominant_phases, order_by_phase
from orchdata.native.jit import kernel
from orchdata.native.sorting import descending_order


@kernel
def release_by_phase(
    costs: NDArray[np.int64],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    targets: NDArray[np.int64],
    phase: int,
) -> None:
    """Take from each rank above a phase's target the samples that bring it there: owner -1 for those. In place.

    The largest that fit into the rank's excess go first, then the smallest, until the excess is gone.

    Args:
        costs: int64 (num_samples, num_phases).
        owner: int32 (num_samples,), rank of each.
        loads: int64 (num_ranks, num_phases).
        targets: int64 (num_phases,), loads that a rank may keep.
        phase: the phase with the target that counts.
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
def excess_with(
    costs: NDArray[np.int64], loads: NDArray[np.int64], targets: NDArray[np.int64], rank: int, sample: int
) -> int:
    """Return the excess of a rank with the sample added."""
    total = np.int64(0)
    for p in range(targets.shape[0]):
        total += max(np.int64(0), loads[rank, p] + costs[sample, p] - targets[p])
    return total


@kernel
def least_excess(
    costs: NDArray[np.int64],
    loads: NDArray[np.int64],
    targets: NDArray[np.int64],
    sample: int,
    phase: int,
    first: int,
    stop: int,
) -> tuple[int, int]:
    """Return, of the ranks from `first` to `stop` - 1, the one with the least excess with the sample, and that excess.

    Ties go to the least load in `phase`, then to the lower rank.
    """
    best = first
    least = excess_with(costs, loads, targets, first, sample)
    for rank in range(first + 1, stop):
        reached = excess_with(costs, loads, targets, rank, sample)
        if reached < least or (reached == least and loads[rank, phase] < loads[best, phase]):
            best, least = rank, reached
    return best, least


@kernel
def place_by_phase(
    costs: NDArray[np.int64],
    home: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    targets: NDArray[np.int64],
    ranks_per_node: int,
    primary: int,
) -> None:
    """Give each released sample to the rank where it causes the least excess: of its node if one has room, else any.

    Samples go by their dominant phase, `primary` last, from the largest. In place.

    Args:
        home: int32 (num_samples,), the rank that has each.
        owner: int32 (num_samples,), -1 for a released sample.
        loads: int64 (num_ranks, num_phases), without the released samples.
        ranks_per_node: consecutive ranks of a node; 1 if nodes do not matter.
        primary: index of the phase that all samples take part in; the others as in `release_by_phase`.
    """
    num_ranks = loads.shape[0]
    phase = dominant_phases(costs, primary)
    for sample in order_by_phase(costs, phase, primary):
        if owner[sample] >= 0:
            continue
        first = home[sample] // ranks_per_node * ranks_per_node
        stop = min(first + ranks_per_node, num_ranks)
        rank, excess = least_excess(costs, loads, targets, sample, phase[sample], first, stop)
        if excess > 0:
            rank, _ = least_excess(costs, loads, targets, sample, phase[sample], 0, num_ranks)
        owner[sample] = rank
        loads[rank] += costs[sample]


@kernel
def move_by_phase(
    costs: NDArray[np.int64],
    home: NDArray[np.int32],
    num_ranks: int,
    ranks_per_node: int,
    primary: int,
    targets: NDArray[np.int64],
    budget: int,
) -> NDArray[np.int32]:
    """Lower the sum over phases of the largest load, starting from the home ranks.

    Args:
        costs: int64 (num_samples, num_phases).
        home: int32 (num_samples,), the rank that has each.
        num_ranks: at least 1.
        ranks_per_node: consecutive ranks of a node; 1 if nodes do not matter.
        primary: index of the phase that all samples take part in.
        targets: int64 (num_phases,), loads that are good enough.
        budget: pairs of samples to look at.

    Returns:
        int32 (num_samples,): the rank of each sample.
    """
    owner = home.copy()
    loads = phase_loads(costs, owner, num_ranks)
    for turn in range(targets.shape[0] + 1):
        if turn != primary:
            release_by_phase(costs, owner, loads, targets, primary if turn == targets.shape[0] else turn)
    place_by_phase(costs, home, owner, loads, targets, ranks_per_node, primary)
    num_samples, num_phases = costs.shape
    for window, raising in ((QUICK_WINDOW, True), (FIRST_PARTNERS, False)):
        budget = refine_phases(
            costs, num_phases, owner, num_ranks, targets.copy(), num_samples, window, raising, budget, None
        )
    return owner

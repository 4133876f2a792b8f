"""Joint balancing kernels, whole: costs of several phases and caps -> rank of each sample, in each group of ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.bounds import strong_lower_bound
from orchdata.native.assign.packed import solve
from orchdata.native.assign.phase_refine import phase_loads
from orchdata.native.assign.phases import above_caps, refine_within, solve_barrier
from orchdata.native.jit import kernel
from orchdata.native.sorting import descending_order

FEW_SAMPLES = 2048  # Up to which the primary phase alone is balanced for a start, though another is known.
TOLERANCE = 1e-3


@kernel
def solve_alone(costs: NDArray[np.int64], num_ranks: int, max_samples: int, equal_count: bool) -> NDArray[np.int32]:
    """One phase balanced by itself; samples that cost nothing in it count as 1."""
    rank, _loads, _bound = solve(np.maximum(costs, 1), num_ranks, max_samples, 0, equal_count, TOLERANCE)
    return rank


@kernel
def solve_joint(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    within: NDArray[np.int32],
    num_ranks: int,
    primary: int,
    max_samples: int,
    equal_count: bool,
    good_part: int,
    pairs: float,
) -> NDArray[np.int32]:
    """One rank for each sample: lowers the sum over phases of the largest load.

    Args:
        costs: int64 (num_samples, num_phases), at least 1 in the primary phase.
        sizes: int64 (num_samples, num_caps), and
        caps: int64 (num_caps,), at least 1: what the samples of a rank may sum to; kept where that is found.
        within: int32 (num_samples,), an assignment that keeps the caps: they are then kept; or empty.
        num_ranks: at least 1.
        primary: index of the phase all samples take part in.
        max_samples: samples a rank may hold; with equal_count it does not bind.
        equal_count: counts differ by at most one.
        good_part: peaks that are this part above their bounds, or less, are searched no further.
        pairs: to look at, for each pair of samples that share a rank.

    Returns:
        int32 (num_samples,).
    """
    num_samples, num_phases = costs.shape
    if num_phases == 1 and caps.shape[0] == 0:
        return solve_alone(costs[:, 0].copy(), num_ranks, max_samples, equal_count)
    given = within
    if within.shape[0] == 0 or num_samples <= FEW_SAMPLES:
        given = solve_alone(costs[:, primary].copy(), num_ranks, max_samples, equal_count)
    bounds = np.empty(num_phases, np.int64)
    for p in range(num_phases):
        column = costs[:, p].copy()
        bounds[p] = strong_lower_bound(column[descending_order(column)], num_ranks)
    limit, extras, may_hold = np.int64(max_samples), np.int64(0), np.int64(max_samples)
    if equal_count:
        limit, extras, may_hold = np.int64(num_samples // num_ranks), np.int64(num_samples % num_ranks), np.int64(-1)
    good = bounds.sum() + bounds.sum() // good_part
    budget = np.int64(pairs * (num_samples * num_samples // num_ranks))
    rank = solve_barrier(costs, given, num_ranks, primary, bounds, limit, extras, equal_count, good, budget).copy()
    if above_caps(sizes, caps, rank, num_ranks) == 0:
        return rank
    peaks = np.empty(num_phases, np.int64)
    loads = phase_loads(costs, rank, num_ranks)
    for p in range(num_phases):
        peaks[p] = loads[:, p].max()
    refine_within(costs, sizes, caps, rank, num_ranks, peaks, may_hold, budget)
    above = above_caps(sizes, caps, rank, num_ranks)
    if above == 0:
        return rank
    # Sizes, spread evenly, keep within caps where much does.
    spread = within.copy()
    if within.shape[0] == 0:
        spread = solve_alone(sizes[:, 0].copy(), num_ranks, max_samples, equal_count)
    refine_within(costs, sizes, caps, spread, num_ranks, bounds, may_hold, budget)
    return spread if above_caps(sizes, caps, spread, num_ranks) < above else rank


@kernel
def solve_groups_jointly(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    within: NDArray[np.int32],
    offsets: NDArray[np.int64],
    group_sizes: NDArray[np.int64],
    primary: int,
    max_samples: int,
    equal_count: bool,
    good_part: int,
    pairs: float,
) -> NDArray[np.int32]:
    """`solve_joint` of each group of ranks by itself.

    Args:
        costs, sizes, caps, within: as of `solve_joint`, the samples of a group beside each other; the ranks of `within`
            count from 0 in each group.
        offsets: int64 (num_groups + 1,), the samples of each group.
        group_sizes: int64 (num_groups,), ranks of each.

    Returns:
        int32 (num_samples,), ranks from 0 in each group.
    """
    rank = np.empty(costs.shape[0], np.int32)
    for group in range(group_sizes.shape[0]):
        start, stop = offsets[group], offsets[group + 1]
        rank[start:stop] = solve_joint(
            np.ascontiguousarray(costs[start:stop]),
            np.ascontiguousarray(sizes[start:stop]),
            caps,
            within[start:stop].copy() if within.shape[0] > 0 else within,
            group_sizes[group],
            primary,
            min(max_samples, max(1, stop - start)),
            equal_count,
            good_part,
            pairs,
        )
    return rank

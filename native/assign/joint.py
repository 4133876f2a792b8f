"""The whole joint balancing kernel: costs of several phases and caps -> rank of each sample, in each group of ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.bounds import phase_bounds
from orchdata.native.assign.phase_refine import phase_peaks
from orchdata.native.assign.phases import above_caps, refine_within, solve_barrier
from orchdata.native.jit import kernel


@kernel
def solve_joint(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    given: NDArray[np.int32],
    within: NDArray[np.int32],
    offsets: NDArray[np.int64],
    group_sizes: NDArray[np.int64],
    primary: int,
    max_samples: int,
    equal_count: bool,
    good_part: int,
    pairs: float,
    pinned: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Return one rank for each sample: lower the sum over phases of the largest load, in each group of ranks.

    Args:
        costs: int64 (num_samples, num_phases), with adjacent samples of a group.
        sizes: int64 (num_samples, num_caps), and
        caps: int64 (num_caps,), at least 1: most that the sizes of a rank may sum to; kept if the search finds a way.
        given: int32 (num_samples,), an assignment to start from: the result is not worse, unless the start breaks a
            cap.
        within: int32 (num_samples,), an assignment that keeps the caps, then the result does too; or empty.
        offsets: int64 (num_groups + 1,), the samples of each group. Its ranks count from 0 in all assignments.
        group_sizes: int64 (num_groups,), ranks of each.
        primary: index of the phase that all samples take part in.
        max_samples: most samples of a rank; with equal_count it does not bind.
        equal_count: counts differ by at most one, as they do in `given`.
        good_part: the search ends when peaks are at most this part above their bounds.
        pairs: to look at, for each pair of samples that share a rank.
        pinned: int32 (num_samples,), the rank of a sample that stays there, as in `given` and `within`, or -1; of a
            single group.

    Returns:
        int32 (num_samples,).
    """
    ranks = np.empty(costs.shape[0], np.int32)
    for group in range(group_sizes.shape[0]):
        start, stop, num_ranks = offsets[group], offsets[group + 1], group_sizes[group]
        num_samples = stop - start
        mine, weights = costs[start:stop], sizes[start:stop]
        bounds = phase_bounds(mine, num_ranks, pinned)
        limit, extras, may_hold = np.int64(max_samples), np.int64(0), np.int64(max_samples)
        if equal_count:
            limit, extras, may_hold = num_samples // num_ranks, num_samples % num_ranks, np.int64(-1)
        good = bounds.sum() + bounds.sum() // good_part
        budget = np.int64(min(pairs * (num_samples * num_samples // num_ranks), 1e18))
        first = given[start:stop].copy()
        rank = solve_barrier(
            mine, first, num_ranks, primary, bounds, limit, extras, equal_count, good, budget, pinned
        ).copy()
        # First move within the caps with the peaks of this rank, then start from the assignment that keeps them.
        for start_again in range(2):
            above = above_caps(weights, caps, rank, num_ranks)
            if above == 0 or (start_again == 1 and within.shape[0] == 0):
                break
            trial = rank.copy()
            targets = bounds.copy()
            if start_again == 0:
                targets = phase_peaks(mine, rank, num_ranks)
            else:
                trial = within[start:stop].copy()
            refine_within(mine, weights, caps, trial, num_ranks, targets, may_hold, budget, pinned)
            if above_caps(weights, caps, trial, num_ranks) < above:
                rank = trial
        ranks[start:stop] = rank
    return ranks

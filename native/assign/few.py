"""Exact search for few samples: an assignment in which others are pinned -> the best one, if few samples may move."""

from __future__ import annotations

import numpy as np

from orchdata.native.assign.phase_refine import phase_loads
from orchdata.native.assign.phases import above_caps, sum_of_peaks
from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import descending_order

FEW_FREE = 12  # Samples that may move, at most, for a search of
STEPS = 1 << 17  # this number of steps: some milliseconds. 8 samples on 4 ranks need fewer.


@kernel
def search_few(
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    owner: Ints32,
    pinned: Ints32,
    num_ranks: int,
    bounds: Ints,
    limit: int,
    extras: int,
) -> None:
    """Lower the sum over phases of the largest load within caps, in place, by branch and bound; `bounds` are of the
    phases. Does nothing with more than FEW_FREE samples that may move, and stops after STEPS with the best so far.
    """
    free = np.flatnonzero(pinned < 0)
    if free.shape[0] == 0 or free.shape[0] > FEW_FREE:
        return
    free = free[descending_order(costs[free].sum(axis=1))]
    loads, filled = phase_loads(costs, pinned, num_ranks), phase_loads(sizes, pinned, num_ranks)
    counts = np.zeros(num_ranks, np.int64)
    for rank in pinned[pinned >= 0]:
        counts[rank] += 1
        extras -= counts[rank] == limit + 1
    least = sum_of_peaks(costs, owner, num_ranks)
    if above_caps(sizes, caps, owner, num_ranks) > 0:
        least = np.int64((1 << 63) - 1)
    peaks = np.empty((free.shape[0] + 1, costs.shape[1]), np.int64)
    for p in range(costs.shape[1]):
        peaks[0, p] = max(bounds[p], loads[:, p].max())
    choice = np.full(free.shape[0], np.int32(-1))
    depth = 0
    for _step in range(STEPS):
        if depth == free.shape[0]:
            owner[free], least = choice, peaks[depth].sum()
            depth -= 1
        sample, rank = free[depth], choice[depth]
        if rank >= 0:
            extras += counts[rank] == limit + 1
            counts[rank] -= 1
            loads[rank] -= costs[sample]
            filled[rank] -= sizes[sample]
        rank += 1
        choice[depth] = rank if rank < num_ranks else -1
        if rank == num_ranks:
            if depth == 0:
                return
            depth -= 1
            continue
        extras -= counts[rank] == limit
        counts[rank] += 1
        loads[rank] += costs[sample]
        filled[rank] += sizes[sample]
        peaks[depth + 1] = np.maximum(peaks[depth], loads[rank])
        kept = extras >= 0 and counts[rank] <= limit + 1
        for k in range(caps.shape[0]):
            kept &= filled[rank, k] <= caps[k]
        # Otherwise the next step takes this rank back, and tries the next one.
        depth += kept and peaks[depth + 1].sum() < least

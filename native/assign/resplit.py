"""Resplitting kernels: the heaviest rank and another with few samples together -> the best split of all of them.

If ranks have only a few samples each, moves and swaps of one sample get stuck: here every split is tried.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.ranking import SLACK, list_members, ranks_by_load
from orchdata.native.jit import kernel

MOST_TOGETHER = 12  # Samples of two ranks: 4,096 splits.
PARTNERS = 64


@kernel
def best_split(descending: NDArray[np.int64], both: NDArray[np.int32], fewest: int, most: int) -> tuple[int, int]:
    """Return the split of some samples in two with the smallest larger half.

    Subsets are visited in the order of the Gray code: each differs from the one before by one sample.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        both: int32 (k,), positions of the samples to split, k at most MOST_TOGETHER.
        fewest, most: limits of the number of samples in the first half.

    Returns:
        (its cost, bits of the samples in the first half).
    """
    total = np.int64(0)
    for position in both:
        total += descending[position]
    best = total
    best_bits = np.int64(0)
    any_split = fewest == 0
    cost = np.int64(0)
    size = 0
    bits = np.int64(0)
    for step in range(1, 1 << both.shape[0]):
        flipped = 0
        while step >> flipped & 1 == 0:
            flipped += 1
        bits ^= 1 << flipped
        if bits >> flipped & 1:
            cost += descending[both[flipped]]
            size += 1
        else:
            cost -= descending[both[flipped]]
            size -= 1
        peak = max(cost, total - cost)
        if fewest <= size <= most and (peak < best or not any_split):
            best, best_bits, any_split = peak, bits, True
    return best, best_bits


@kernel
def merged(first: NDArray[np.int32], second: NDArray[np.int32]) -> NDArray[np.int32]:
    """Merge two ascending lists of positions."""
    together = np.empty(first.shape[0] + second.shape[0], np.int32)
    i = 0
    j = 0
    for index in range(together.shape[0]):
        if j == second.shape[0] or (i < first.shape[0] and first[i] < second[j]):
            together[index] = first[i]
            i += 1
        else:
            together[index] = second[j]
            j += 1
    return together


@kernel
def resplit(
    descending: NDArray[np.int64],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    counts: NDArray[np.int32],
    target: int,
    limit: int,
    budget: int,
) -> None:
    """Lower the makespan towards `target` by new splits of the samples of the heaviest rank and another, in place.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        owner: int32 (num_samples,), rank of each, changed in place.
        loads: int64 (num_ranks,), changed in place.
        counts: int32 (num_ranks,), changed in place.
        target: makespan that is good enough.
        limit: most samples of a rank; -1: counts must not change.
        budget: samples to look at, about; eight splits count as one.
    """
    offsets, members = list_members(owner, counts, SLACK)
    while budget > 0:
        heavy = np.argmax(loads)
        if loads[heavy] <= target:
            return
        budget -= 16 * loads.shape[0]  # Sorting the ranks.
        samples = members[offsets[heavy] : offsets[heavy] + counts[heavy]]
        best = loads[heavy]
        best_bits = np.int64(0)
        partner = np.int64(-1)
        for light in ranks_by_load(loads, loads[heavy] - 1, False)[:PARTNERS]:
            together = counts[heavy] + counts[light]
            # No split is below half of both.
            if together > MOST_TOGETHER or (loads[heavy] + loads[light] + 1) // 2 >= best:
                continue
            most = min(together, offsets[heavy + 1] - offsets[heavy])
            fewest = max(0, together - (offsets[light + 1] - offsets[light]))
            if limit >= 0:
                most, fewest = min(most, limit), max(fewest, together - limit)
            else:
                most, fewest = np.int64(counts[heavy]), np.int64(counts[heavy])
            budget -= (1 << together) >> 3
            offered = members[offsets[light] : offsets[light] + counts[light]]
            peak, bits = best_split(descending, merged(samples, offered), fewest, most)
            if peak < best:
                best, best_bits, partner = peak, bits, np.int64(light)
                if best <= target:
                    break
        if partner < 0:
            return
        both = merged(samples, members[offsets[partner] : offsets[partner] + counts[partner]])
        counts[heavy], counts[partner] = 0, 0
        loads[heavy], loads[partner] = 0, 0
        for index in range(both.shape[0]):
            rank = heavy if best_bits >> index & 1 else partner
            owner[both[index]] = rank
            members[offsets[rank] + counts[rank]] = both[index]
            counts[rank] += 1
            loads[rank] += descending[both[index]]

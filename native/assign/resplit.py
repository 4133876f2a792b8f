"""Resplitting kernels: the heaviest rank and another with few samples together -> the best split of all of them.

Where ranks hold a handful of samples each, moves and swaps of one sample get stuck: here every split is tried.
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
    """The split of some samples in two with the smallest larger half.

    Subsets are walked in Gray code's order, each one sample away from the one before.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        both: int32 (k,), places of the samples to split, k at most MOST_TOGETHER.
        fewest, most: how many of them the first half may hold.

    Returns:
        (its cost, bits of the samples in the first half).
    """
    total = np.int64(0)
    for place in both:
        total += descending[place]
    best = total
    best_bits = np.int64(0)
    found = fewest == 0
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
        if fewest <= size <= most and (peak < best or not found):
            best, best_bits, found = peak, bits, True
    return best, best_bits


@kernel
def merged(first: NDArray[np.int32], second: NDArray[np.int32]) -> NDArray[np.int32]:
    """Two ascending lists of places as one."""
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
    """Lower the makespan towards `target` by splitting what the heaviest rank and another hold anew, in place.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        owner: int32 (num_samples,), rank of each, changed in place.
        loads: int64 (num_ranks,), changed in place.
        counts: int32 (num_ranks,), changed in place.
        target: makespan that is good enough.
        limit: samples a rank may hold; -1: counts must stay as they are.
        budget: samples to look at, about; eight splits count as one.
    """
    offsets, places = list_members(owner, counts, SLACK)
    while budget > 0:
        heavy = np.argmax(loads)
        if loads[heavy] <= target:
            return
        budget -= 16 * loads.shape[0]  # Sorting the ranks.
        held = places[offsets[heavy] : offsets[heavy] + counts[heavy]]
        best = loads[heavy]
        best_bits = np.int64(0)
        partner = np.int64(-1)
        for light in ranks_by_load(loads, loads[heavy] - 1, False)[:PARTNERS]:
            together = counts[heavy] + counts[light]
            # No split is below the half of both.
            if together > MOST_TOGETHER or (loads[heavy] + loads[light] + 1) // 2 >= best:
                continue
            most = min(together, offsets[heavy + 1] - offsets[heavy])
            fewest = max(0, together - (offsets[light + 1] - offsets[light]))
            if limit >= 0:
                most, fewest = min(most, limit), max(fewest, together - limit)
            else:
                most, fewest = np.int64(counts[heavy]), np.int64(counts[heavy])
            budget -= (1 << together) >> 3
            offered = places[offsets[light] : offsets[light] + counts[light]]
            peak, bits = best_split(descending, merged(held, offered), fewest, most)
            if peak < best:
                best, best_bits, partner = peak, bits, np.int64(light)
                if best <= target:
                    break
        if partner < 0:
            return
        both = merged(held, places[offsets[partner] : offsets[partner] + counts[partner]])
        counts[heavy], counts[partner] = 0, 0
        loads[heavy], loads[partner] = 0, 0
        for index in range(both.shape[0]):
            rank = heavy if best_bits >> index & 1 else partner
            owner[both[index]] = rank
            places[offsets[rank] + counts[rank]] = both[index]
            counts[rank] += 1
            loads[rank] += descending[both[index]]
